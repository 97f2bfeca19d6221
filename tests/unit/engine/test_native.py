"""The thread and the bridge: what the port promises, with a stub model that can be held and broken."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from headrace.core.clock import ManualClock
from headrace.core.errors import Draining, EngineDead, InvalidRequest, Overloaded
from headrace.core.frames import EngineDescription, StepFrame
from headrace.core.ids import VersionId
from headrace.core.requests import FinishReason
from headrace.engine.native import MAX_FAILED_STEPS, NativeEngine

DEADLINE_S = 20.0


class Gate:
    """Holds the model inside its step until it is opened."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self._open = threading.Event()

    def __call__(self, batch: object) -> None:
        self.inside.set()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


class Rig:
    """An engine, its stub, and everything that came out of it."""

    def __init__(self, bench, clock, capacity):
        self.model = bench.model
        self.core = bench.core
        self.clock = clock
        self.frames: list[StepFrame] = []
        self.error: Exception | None = None
        self.engine = NativeEngine(
            bench.core,
            EngineDescription("m", VersionId("v"), 128, 97, 4, 64, 8, "float32", "cpu"),
            clock,
            capacity=capacity,
            stall_timeout_s=30.0,
            memory={"planned_kv": 1},
        )
        self._changed = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self):
        try:
            async for frame in self.engine.frames():
                async with self._changed:
                    self.frames.append(frame)
                    self._changed.notify_all()
        except EngineDead as error:
            self.error = error
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(condition)

    def deltas(self, sequence_id):
        return [d for frame in self.frames for d in frame.deltas if d.sequence_id == sequence_id]

    def finish(self, sequence_id):
        return next((d.finish for d in self.deltas(sequence_id) if d.finish is not None), None)

    async def finished(self, *sequence_ids):
        await self.until(lambda: all(self.finish(s) is not None for s in sequence_ids))

    async def close(self):
        await self.engine.close()
        async with asyncio.timeout(DEADLINE_S):
            await self._reader


@pytest.fixture
async def rig(make_bench) -> AsyncIterator[Rig]:
    rig = Rig(make_bench(capacity=4), ManualClock(), 4)
    yield rig
    await rig.close()


async def test_tokens_arrive_as_the_core_makes_them(rig, make_request, make_bench):
    requests = [make_request(f"s/{i}", [i, i + 1], 6) for i in range(4)]
    for request in requests:
        rig.engine.submit(request)
    await rig.finished(*(r.sequence_id for r in requests))
    expected = make_bench().generate(*requests)
    assert [[t for d in rig.deltas(r.sequence_id) for t in d.token_ids] for r in requests] == expected
    steps = [frame.step for frame in rig.frames]
    assert steps == sorted(set(steps)), "a frame for each step"


async def test_credit_counts_down_at_submit_and_comes_back_with_the_end(rig, make_request):
    gate = rig.model.before = Gate()
    for i in range(4):
        assert rig.engine.load().credit == 4 - i
        rig.engine.submit(make_request(f"s/{i}"))
    with pytest.raises(Overloaded, match="4 sequences in flight"):
        rig.engine.submit(make_request("s/4"))
    gate.open()
    await rig.finished(*(f"s/{i}" for i in range(4)))
    assert rig.engine.load().credit == 4
    assert rig.frames[-1].load.credit == 4


async def test_impossible_requests_are_refused_at_submit(rig, make_request):
    with pytest.raises(InvalidRequest, match="empty"):
        rig.engine.submit(make_request("a", []))
    gate = rig.model.before = Gate()
    rig.engine.submit(make_request("a"))
    with pytest.raises(InvalidRequest, match="in flight"):
        rig.engine.submit(make_request("a"))
    gate.open()
    await rig.finished("a")
    rig.engine.submit(make_request("a"))
    await rig.until(lambda: len([d for d in rig.deltas("a") if d.finish]) == 2)


async def test_an_abort_during_a_step_is_told_within_two(rig, make_request):
    gate = rig.model.before = Gate()
    rig.engine.submit(make_request("a", range(10), 50))
    await asyncio.to_thread(gate.inside.wait, DEADLINE_S)
    rig.engine.abort("a")
    rig.engine.abort("a")
    gate.open()
    await rig.finished("a")
    assert rig.finish("a") is FinishReason.ABORT
    assert len(rig.frames) <= 2
    assert (await rig.engine.stats()).blocks_in_use == 0


