"""``python -m headrace`` is the ``headrace`` command."""

from headrace.apps.cli import main

main()
