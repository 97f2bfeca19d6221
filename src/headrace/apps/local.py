"""The layout of a data directory that ``headrace up`` keeps, and the credentials in it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError


def default_data_dir() -> Path:
    """``.headrace`` if there is one here, as ``make up`` leaves it in a checkout; else ``$XDG_DATA_HOME/headrace``,
    usually ``~/.local/share/headrace``."""
    if (here := Path(".headrace")).is_dir():
        return here
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "headrace"


class Credentials(msgspec.Struct, frozen=True):
    """The keys of a local installation. The database holds only their hashes; this file is the one copy."""

    api_key: str
    admin_key: str


class WorkerEndpoint(msgspec.Struct, frozen=True):
    """Where one worker can be asked how it is."""

    name: str
    metrics_url: str


class Ready(msgspec.Struct, frozen=True):
    """What ``--ready-file`` holds once the platform serves."""

    base_url: str
    """For OpenAI clients: ends in ``/v1``."""
    api_key: str
    admin_key: str
    pids: dict[str, int]
    """By process name: ``up``, ``postgres``, ``worker-0``, ``gateway-0``, …"""
    model: str
    """``name@version``"""
    workers: list[WorkerEndpoint] = []


class DataDir:
    """Paths inside a data directory."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.postgres = self.root / "postgres"
        self.blobs = self.root / "blobs"
        self.cache = self.root / "cache"
        self.tls = self.root / "tls"
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self.credentials = self.root / "credentials.json"
        self.ready = self.run / "ready.json"
        self.storage = self.run / "storage.toml"

    def create(self) -> None:
        """Make the directories; only their owner may look into them.

        Raises:
            ConfigError: the place cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for directory in (self.blobs, self.cache, self.tls, self.run, self.logs):
                directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--data {self.root}: cannot make the data directory: {error.strerror}") from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; the kernel lets go of it when the process ends, however it ends.

        Raises:
            ConfigError: another process holds it.
        """
        descriptor = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(descriptor, 32).decode(errors="replace").strip()
                raise ConfigError(
                    f"{self.root} is in use by another headrace (process {holder}); stop that one, or give --data"
                ) from error
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            os.close(descriptor)

    def in_use(self) -> bool:
        """Whether a process holds :meth:`lock`."""
        try:
            with self.lock():
                return False
        except ConfigError:
            return True

    def read_ready(self) -> Ready | None:
        """What the platform that runs (or ran last) in this directory wrote; None if none did."""
        try:
            return msgspec.json.decode(self.ready.read_bytes(), type=Ready)
        except (OSError, msgspec.MsgspecError):
            return None


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, atomically."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)
    part.write_bytes(data)
    part.replace(path)
