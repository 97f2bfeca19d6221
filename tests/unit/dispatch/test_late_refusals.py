"""A worker that says, after it has been given a sequence, that it has no room for it."""

import asyncio

import msgspec
import pytest

from headrace.core.errors import (
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from headrace.core.frames import SequenceDelta
from headrace.core.ids import SequenceId
from headrace.core.requests import FinishReason

from .puppet import FAST, MODEL, Puppet, consume, delta, dispatching, refused, request, until


@pytest.mark.parametrize("refusal", [Overloaded("no room after all"), Draining("draining")])
async def test_a_late_refusal_moves_the_request_to_another_worker(refusal: HeadraceError) -> None:
    first, second = Puppet(), Puppet(credit=0)
    async with dispatching(first, second) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: first.submitted == ["a"])
        first.say(refused("a", refusal), credit=0)
        await until(lambda: dispatcher.num_queued == 1)
        second.say(credit=1)
        await until(lambda: second.submitted == ["a"])
        second.say(delta("a", 5, finish=FinishReason.STOP))
        assert await task == [5]
    assert first.aborted == second.aborted == []


async def test_after_a_late_refusal_for_want_of_room_the_same_worker_is_asked_again() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: engine.submitted == ["a"])
        engine.say(refused("a", Overloaded("no room after all")))
        await until(lambda: engine.submitted == ["a", "a"])
        engine.say(delta("a", 5, finish=FinishReason.STOP))
        assert await task == [5]


@pytest.mark.parametrize(("timeout_s", "kind"), [(None, Overloaded), (0.01, DeadlineExceeded)])
async def test_a_late_refusal_does_not_lengthen_the_wait(timeout_s: float | None, kind: type[HeadraceError]) -> None:
    engine = Puppet()
    config = msgspec.structs.replace(FAST, queue_timeout_s=0.05)
    async with (
        dispatching(engine, config=config) as dispatcher,
        dispatcher.stream(request("a"), MODEL, timeout_s=timeout_s) as stream,
    ):
        engine.say(refused("a", Overloaded("no room after all")), credit=0)
        with pytest.raises(kind, match="no worker had room"):
            await anext(stream)


async def test_a_late_refusal_by_the_only_worker_that_drains_says_so_at_once() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher, dispatcher.stream(request("a"), MODEL) as stream:
        engine.say(refused("a", Draining("draining")))
        with pytest.raises(Unavailable):
            await anext(stream)


async def test_late_refusals_keep_the_order_of_arrival() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        tasks = []
        for name in "abc":
            tasks.append(asyncio.create_task(consume(dispatcher, request(name))))
            await until(lambda: len(engine.submitted) == len(tasks))
        engine.say(*(refused(name, Overloaded("no room")) for name in "cab"), credit=0)
        await until(lambda: dispatcher.num_queued == 3)
        engine.say(credit=3)
        await until(lambda: len(engine.submitted) == 6)
        assert engine.submitted[3:] == ["a", "b", "c"]
        engine.say(*(delta(name, 1, finish=FinishReason.STOP) for name in "abc"))
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("num_switches", range(4))
async def test_leaving_after_a_late_refusal_leaves_nothing(num_switches: int) -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: engine.submitted == ["a"])
        engine.say(refused("a", Overloaded("no room after all")), credit=0)
        for _ in range(num_switches):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        dispatcher.audit()


@pytest.mark.parametrize(
    "last",
    [
        SequenceDelta(SequenceId("a"), finish=FinishReason.ERROR, error="a defect"),
        refused("a", InvalidRequest("token 7 is outside the vocabulary")),
    ],
)
async def test_an_error_that_another_worker_would_repeat_is_passed_on(last: SequenceDelta) -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher, dispatcher.stream(request("a"), MODEL) as stream:
        engine.say(last)
        assert [d async for d in stream] == [last]
    assert engine.submitted == ["a"]


async def test_a_sequence_that_has_begun_is_not_started_anew() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher, dispatcher.stream(request("a"), MODEL) as stream:
        engine.say(delta("a", 5), refused("a", Overloaded("no room any more")))
        assert [d.finish async for d in stream] == [None, FinishReason.ERROR]
    assert engine.submitted == ["a"]
