#!/usr/bin/env bash
# Prints the first Python on the PATH that Headrace supports and that can make virtual environments.
set -u
for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
  [ -n "$candidate" ] || continue
  if "$candidate" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 14)))' 2>/dev/null; then
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      echo "$candidate"
      exit 0
    fi
    lacks_venv="$candidate"
  fi
done
if [ -n "${lacks_venv:-}" ]; then
  echo "$lacks_venv cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2
else
  echo "Headrace needs Python 3.11, 3.12 or 3.13; none was found on the PATH. On Debian and Ubuntu: apt install python3 python3-venv, or set PYTHON=/path/to/python" >&2
fi
exit 1
