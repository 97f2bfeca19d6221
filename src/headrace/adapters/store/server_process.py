"""A child process that cannot outlive us, and the search for children that did."""

import ctypes
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.adapters.store.postgres_install import Account

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_KILL_TIMEOUT_S = 5.0


class ServerProcess:
    """A server in its own session and process group, so that a terminal's Ctrl-C does not reach it.

    When this process dies, even by SIGKILL, the kernel sends the server SIGINT: PostgreSQL's fast shutdown.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, log: Path, environment: Mapping[str, str], account: Account
    ) -> None:
        """Start ``command`` in ``directory`` as ``account``; its output is appended to ``log``.

        Raises:
            OSError: it cannot be started.
        """
        self.uid = account.uid
        self._ended = threading.Event()
        started: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

        def launch() -> None:
            try:
                with log.open("ab") as output:
                    started.put(_spawn(command, directory, output.fileno(), environment, account))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
                started.put(error)
                return
            self._ended.wait()

        # The kernel means the parent *thread*: the signal comes when the thread that forked ends. This one stays.
        threading.Thread(target=launch, name="postgres-parent", daemon=True).start()
        outcome = started.get()
        if isinstance(outcome, BaseException):
            raise outcome
        self._process = outcome

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """As ``Popen.poll``."""
        status = self._process.poll()
        if status is not None:
            self._ended.set()
        return status

    def stop(self, first: signal.Signals, timeout_s: float) -> None:
        """Send ``first`` and wait; then SIGQUIT, then SIGKILL."""
        for number, patience in ((first, timeout_s), (signal.SIGQUIT, _KILL_TIMEOUT_S), (signal.SIGKILL, None)):
            if self.poll() is not None:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self._ended.set()


def _spawn(
    command: Sequence[str], directory: Path, output: int, environment: Mapping[str, str], account: Account
) -> "subprocess.Popen[bytes]":
    parent = os.getpid()

    def die_with_parent() -> None:
        # Runs in the child after its change of user, which would clear the setting.
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,
        **account.popen_arguments(),
    )


@dataclass(frozen=True, slots=True)
class Stray:
    """A process of an earlier server; the start time tells it from a later one with the same number."""

    pid: int
    started: str


def strays(cluster_name: str, uid: int) -> list[Stray]:
    """Processes of user ``uid`` whose command line says that they serve ``cluster_name``.

    PostgreSQL's children lead process groups of their own, so the group does not find them; their titles do.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if _serves(command, cluster_name.encode()) and entry.stat().st_uid == uid:
                # Field 22, counted behind the command's name, which may contain anything.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    found.append(Stray(int(entry.name), fields[19]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


def _serves(command: bytes, cluster_name: bytes) -> bool:
    # The main process shows its arguments; a child shows the title "postgres: <cluster_name>: <what it does>".
    main = b"cluster_name=" + cluster_name in command.split(b"\0")
    return main or command.startswith(b"postgres: " + cluster_name + b":")
