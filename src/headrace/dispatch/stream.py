"""One sequence as its consumer sees it."""

import asyncio
import enum
from collections import deque

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.frames import SequenceDelta, SequenceTiming
from headrace.core.ids import WorkerId
from headrace.core.requests import GenerationRequest


class StreamBreakdown(msgspec.Struct):
    """Where a sequence's time went. Times ``*_at`` are the dispatcher's clock (monotonic seconds)."""

    queued_at: float
    queue_s: float | None = None
    """From entering the queue until a worker was chosen."""
    dispatch_s: float | None = None
    """Of the time until the first token, what neither the queue nor the worker accounts for: the way there and back.
    Known with the last delta."""
    worker_id: WorkerId | None = None
    submitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    timing: SequenceTiming | None = None
    """The worker's own account: waiting, prefill, decode. Comes with the last delta."""


class StreamState(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    """A worker has it, and has not said that it is finished."""
    ENDED = enum.auto()
    """Finished, failed, or left by its consumer: no worker has it."""


class GenerationStream:
    """An asynchronous iterator over the deltas of one sequence; one consumer.

    It ends after the delta whose ``finish`` is set. If the worker is lost, it raises ``EngineDead`` after the deltas
    that came before. ``FinishReason.ERROR`` is a delta like any other, unless it comes first and says that the worker
    has no room after all: then the sequence waits for a worker again, and the stream raises if none takes it in time.

    What a slow consumer has not read yet is kept: at most ``max_tokens`` tokens in at most ``max_tokens + 1`` deltas,
    because every delta but the last carries a token.
    """

    def __init__(self, request: GenerationRequest, now: float) -> None:
        self.request = request
        self.breakdown = StreamBreakdown(queued_at=now)
        self.state = StreamState.QUEUED
        self._deltas: deque[SequenceDelta] = deque()
        self._error: HeadraceError | None = None
        self._finished = False
        self._consumer: asyncio.Future[None] | None = None

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> SequenceDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            await self._woken()
        return self._deltas.popleft()

    @property
    def num_unread(self) -> int:
        """Deltas that wait for the consumer."""
        return len(self._deltas)

    async def started(self) -> None:
        """Return when a worker has taken the sequence.

        Raises:
            HeadraceError: why none did.
        """
        while self.state is StreamState.QUEUED:
            await self._woken()
        if self._error is not None:
            raise self._error

    def start(self, worker_id: WorkerId, now: float) -> None:
        """A worker has taken it. Called by the dispatcher."""
        self.state = StreamState.RUNNING
        self.breakdown.worker_id = worker_id
        self.breakdown.submitted_at = now
        self.breakdown.queue_s = now - self.breakdown.queued_at
        self._wake()

    def requeue(self) -> None:
        """The worker that had taken it did not keep it, and nothing came of it. Called by the dispatcher."""
        self.state = StreamState.QUEUED
        self.breakdown = StreamBreakdown(queued_at=self.breakdown.queued_at)

    def push(self, delta: SequenceDelta, now: float) -> None:
        """What the worker said. Called by the dispatcher."""
        if not delta.token_ids and delta.finish is None:
            return
        breakdown = self.breakdown
        if delta.token_ids:
            breakdown.last_token_at = now
            if breakdown.first_token_at is None:
                breakdown.first_token_at = now
        if delta.finish is not None:
            self._finished = True
            self.state = StreamState.ENDED
            self._account(delta.timing)
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """Nothing more comes, because of ``error``. Called by the dispatcher."""
        self._error = error
        self.state = StreamState.ENDED
        self._wake()

    def leave(self) -> None:
        """The consumer has gone; nothing is kept for it."""
        self.state = StreamState.ENDED
        self._finished = True
        self._deltas.clear()

    def _account(self, timing: SequenceTiming | None) -> None:
        breakdown = self.breakdown
        breakdown.timing = timing
        if timing is not None and breakdown.first_token_at is not None and breakdown.submitted_at is not None:
            elapsed = breakdown.first_token_at - breakdown.submitted_at
            breakdown.dispatch_s = max(0.0, elapsed - timing.wait_s - timing.prefill_s)

    async def _woken(self) -> None:
        self._consumer = asyncio.get_running_loop().create_future()
        try:
            await self._consumer
        finally:
            self._consumer = None

    def _wake(self) -> None:
        if self._consumer is not None and not self._consumer.done():
            self._consumer.set_result(None)
