"""The dispatcher on engines that a test moves by hand; see test_dispatcher_fake.py for ones that run by themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from headrace.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from headrace.core.frames import SequenceDelta, SequenceTiming
from headrace.core.ids import SequenceId, VersionId
from headrace.core.requests import FinishReason, GenerationRequest, ServiceClass
from headrace.dispatch.dispatcher import Dispatcher
from headrace.dispatch.stream import GenerationStream
from headrace.ports.engine import Engine

from .puppet import FAST, MODEL, V1, V2, Puppet, connector, consume, delta, dispatching, request, until


async def test_tokens_arrive_in_order_and_the_stream_ends() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: engine.submitted)
        engine.say(delta("a", 5))
        engine.say(delta("other", 9), delta("a", 6, 7))
        engine.say(delta("a", 8, finish=FinishReason.STOP))
        assert await task == [5, 6, 7, 8]
    assert engine.aborted == []
    assert engine.closed


async def test_breakdown_says_where_the_time_went() -> None:
    engine = Puppet()
    timing = SequenceTiming(wait_s=0.0, prefill_s=0.0, decode_s=0.0, num_cached_tokens=2, num_preemptions=0)
    async with dispatching(engine) as dispatcher, dispatcher.stream(request("a"), MODEL) as stream:
        engine.say(delta("a", 5))
        engine.say(SequenceDelta(SequenceId("a"), [6], finish=FinishReason.STOP, timing=timing))
        assert [d.token_ids async for d in stream] == [[5], [6]]
        breakdown = stream.breakdown
        assert breakdown.worker_id == "w0"
        assert breakdown.timing == timing
        assert breakdown.queue_s is not None
        assert breakdown.queue_s >= 0
        assert breakdown.submitted_at is not None
        assert breakdown.first_token_at is not None
        assert breakdown.dispatch_s == breakdown.first_token_at - breakdown.submitted_at
        assert breakdown.last_token_at is not None
        assert breakdown.last_token_at >= breakdown.first_token_at


async def test_leaving_early_aborts_once() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        async with dispatcher.stream(request("a"), MODEL) as stream:
            engine.say(delta("a", 5))
            assert (await anext(stream)).token_ids == [5]
        engine.say(delta("a", finish=FinishReason.ABORT))
    assert engine.aborted == ["a"]


async def test_a_finished_sequence_is_not_aborted_even_if_nobody_read_its_end() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher, dispatcher.stream(request("a"), MODEL) as stream:
        engine.say(delta("a", 5), delta("a", 6, finish=FinishReason.LENGTH))
        await until(lambda: stream.num_unread == 2)
    assert engine.aborted == []


@pytest.mark.parametrize("num_switches", range(6))
async def test_cancelled_at_any_moment_nothing_is_left_and_what_runs_is_aborted_once(num_switches: int) -> None:
    engine = Puppet(credit=0)
    async with dispatching(engine) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        for _ in range(num_switches):
            await asyncio.sleep(0)
        engine.say(credit=1)
        for _ in range(num_switches % 3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.aborted == engine.submitted
        dispatcher.audit()


async def test_a_request_waits_until_a_worker_has_credit() -> None:
    engine = Puppet(credit=0)
    async with dispatching(engine) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: dispatcher.num_queued == 1)
        engine.say()
        await asyncio.sleep(0)
        assert engine.submitted == []
        engine.say(credit=1)
        await until(lambda: engine.submitted == ["a"])
        assert dispatcher.num_queued == 0
        engine.say(delta("a", 5, finish=FinishReason.STOP))
        assert await task == [5]


async def test_urgent_requests_overtake() -> None:
    engine = Puppet(credit=0)
    async with dispatching(engine) as dispatcher:
        tasks = []
        for name in ("batch", "flex", "default", "priority"):
            tasks.append(asyncio.create_task(consume(dispatcher, request(name, service_class=ServiceClass(name)))))
            await until(lambda: dispatcher.num_queued == len(tasks))
        engine.say(credit=4)
        await until(lambda: len(engine.submitted) == 4)
        assert engine.submitted == ["priority", "default", "flex", "batch"]
        engine.say(*(delta(name, 1, finish=FinishReason.STOP) for name in engine.submitted))
        await asyncio.gather(*tasks)


async def test_one_version_without_credit_does_not_hold_up_another() -> None:
    busy, free = Puppet(credit=0, version=V1), Puppet(version=V2)
    async with dispatching(busy, free) as dispatcher:
        waiting = asyncio.create_task(anext(_enter(dispatcher, request("a"), V1)))
        await until(lambda: dispatcher.num_queued == 1)
        async with dispatcher.stream(request("b"), MODEL, V2):
            assert free.submitted == ["b"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert busy.submitted == []


async def _enter(dispatcher: Dispatcher, of: GenerationRequest, version: VersionId) -> AsyncIterator[GenerationStream]:
    async with dispatcher.stream(of, MODEL, version) as stream:
        yield stream


async def test_what_was_just_submitted_counts_before_the_worker_reports_it() -> None:
    workers = Puppet(), Puppet()
    async with dispatching(*workers) as dispatcher, AsyncExitStack() as stack:
        await stack.enter_async_context(dispatcher.stream(request("long", num_prompt=300), MODEL))
        for name in ("a", "b", "c"):
            await stack.enter_async_context(dispatcher.stream(request(name), MODEL))
        assert sorted(worker.submitted for worker in workers) == [["a", "b", "c"], ["long"]]


async def test_a_full_queue_refuses() -> None:
    engine = Puppet(credit=0)
    config = msgspec.structs.replace(FAST, max_queued_requests=1)
    async with dispatching(engine, config=config) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: dispatcher.num_queued == 1)
        with pytest.raises(Overloaded) as refusal:
            await consume(dispatcher, request("b"))
        assert refusal.value.retry_after_s is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_waiting_ends_with_the_callers_patience_or_the_configured_one() -> None:
    engine = Puppet(credit=0)
    async with dispatching(engine, config=msgspec.structs.replace(FAST, queue_timeout_s=0.02)) as dispatcher:
        with pytest.raises(DeadlineExceeded):
            await consume(dispatcher, request("a"), timeout_s=0.001)
        with pytest.raises(Overloaded):
            await consume(dispatcher, request("b"))
        with pytest.raises(Overloaded):
            await consume(dispatcher, request("c"), timeout_s=9.0)
    assert engine.submitted == []


async def test_what_can_never_be_served_is_refused_at_once() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        with pytest.raises(Unavailable):
            await consume(dispatcher, request("a"), version=V2)
        with pytest.raises(ContextLengthExceeded):
            await consume(dispatcher, request("a", num_prompt=512))
        engine.refusal = InvalidRequest("token 7 is outside the vocabulary")
        with pytest.raises(InvalidRequest, match="token 7"):
            await consume(dispatcher, request("a"))
        engine.refusal = None
        async with dispatcher.stream(request("a"), MODEL):
            with pytest.raises(InvalidRequest, match="in flight"):
                await consume(dispatcher, request("a"))
            assert engine.aborted == []


async def test_a_refusal_despite_credit_is_tried_again_without_the_client_noticing() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        engine.refusal = Overloaded("no credit after all")
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: dispatcher.num_queued == 1)
        engine.refusal = None
        await until(lambda: engine.submitted == ["a"])
        engine.say(delta("a", 1, finish=FinishReason.STOP))
        assert await task == [1]


async def test_a_draining_worker_is_left_and_its_waiting_requests_are_told() -> None:
    draining, other = Puppet(), Puppet(version=V2)
    draining.refusal = Draining("draining")
    async with dispatching(draining, other) as dispatcher:
        with pytest.raises(Unavailable):
            async with dispatcher.stream(request("a"), MODEL, V1):
                pytest.fail("nobody could take it")
        assert [description.version for description in dispatcher.served()] == [V2]
        async with dispatcher.stream(request("a"), MODEL):
            assert other.submitted == ["a"]


async def test_a_lost_worker_fails_its_streams_after_what_it_said_and_comes_back() -> None:
    first, second = Puppet(), Puppet()
    changes: list[int] = []
    async with dispatching(connector(first, second)) as dispatcher:
        dispatcher.on_change(lambda: changes.append(len(dispatcher.served())))
        async with dispatcher.stream(request("a"), MODEL) as stream:
            first.say(delta("a", 5))
            first.die()
            assert (await anext(stream)).token_ids == [5]
            with pytest.raises(EngineDead, match="w0 was lost"):
                await anext(stream)
        assert first.aborted == []
        assert first.closed
        await dispatcher.wait_until_served(MODEL)
        async with dispatcher.stream(request("b"), MODEL):
            assert second.submitted == ["b"]
    assert changes[:2] == [0, 1]


async def test_waiting_requests_fail_at_once_when_the_last_worker_is_lost() -> None:
    engine = Puppet(credit=0)
    async with dispatching(engine) as dispatcher:
        task = asyncio.create_task(consume(dispatcher, request("a")))
        await until(lambda: dispatcher.num_queued == 1)
        engine.die()
        with pytest.raises(Unavailable):
            await task


async def test_connecting_is_tried_until_it_succeeds_whatever_goes_wrong() -> None:
    engine = Puppet()
    failures: list[Exception] = [OSError("refused"), EngineDead("no"), TimeoutError(), ValueError("a defect")]

    async def connect() -> Engine:
        if failures:
            raise failures.pop()
        return engine

    async with dispatching(connect):
        assert not failures


async def test_unread_deltas_are_bounded_by_what_was_asked_for() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher, dispatcher.stream(request("a"), MODEL) as stream:
        for _ in range(100):
            engine.say(delta("a"))
        for token in range(8):
            engine.say(delta("a", token))
        engine.say(delta("a", finish=FinishReason.LENGTH))
        await until(lambda: dispatcher.num_running == 0)
        assert stream.num_unread == 9


async def test_drain_waits_for_open_streams_and_refuses_new_ones() -> None:
    engine = Puppet()
    async with dispatching(engine) as dispatcher:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(dispatcher.stream(request("a"), MODEL))
            drain = asyncio.create_task(dispatcher.drain())
            await asyncio.sleep(0)
            assert not drain.done()
            with pytest.raises(Draining):
                await consume(dispatcher, request("b"))
        await drain


async def test_closing_ends_everything_that_waits_or_runs() -> None:
    engine = Puppet(credit=1)
    async with dispatching(engine) as dispatcher:
        running = asyncio.create_task(consume(dispatcher, request("runs")))
        await until(lambda: engine.submitted)
        waiting = asyncio.create_task(consume(dispatcher, request("waits")))
        await until(lambda: dispatcher.num_queued == 1)
        await dispatcher.close()
        with pytest.raises(EngineDead):
            await running
        with pytest.raises(Draining):
            await waiting
    assert engine.closed
