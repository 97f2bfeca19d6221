"""The engine as a port: a thread that steps, and a bridge to the event loop that everyone else lives on.

The thread owns the core. The event loop hands it requests and aborts through an inbox, and gets frames back through an
outbox; both are bounded, by credit and by :data:`_MAX_UNREAD_FRAMES`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import structlog

from headrace.core.clock import Clock
from headrace.core.errors import AuditFailed, Draining, EngineDead, InvalidRequest, Overloaded
from headrace.core.frames import EngineDescription, EngineLoad, EngineStats, StepFrame
from headrace.core.ids import SequenceId
from headrace.core.requests import GenerationRequest
from headrace.engine.core import FAILED_MESSAGE, EngineCore, describe

_log = structlog.get_logger(__name__)

MAX_FAILED_STEPS = 3
"""After so many failed steps in a row the engine is dead."""

_MAX_UNREAD_FRAMES = 1024
"""The engine pauses when nobody reads its frames."""

_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Submission:
    request: GenerationRequest
    arrival_s: float


class NativeEngine:
    """Implements ``ports.engine.Engine`` on an :class:`EngineCore`. The thread starts at once."""

    def __init__(
        self,
        core: EngineCore,
        description: EngineDescription,
        clock: Clock,
        *,
        capacity: int,
        stall_timeout_s: float,
        memory: dict[str, int],
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        """The core belongs to this engine from now on.

        ``capacity``: sequences in flight at most. ``on_thread_start`` runs in the engine's thread first.
        """
        self._core = core
        self._admission = core.admission
        self._description = description
        self._clock = clock
        self._capacity = capacity
        self._stall_timeout_s = stall_timeout_s
        self._memory = memory
        self._on_thread_start = on_thread_start
        self._lock = threading.Condition()
        # All below is shared between the thread and the event loop, under the lock.
        self._inbox: deque[_Submission] = deque()
        self._aborts: set[SequenceId] = set()
        self._outbox: deque[StepFrame] = deque()
        self._in_flight: set[SequenceId] = set()
        self._load = core.load()
        self._stats = core.stats(memory)
        self._progress_s = clock.monotonic()
        self._draining = False
        self._closed = False
        self._dead: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def describe(self) -> EngineDescription:
        return self._description

    def load(self) -> EngineLoad:
        with self._lock:
            credit = 0 if self._draining or self._dead else self._capacity - len(self._in_flight)
            return msgspec.structs.replace(self._load, credit=credit)

    def submit(self, request: GenerationRequest) -> None:
        # Looks at every token of the prompt: not while the engine's thread might wait for the lock.
        self._admission.check(request)
        with self._lock:
            if self._dead is not None or self._closed:
                raise EngineDead(self._dead or "the engine is closed")
            if self._draining:
                raise Draining("the engine is draining and takes no new sequences")
            if request.sequence_id in self._in_flight:
                raise InvalidRequest(f"sequence {request.sequence_id} is in flight already", param="sequence_id")
            if len(self._in_flight) >= self._capacity:
                raise Overloaded(f"the engine has {self._capacity} sequences in flight and takes no more")
            now = self._clock.monotonic()
            if not self._in_flight:
                self._progress_s = now
            self._in_flight.add(request.sequence_id)
            self._inbox.append(_Submission(request, now))
            self._lock.notify()

    def abort(self, sequence_id: SequenceId) -> None:
        with self._lock:
            if sequence_id in self._in_flight:
                self._aborts.add(sequence_id)
                self._lock.notify()

    async def frames(self) -> AsyncIterator[StepFrame]:
        self._bind_loop()
        while True:
            self._news.clear()
            with self._lock:
                # One at a time, so that a reader who leaves takes no frame along that nobody saw.
                frame = self._outbox.popleft() if self._outbox else None
                self._lock.notify()
                closed, dead = self._closed, self._dead
            if closed:
                return
            if frame is not None:
                yield frame
            elif dead is not None:
                raise EngineDead(dead)
            else:
                await self._news.wait()

    async def stats(self) -> EngineStats:
        with self._lock:
            busy = bool(self._in_flight)
            age_s = self._clock.monotonic() - self._progress_s if busy else 0.0
            credit = 0 if self._draining else self._capacity - len(self._in_flight)
            return msgspec.structs.replace(
                self._stats,
                load=msgspec.structs.replace(self._stats.load, credit=credit),
                last_progress_age_s=age_s,
                healthy=self._dead is None and age_s <= self._stall_timeout_s,
                draining=self._draining,
            )

    async def drain(self) -> None:
        self._bind_loop()
        with self._lock:
            self._draining = True
        while True:
            self._idle.clear()
            with self._lock:
                if not self._in_flight or self._dead is not None or self._closed:
                    return
            await self._idle.wait()

    async def close(self) -> None:
        self._bind_loop()
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._news.set()
        self._idle.set()
        # A step that hangs must not hang the caller; the thread is a daemon.
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)

    def _bind_loop(self) -> None:
        self._loop = asyncio.get_running_loop()

    def _signal(self, event: asyncio.Event) -> None:
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                _log.info("the event loop is gone; nobody reads the engine's frames")

    # Below here: the engine's thread.

    def _run(self) -> None:
        try:
            if self._on_thread_start is not None:
                self._on_thread_start()
            while self._wait_for_work():
                self._publish(self._step())
                if self._core.num_failed_steps >= MAX_FAILED_STEPS:
                    self._die(f"{MAX_FAILED_STEPS} steps in a row failed")
                    return
        except Exception as error:  # noqa: BLE001 -- nobody above this frame could tell that the thread is gone
            _log.critical("the engine's thread failed", error=describe(error))
            self._die("its thread failed")

    def _step(self) -> StepFrame:
        core = self._core
        try:
            self._receive()
            frame = core.step()
        except Exception as error:  # noqa: BLE001 -- a defect ends the sequences in flight, not the engine
            _log.critical("the engine's own bookkeeping failed", error=describe(error))
            core.fail_all(FAILED_MESSAGE)
            frame = core.step()
        if not core.has_work:
            self._audit()
        return frame

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._closed:
                if len(self._outbox) < _MAX_UNREAD_FRAMES and (self._inbox or self._aborts or self._core.has_news):
                    return True
                self._lock.wait()
            return False

    def _receive(self) -> None:
        while True:
            with self._lock:
                if not self._inbox:
                    aborts, self._aborts = self._aborts, set()
                    break
                submission = self._inbox.popleft()
            self._core.add(submission.request, submission.arrival_s)
        for sequence_id in aborts:
            self._core.abort(sequence_id)

    def _audit(self) -> None:
        try:
            self._core.audit()
        except AuditFailed as error:
            _log.critical("blocks are not all back although nothing runs; starting from empty ones", error=str(error))
            self._core.fail_all(FAILED_MESSAGE)

    def _publish(self, frame: StepFrame) -> None:
        finished = [delta.sequence_id for delta in frame.deltas if delta.finish is not None]
        stats = self._core.stats(self._memory)
        with self._lock:
            self._in_flight.difference_update(finished)
            idle = not self._in_flight
            self._load = frame.load
            self._stats = stats
            self._progress_s = self._clock.monotonic()
            credit = 0 if self._draining else self._capacity - len(self._in_flight)
            self._outbox.append(msgspec.structs.replace(frame, load=msgspec.structs.replace(frame.load, credit=credit)))
        self._signal(self._news)
        if idle:
            self._signal(self._idle)

    def _die(self, reason: str) -> None:
        _log.critical("the engine is dead", reason=reason)
        with self._lock:
            self._dead = f"the engine is dead: {reason}"
            self._in_flight.clear()
        self._signal(self._news)
        self._signal(self._idle)
