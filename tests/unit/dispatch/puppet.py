"""An engine that a test moves by hand, and what its tests have in common."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headrace.core.errors import (
    EngineDead,
    HeadraceError,
)
from headrace.core.frames import EngineDescription, EngineLoad, EngineStats, SequenceDelta, StepFrame
from headrace.core.ids import ModelName, SequenceId, TenantId, VersionId, WorkerId
from headrace.core.requests import FinishReason, GenerationRequest, ServiceClass, StopConditions
from headrace.dispatch.config import DispatchConfig
from headrace.dispatch.dispatcher import Dispatcher
from headrace.ports.engine import Engine

MODEL = ModelName("m")
V1 = VersionId("111111111111")
V2 = VersionId("222222222222")
LOAD = EngineLoad(
    num_running=0,
    num_waiting=0,
    num_queued_tokens=0,
    num_free_blocks=100,
    num_blocks=100,
    credit=4,
    prefill_tokens_per_s=0.0,
    step_s=0.0,
)
FAST = DispatchConfig(reconnect_min_s=0.001, reconnect_max_s=0.002, refusal_pause_s=0.001)


class Puppet:
    """An engine that does what the test says, and remembers what it was told."""

    def __init__(self, *, credit: int = 4, version: VersionId = V1, max_model_len: int = 512) -> None:
        self.credit = credit
        self.version = version
        self.max_model_len = max_model_len
        self.submitted: list[SequenceId] = []
        self.aborted: list[SequenceId] = []
        self.refusal: HeadraceError | None = None
        self.closed = False
        self._events: asyncio.Queue[StepFrame | EngineDead] = asyncio.Queue()

    def describe(self) -> EngineDescription:
        return EngineDescription(MODEL, self.version, self.max_model_len, 100, 16, 100, 4, "none", "puppet")

    def load(self) -> EngineLoad:
        return msgspec.structs.replace(LOAD, credit=self.credit)

    def submit(self, request: GenerationRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.credit -= 1
        self.submitted.append(request.sequence_id)

    def abort(self, sequence_id: SequenceId) -> None:
        self.aborted.append(sequence_id)

    async def frames(self) -> AsyncIterator[StepFrame]:
        while True:
            event = await self._events.get()
            if isinstance(event, EngineDead):
                raise event
            yield event

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def drain(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True

    def say(self, *deltas: SequenceDelta, credit: int | None = None) -> None:
        self.credit = self.credit if credit is None else credit
        self._events.put_nowait(StepFrame(1, list(deltas), self.load()))

    def die(self) -> None:
        self._events.put_nowait(EngineDead("killed"))


def connector(*engines: Engine) -> Callable[[], Awaitable[Engine]]:
    """Connects to each engine in turn, and after the last to none."""
    left = list(engines)

    async def connect() -> Engine:
        if not left:
            raise EngineDead("connection refused")
        return left.pop(0)

    return connect


def request(name: str, *, service_class: ServiceClass = ServiceClass.DEFAULT, num_prompt: int = 3) -> GenerationRequest:
    return GenerationRequest(
        SequenceId(name), TenantId("t"), [1] * num_prompt, StopConditions(max_tokens=8), service_class=service_class
    )


def delta(name: str, *token_ids: int, finish: FinishReason | None = None) -> SequenceDelta:
    return SequenceDelta(SequenceId(name), list(token_ids), finish=finish)


@asynccontextmanager
async def dispatching(
    *workers: Callable[[], Awaitable[Engine]] | Puppet, config: DispatchConfig = FAST, wait: bool = True
) -> AsyncIterator[Dispatcher]:
    connectors = {
        WorkerId(f"w{i}"): connector(worker) if isinstance(worker, Puppet) else worker
        for i, worker in enumerate(workers)
    }
    dispatcher = Dispatcher(connectors, config)
    await dispatcher.start()
    try:
        if wait:
            await until(lambda: len(dispatcher.served()) == len(workers))
        yield dispatcher
        dispatcher.audit()
    finally:
        await dispatcher.close()
    dispatcher.audit()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def consume(dispatcher: Dispatcher, of: GenerationRequest, **options: Any) -> list[int]:
    async with dispatcher.stream(of, MODEL, **options) as stream:
        return [token for delta in [d async for d in stream] for token in delta.token_ids]


def refused(name: str, error: HeadraceError) -> SequenceDelta:
    """A far worker's only word about a sequence that it has not taken."""
    return SequenceDelta(SequenceId(name), finish=FinishReason.ERROR, error=str(error), error_code=error.code)
