"""The dispatcher on fake engines that run by themselves, die, stall and come back."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.core.errors import EngineDead, HeadraceError, Unavailable
from headrace.core.ids import ModelName, SequenceId, TenantId, WorkerId
from headrace.core.requests import FinishReason, GenerationRequest, SamplingParams, StopConditions
from headrace.dispatch.config import DispatchConfig
from headrace.dispatch.dispatcher import Dispatcher

MODEL = ModelName("fake")
CONFIG = DispatchConfig(reconnect_min_s=0.001, reconnect_max_s=0.004, refusal_pause_s=0.001)


class Workers:
    """Fake workers that can be killed; each connection gets a new engine."""

    def __init__(self, num_workers: int, config: FakeConfig) -> None:
        self.config = config
        self.engines: dict[WorkerId, FakeEngine] = {}
        self.ids = [WorkerId(f"w{i}") for i in range(num_workers)]

    def connectors(self) -> dict[WorkerId, Callable[[], Awaitable[FakeEngine]]]:
        return {worker_id: self._connector(worker_id) for worker_id in self.ids}

    def _connector(self, worker_id: WorkerId) -> Callable[[], Awaitable[FakeEngine]]:
        async def connect() -> FakeEngine:
            self.engines[worker_id] = FakeEngine(self.config)
            return self.engines[worker_id]

        return connect

    async def all_idle(self) -> None:
        """Return when no living engine has work."""
        async with asyncio.timeout(10):
            while any(e.load().num_running + e.load().num_waiting for e in self.engines.values()):
                await asyncio.sleep(0.001)


def request(name: str, *, num_prompt: int = 4, max_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(
        SequenceId(name),
        TenantId("t"),
        [1 + len(name)] * num_prompt,
        StopConditions(max_tokens),
        SamplingParams(temperature=0),
    )


async def generate(dispatcher: Dispatcher, of: GenerationRequest) -> tuple[list[int], WorkerId | None]:
    tokens: list[int] = []
    finish = None
    async with dispatcher.stream(of, MODEL) as stream:
        async for delta in stream:
            tokens += delta.token_ids
            finish = delta.finish
    assert finish is FinishReason.LENGTH
    assert len(tokens) == of.stop.max_tokens
    return tokens, stream.breakdown.worker_id


async def ready(workers: Workers, config: DispatchConfig = CONFIG) -> Dispatcher:
    dispatcher = Dispatcher(workers.connectors(), config)
    await dispatcher.start()
    async with asyncio.timeout(10):
        while len(dispatcher.served()) < len(workers.ids):
            await asyncio.sleep(0)
    return dispatcher


async def test_many_more_requests_than_slots_all_finish_and_spread() -> None:
    workers = Workers(3, FakeConfig(max_num_seqs=4, max_waiting=1, step_s=0.0005))
    dispatcher = await ready(workers)
    results = await asyncio.gather(*(generate(dispatcher, request(f"s{i}")) for i in range(120)))
    by_worker = Counter(worker_id for _, worker_id in results)
    assert set(by_worker) == set(workers.ids)
    assert min(by_worker.values()) >= 20
    dispatcher.audit()
    await workers.all_idle()
    await dispatcher.close()


async def test_a_burst_on_idle_equal_workers_is_dealt_out_evenly() -> None:
    workers = Workers(4, FakeConfig(max_num_seqs=16, step_s=0.001))
    dispatcher = await ready(workers)
    results = await asyncio.gather(*(generate(dispatcher, request(f"s{i:02}")) for i in range(32)))
    assert Counter(worker_id for _, worker_id in results) == dict.fromkeys(workers.ids, 8)
    await dispatcher.close()


async def test_a_stalled_worker_holds_only_what_it_has() -> None:
    workers = Workers(2, FakeConfig(max_num_seqs=2, max_waiting=0, step_s=0.0005))
    dispatcher = await ready(workers)
    workers.engines[WorkerId("w0")].stall()
    tasks = [asyncio.create_task(generate(dispatcher, request(f"s{i}"))) for i in range(20)]
    async with asyncio.timeout(10):
        while sum(task.done() for task in tasks) < 18:
            await asyncio.sleep(0.001)
    assert {task.result()[1] for task in tasks if task.done()} == {"w1"}
    workers.engines[WorkerId("w0")].resume()
    await asyncio.gather(*tasks)
    dispatcher.audit()
    await dispatcher.close()


async def test_the_last_worker_lost_and_found_again() -> None:
    workers = Workers(1, FakeConfig(step_s=0.001))
    dispatcher = await ready(workers)
    running = asyncio.create_task(generate(dispatcher, request("a", max_tokens=1000)))
    while not dispatcher.num_running:
        await asyncio.sleep(0)
    workers.engines[WorkerId("w0")].kill()
    with pytest.raises(EngineDead):
        await running
    with pytest.raises(Unavailable):
        await generate(dispatcher, request("b"))
    await dispatcher.wait_until_served(MODEL)
    await generate(dispatcher, request("c"))
    dispatcher.audit()
    await dispatcher.close()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_dies_and_whoever_leaves_nothing_leaks(seed: int) -> None:
    chance = random.Random(seed)
    workers = Workers(3, FakeConfig(max_num_seqs=4, max_waiting=1, step_s=0.0002))
    dispatcher = await ready(workers)
    outcomes: Counter[str] = Counter()

    async def client(name: str) -> None:
        await asyncio.sleep(chance.random() * 0.05)
        try:
            await generate(dispatcher, request(name, max_tokens=chance.randint(1, 40)))
            outcomes["finished"] += 1
        except HeadraceError as error:
            outcomes[error.code] += 1

    async def chaos() -> None:
        while True:
            await asyncio.sleep(0.005)
            workers.engines[chance.choice(workers.ids)].kill()

    clients = [asyncio.create_task(client(f"s{i}")) for i in range(150)]
    trouble = asyncio.create_task(chaos())
    for task in chance.sample(clients, 60):
        await asyncio.sleep(0.0005)
        task.cancel()
    await asyncio.wait(clients, timeout=20)
    trouble.cancel()
    num_cancelled = sum(task.cancelled() for task in clients)
    assert all(task.done() for task in clients)
    assert sum(outcomes.values()) + num_cancelled == 150
    assert set(outcomes) <= {"finished", "worker_lost", "unavailable"}
    assert outcomes["finished"] > 0
    dispatcher.audit()
    # What was left behind at the engines was aborted.
    await workers.all_idle()
    await dispatcher.wait_until_served(MODEL)
    await generate(dispatcher, request("after"))
    await dispatcher.close()
    dispatcher.audit()
