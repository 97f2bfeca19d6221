"""The dispatcher's end of one worker: connects, routes its frames to streams, and connects again."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import Draining, EngineDead, HeadraceError, Overloaded, from_code
from headrace.core.frames import EngineDescription, EngineLoad, SequenceDelta, StepFrame
from headrace.core.ids import SequenceId, WorkerId
from headrace.core.requests import FinishReason
from headrace.dispatch.config import DispatchConfig
from headrace.dispatch.pick import Candidate
from headrace.dispatch.stream import GenerationStream, StreamState
from headrace.ports.engine import Engine

log = logging.getLogger(__name__)

Connector = Callable[[], Awaitable[Engine]]

_TRIES_PER_WARNING = 20


class WorkerLink:
    """Owns the engine of one worker and the streams that run on it. One task, :meth:`run`, drives it."""

    def __init__(
        self,
        worker_id: WorkerId,
        connect: Connector,
        config: DispatchConfig,
        clock: Clock,
        *,
        on_membership: Callable[[], None],
        on_load: Callable[[], None],
        on_refused: Callable[[GenerationStream], None],
    ) -> None:
        """``on_membership`` is called when the worker came or went, ``on_load`` after each of its frames, and before
        that ``on_refused`` for each stream that it does not keep for want of room: it is the dispatcher's again."""
        self.worker_id = worker_id
        self._connect = connect
        self._config = config
        self._clock = clock
        self._on_membership = on_membership
        self._on_load = on_load
        self._on_refused = on_refused
        self._random = random.Random()  # noqa: S311 - spreads reconnects; nothing secret
        self._engine: Engine | None = None
        self.description: EngineDescription | None = None
        """None while the worker is not connected."""
        self.streams: dict[SequenceId, GenerationStream] = {}
        self.refuses = False
        """It refused a request despite its credit; until its next frame it is not asked."""
        self.drains = False
        """It takes no more requests in this connection."""
        self._num_failures = 0
        self._num_unreported = 0
        self._num_unreported_tokens = 0

    @property
    def serves(self) -> EngineDescription | None:
        """What new requests can get here; None while not connected or draining."""
        return None if self.drains else self.description

    def load(self) -> EngineLoad | None:
        """The engine's load, with what was submitted since its last frame; None while not connected."""
        if self._engine is None:
            return None
        load = self._engine.load()
        if self._num_unreported == 0:
            return load
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + self._num_unreported,
            num_queued_tokens=load.num_queued_tokens + self._num_unreported_tokens,
        )

    def candidate(self) -> Candidate | None:
        """This worker for :func:`~headrace.dispatch.pick.pick`; None if it takes nothing now."""
        load = None if self.refuses or self.drains else self.load()
        if load is None or self.description is None:
            return None
        return Candidate(self.worker_id, load, self.description.block_size, self.description.max_model_len)

    def submit(self, stream: GenerationStream) -> None:
        """Hand a sequence over. From here until its last delta, the worker owns it.

        Raises:
            HeadraceError: as ``Engine.submit``; then the stream is as it was.
        """
        if self._engine is None:
            raise EngineDead(f"worker {self.worker_id} is not connected")
        request = stream.request
        self._engine.submit(request)
        self.streams[request.sequence_id] = stream
        self._num_unreported += 1
        self._num_unreported_tokens += len(request.prompt)
        stream.start(self.worker_id, self._clock.monotonic())

    def abort(self, stream: GenerationStream) -> None:
        """Take a sequence back if it still runs. Its last delta, when it comes, finds nobody."""
        if self.streams.pop(stream.request.sequence_id, None) is not None and self._engine is not None:
            self._engine.abort(stream.request.sequence_id)

    async def run(self) -> None:
        """Connect and pump frames, again and again, until cancelled."""
        while True:
            try:
                await self._live_once()
            # A defect in an adapter costs one connection, not the worker for good.
            except Exception as error:
                expected = isinstance(error, HeadraceError | OSError)
                # One outage is many failed tries; the first says why, and one in a while that it lasts.
                level = (
                    logging.WARNING if self._num_failures % _TRIES_PER_WARNING == 0 or not expected else logging.DEBUG
                )
                log.log(level, "worker %s: %s", self.worker_id, _reason(error), exc_info=not expected)
            await asyncio.sleep(self._pause_s())

    async def _live_once(self) -> None:
        async with asyncio.timeout(self._config.connect_timeout_s):
            engine = await self._connect()
        connected_at = self._clock.monotonic()
        reason = "it closed the connection"
        try:
            self.description = engine.describe()
            self._engine = engine
            log.info("worker %s: connected, serves %s", self.worker_id, self.description.model)
            self._on_membership()
            async for frame in engine.frames():
                self._num_failures = 0
                self._route(frame)
        except asyncio.CancelledError:
            reason = "the server is shutting down"
            raise
        except Exception as error:
            reason = _reason(error) if isinstance(error, HeadraceError | OSError) else "internal error"
            raise
        finally:
            if self._clock.monotonic() - connected_at > self._config.reconnect_max_s:
                self._num_failures = 0
            log.info("worker %s: lost: %s", self.worker_id, reason)
            # Addresses and system errors stay in the log: this is for the caller's eyes.
            message = f"worker {self.worker_id} was lost before the answer was complete; send the request again"
            self._lose(EngineDead(message, retry_after_s=1.0))
            async with asyncio.timeout(self._config.connect_timeout_s):
                await engine.close()

    def _route(self, frame: StepFrame) -> None:
        now = self._clock.monotonic()
        self.refuses = False
        self._num_unreported = 0
        self._num_unreported_tokens = 0
        drained_before = self.drains
        for delta in frame.deltas:
            stream = self.streams.get(delta.sequence_id)
            if stream is None:
                continue
            refusal = _refusal(delta, stream)
            if refusal is None:
                stream.push(delta, now)
                if stream.state is StreamState.ENDED:
                    del self.streams[delta.sequence_id]
                continue
            del self.streams[delta.sequence_id]
            self.refuses = True
            self.drains = self.drains or isinstance(refusal, Draining)
            self._on_refused(stream)
        if self.drains != drained_before:
            self._on_membership()
        else:
            self._on_load()

    def _lose(self, error: EngineDead) -> None:
        """Forget the engine: its streams fail at once."""
        was_connected = self.description is not None
        self._engine = None
        self.description = None
        self.refuses = False
        self.drains = False
        self._num_unreported = 0
        self._num_unreported_tokens = 0
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.fail(error)
        if was_connected:
            self._on_membership()

    def _pause_s(self) -> float:
        """Exponential backoff with jitter over its upper half. A connection that sent a frame, or lasted, resets it."""
        pause = min(self._config.reconnect_max_s, self._config.reconnect_min_s * 2.0 ** min(self._num_failures, 30))
        self._num_failures += 1
        return pause * self._random.uniform(0.5, 1.0)


def _refusal(delta: SequenceDelta, stream: GenerationStream) -> Overloaded | Draining | None:
    """Why a worker did not keep a sequence that it had credit for, if it is no fault of the sequence's."""
    if delta.finish is not FinishReason.ERROR or delta.token_ids or stream.breakdown.first_token_at is not None:
        return None
    error = from_code(delta.error_code, delta.error or "")
    return error if isinstance(error, Overloaded | Draining) else None


def _reason(error: Exception) -> str:
    return "connecting took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