async def test_an_abort_before_the_first_step_is_told_without_one(rig, make_request):
    gate = rig.model.before = Gate()
    rig.engine.submit(make_request("first", [1], 1))
    await asyncio.to_thread(gate.inside.wait, DEADLINE_S)
    rig.engine.submit(make_request("a"))
    rig.engine.abort("a")
    gate.open()
    await rig.finished("first", "a")
    assert rig.deltas("a")[0].token_ids == []
    assert rig.frames[-1].step == 1, "the last frame repeats the step before"


async def test_stats_answer_while_a_step_hangs_and_say_so(rig, make_request):
    gate = rig.model.before = Gate()
    rig.engine.submit(make_request("a", [1, 2], 2))
    await asyncio.to_thread(gate.inside.wait, DEADLINE_S)
    rig.clock.advance(29.0)
    busy = await rig.engine.stats()
    assert (busy.healthy, busy.last_progress_age_s) == (True, 29.0)
    rig.clock.advance(2.0)
    stuck = await rig.engine.stats()
    assert (stuck.healthy, stuck.last_progress_age_s) == (False, 31.0)
    gate.open()
    await rig.finished("a")
    well = await rig.engine.stats()
    assert (well.healthy, well.last_progress_age_s) == (True, 0.0)
    assert well.memory == {"planned_kv": 1}
    rig.clock.advance(1000.0)
    assert (await rig.engine.stats()).healthy, "an idle engine is well however long it idles"


async def test_draining_refuses_new_work_and_ends_with_the_present(rig, make_request):
    gate = rig.model.before = Gate()
    rig.engine.submit(make_request("a"))
    drains = [asyncio.create_task(rig.engine.drain()) for _ in range(2)]
    await asyncio.to_thread(gate.inside.wait, DEADLINE_S)
    with pytest.raises(Draining):
        rig.engine.submit(make_request("b"))
    assert rig.engine.load().credit == 0
    assert (await rig.engine.stats()).draining
    assert not any(drain.done() for drain in drains)
    gate.open()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*drains)
        await rig.engine.drain()
    await rig.finished("a")


async def test_after_closing_frames_end_and_submits_are_refused(rig, make_request):
    rig.engine.submit(make_request("a", [1], 100))
    await rig.close()
    await rig.close()
    assert rig.error is None
    with pytest.raises(EngineDead):
        rig.engine.submit(make_request("b"))


class Boom(Exception):
    pass


async def test_one_failed_step_costs_its_sequences_and_no_more(rig, make_request):
    def fail(batch):
        raise Boom

    rig.model.before = fail
    rig.engine.submit(make_request("a"))
    await rig.finished("a")
    assert rig.finish("a") is FinishReason.ERROR
    rig.model.before = lambda batch: None
    rig.engine.submit(make_request("b"))
    await rig.finished("b")
    assert rig.finish("b") is FinishReason.LENGTH


async def test_steps_that_keep_failing_kill_the_engine(rig, make_request):
    def fail(batch):
        raise Boom

    rig.model.before = fail
    for i in range(MAX_FAILED_STEPS):
        rig.engine.submit(make_request(f"s/{i}"))
        await rig.finished(f"s/{i}")
    await rig.until(lambda: rig.error is not None)
    with pytest.raises(EngineDead):
        rig.engine.submit(make_request("b"))
    assert not (await rig.engine.stats()).healthy
    async with asyncio.timeout(DEADLINE_S):
        await rig.engine.drain()


async def test_a_defect_in_the_bookkeeping_is_told_to_everyone_in_flight(rig, make_request):
    schedule = rig.core._scheduler.schedule

    def broken():
        raise Boom

    rig.core._scheduler.schedule = broken
    rig.engine.submit(make_request("a"))
    await rig.finished("a")
    assert rig.finish("a") is FinishReason.ERROR
    assert rig.core._scheduler.schedule != schedule, "a new scheduler took over"
    rig.engine.submit(make_request("b"))
    await rig.finished("b")
    assert rig.finish("b") is FinishReason.LENGTH


async def test_a_leak_found_when_idle_is_repaired(rig, make_request):
    rig.core._scheduler._pool.allocate(3)
    rig.engine.submit(make_request("a"))
    await rig.finished("a")
    await rig.until(lambda: rig.core.load().num_free_blocks == 64)
    rig.engine.submit(make_request("b"))
    await rig.finished("b")
    assert rig.finish("b") is FinishReason.LENGTH
