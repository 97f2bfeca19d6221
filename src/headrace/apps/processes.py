"""Child processes that stay up: start, watch, restart with backoff, stop in order, never outlive their parent."""

import asyncio
import contextlib
import ctypes
import gc
import io
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.apps.logs import PROGRESS_EVENT

BACKOFF_START_S = 0.1
BACKOFF_LIMIT_S = 5.0
HEALTHY_AFTER_S = 10.0
"""A process that ran this long starts its next life without backoff."""
LOG_LIMIT_BYTES = 32 << 20
MAX_LINE_BYTES = 1 << 20
LAST_WORDS_S = 1.0
"""After a process's end, how long the rest of its output is waited for."""
NOT_STARTED = 127
"""What a shell says of a program that it cannot start."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent dies, however it dies (Linux only)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def settle_garbage_collector() -> None:
    """Tell the collector that all objects made so far stay, and to look less often for those that do not.

    A serving process makes many short-lived objects without cycles; collecting at the default pace took up to half of
    the time a token costs on the wire.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class Child:
    """One supervised process in a session of its own, so that Ctrl-C at the terminal reaches only the supervisor.

    Its standard output goes to a log file of bounded size (one older generation is kept); lines that report progress
    also go to ``on_progress``.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        on_progress: Callable[[str, str, int, int], None] | None = None,
    ) -> None:
        self.name = name
        self.num_starts = 0
        self.last_exit: int | None = None
        self._log_start = 0
        self._argv = list(argv)
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The present process's id; None while it is down."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self) -> None:
        """Begin to keep the process up. Returns at once."""
        with contextlib.suppress(OSError):
            self._log_start = self._log.stat().st_size
        self._task = asyncio.create_task(self._keep_up(), name=f"keep {self.name} up")

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL after ``timeout_s``. True if it ended by itself. Idempotent."""
        self._stopping.set()
        process, clean = self._process, True
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                clean = False
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if process is not None:
            await process.wait()
        return clean

    @property
    def log(self) -> Path:
        """Where its standard output goes."""
        return self._log

    def tail(self, num_lines: int = 12) -> list[str]:
        """The last lines it wrote since :meth:`start`, for a message about why it does not start."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start if file.seek(0, os.SEEK_END) >= self._log_start else 0)
                return file.read().decode(errors="replace").splitlines()[-num_lines:]
        except OSError:
            return []

    async def _keep_up(self) -> None:
        backoff_s = BACKOFF_START_S
        while not self._stopping.is_set():
            started = time.monotonic()
            self.num_starts += 1
            try:
                self.last_exit = await self._run_once()
            except OSError as error:  # no memory, no descriptors, no program: perhaps there is later
                self.last_exit = NOT_STARTED
                with contextlib.closing(_BoundedLog(self._log)) as log:
                    log.write(f"cannot be started: {error}\n".encode())
            if self._stopping.is_set():
                return
            if time.monotonic() - started > HEALTHY_AFTER_S:
                backoff_s = BACKOFF_START_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_LIMIT_S)

    async def _run_once(self) -> int:
        """Start the process and wait for its end.

        Raises:
            OSError: it cannot be started.
        """
        # A pipe of our own: with asyncio's, waiting for the process would last until nobody holds the other end, and a
        # process that it started itself may do that for as long as it likes.
        read_end, write_end = os.pipe()
        with io.FileIO(read_end, "rb") as pipe:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=asyncio.subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
            copying = asyncio.create_task(self._copy_output(pipe), name=f"copy the output of {self.name}")
            try:
                status = await process.wait()
                await asyncio.wait([copying], timeout=LAST_WORDS_S)
                return status
            finally:
                copying.cancel()
                await asyncio.gather(copying, return_exceptions=True)

    async def _copy_output(self, pipe: io.FileIO) -> None:
        output = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), pipe
        )
        with contextlib.closing(transport), contextlib.closing(_BoundedLog(self._log)) as log:
            while True:
                try:
                    line = await output.readline()
                except ValueError:  # a line longer than the limit: what was read of it is gone
                    continue
                if not line:
                    return
                if not self._is_progress(line):
                    log.write(line)

    def _is_progress(self, line: bytes) -> bool:
        """Whether a line only says how far a step is; it was passed on then, and the log is spared it."""
        if self._on_progress is None or b'"progress"' not in line:
            return False
        try:
            entry = msgspec.json.decode(line, type=_ProgressLine)
        except msgspec.MsgspecError:
            return False
        if entry.event != PROGRESS_EVENT:
            return False
        self._on_progress(self.name, entry.stage, entry.done, entry.total)
        return True


class _BoundedLog:
    """A file that starts anew when it is full. What cannot be written, say to a full disk, is lost and no more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None and self._file.tell() > LOG_LIMIT_BYTES:
                self.close()
                self._path.replace(self._path.with_suffix(".log.1"))
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class _ProgressLine(msgspec.Struct, frozen=True):
    event: str
    stage: str = ""
    done: int = 0
    total: int = 0
