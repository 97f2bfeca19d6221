import asyncio
from collections import Counter

import pytest

from headrace.core.errors import ConfigError, EngineDead, InvalidRequest
from headrace.core.requests import FinishReason
from headrace.core.wire import Abort, Drain, GoodbyeReason, StatsReply, StatsRequest, Submit
from headrace.worker.config import WorkerConfig
from headrace.worker.service import WorkerService


async def test_clients_that_use_the_same_id_do_not_meet(host, request_for) -> None:
    async with host(step_s=0.001) as hosted:
        one, two = await hosted.client(), await hosted.client()
        one.send(Submit(request_for("same", 200, seed=1)))
        two.send(Submit(request_for("same", 12, seed=2)))
        two.send(Submit(request_for("same too", 12, seed=2)))
        await two.until(lambda: two.ended("same", "same too"))
        one.send(Abort("same"))
        await one.until(lambda: one.ended("same"))

        assert two.tokens("same") == two.tokens("same too")
        assert two.deltas("same")[-1].finish is FinishReason.LENGTH
        assert one.deltas("same")[-1].finish is FinishReason.ABORT
        assert one.tokens("same")[:5] != two.tokens("same")[:5]


async def test_a_client_cannot_abort_another_s_sequence(host, request_for) -> None:
    async with host(step_s=0.001) as hosted:
        one, two = await hosted.client(), await hosted.client()
        one.send(Submit(request_for("mine", 50)))
        await one.until(lambda: len(one.tokens("mine")) > 0)
        two.send(Abort("mine"))
        await one.until(lambda: one.ended("mine"))

        assert one.deltas("mine")[-1].finish is FinishReason.LENGTH


async def test_sequences_of_a_client_that_leaves_are_aborted(host, request_for, eventually) -> None:
    async with host(step_s=0.002) as hosted:
        leaving, staying = await hosted.client(), await hosted.client()
        leaving.send(*(Submit(request_for(f"s{i}", 4000)) for i in range(5)))
        staying.send(Submit(request_for("stays", 100)))
        await leaving.until(lambda: len(leaving.tokens("s4")) > 0)
        step = leaving.frames[-1].frame.step
        await leaving.close()
        await eventually(lambda: hosted.engine.load().num_running <= 1)
        stats = await hosted.engine.stats()
        await staying.until(lambda: staying.ended("stays"))

        assert stats.num_finished == {"abort": 5}
        assert stats.step <= step + 20
        assert (await hosted.engine.stats()).blocks_in_use == 0


async def test_credit_is_shared_and_never_exceeds_the_engine_s(host) -> None:
    async with host(max_num_seqs=5, max_waiting=2) as hosted:
        clients = [await hosted.client() for _ in range(3)]
        for client in clients:
            client.frames.clear()
            await client.until(lambda client=client: len(client.frames) > 1)

        assert sorted(client.frames[-1].frame.load.credit for client in clients) in ([2, 2, 3], [2, 2, 2])


async def test_a_share_returns_to_those_who_stay(host) -> None:
    async with host(max_num_seqs=6, max_waiting=0) as hosted:
        one, two = await hosted.client(), await hosted.client()
        await one.until(lambda: bool(one.frames) and one.frames[-1].frame.load.credit == 3)
        await two.close()
        await one.until(lambda: one.frames[-1].frame.load.credit == 6)


async def test_submits_on_credit_that_went_elsewhere_are_held_and_served(host, request_for) -> None:
    async with host(step_s=0.002, max_num_seqs=4, max_waiting=0, worker={"max_held": 64}) as hosted:
        one, two = await hosted.client(), await hosted.client()
        for client in (one, two):
            client.send(*(Submit(request_for(f"s{i}")) for i in range(8)))
        names = [f"s{i}" for i in range(8)]
        await one.until(lambda: one.ended(*names))
        await two.until(lambda: two.ended(*names))

        for client in (one, two):
            assert {client.deltas(name)[-1].finish for name in names} == {FinishReason.LENGTH}


async def test_beyond_what_may_be_held_submits_are_refused(host, request_for) -> None:
    async with host(step_s=0.002, max_num_seqs=2, max_waiting=1, worker={"max_held": 3}) as hosted:
        client = await hosted.client()
        names = [f"s{i}" for i in range(20)]
        client.send(*(Submit(request_for(name)) for name in names))
        await client.until(lambda: client.ended(*names))

        last = [client.deltas(name)[-1] for name in names]
        assert Counter((d.finish, d.error_code) for d in last) == {
            (FinishReason.LENGTH, None): 6,
            (FinishReason.ERROR, "overloaded"): 14,
        }
        assert client.frames[-1].num_submits_seen == 20


async def test_a_held_sequence_is_aborted(host, request_for) -> None:
    async with host(step_s=0.002, max_num_seqs=1, max_waiting=0) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("runs", 40)), Submit(request_for("held")), Abort("held"))
        await client.until(lambda: client.ended("held"))

        assert client.deltas("held")[-1].finish is FinishReason.ABORT
        await client.until(lambda: client.ended("runs"))


async def test_held_sequences_of_a_client_that_leaves_are_forgotten(host, request_for) -> None:
    async with host(step_s=0.002, max_num_seqs=1, max_waiting=0) as hosted:
        staying, leaving = await hosted.client(), await hosted.client()
        staying.send(Submit(request_for("runs", 40)))
        await staying.until(lambda: len(staying.tokens("runs")) > 0)
        leaving.send(*(Submit(request_for(f"s{i}")) for i in range(3)), StatsRequest(1))
        await leaving.until(lambda: bool(leaving.frames) and leaving.frames[-1].num_submits_seen == 3)
        await leaving.close()
        staying.send(Submit(request_for("next")))
        await staying.until(lambda: staying.ended("runs", "next"))

        assert (await hosted.engine.stats()).num_finished == {"length": 2}


async def test_an_idle_client_hears_heartbeats(host) -> None:
    async with host() as hosted:
        client = await hosted.client()
        await client.until(lambda: len(client.frames) >= 4)

        assert all(frame.frame.deltas == [] for frame in client.frames)


async def test_service_that_a_client_did_not_hear_of_arrives_later(host, request_for) -> None:
    async with host(max_num_seqs=4, max_waiting=0) as hosted:
        worker, watcher = await hosted.client(), await hosted.client()
        worker.send(Submit(request_for("a", 30, tenant="x")))
        await worker.until(lambda: worker.ended("a"))
        worker.send(Submit(request_for("b", 30, tenant="y")))
        await worker.until(lambda: worker.ended("b"))

        def heard(client) -> Counter[str]:
            total: Counter[str] = Counter()
            for frame in client.frames:
                total.update(frame.frame.service)
            return total

        watcher.send(Submit(request_for("c", 1, tenant="z")))
        await watcher.until(lambda: watcher.ended("c"))
        assert heard(watcher) == {"x": 32, "y": 32, "z": 3}


async def test_statistics_count_what_is_held(host, request_for) -> None:
    async with host(step_s=0.05, max_num_seqs=1, max_waiting=1) as hosted:
        client = await hosted.client()
        client.send(*(Submit(request_for(f"s{i}")) for i in range(4)), StatsRequest(5))
        reply = None
        while not isinstance(reply, StatsReply):
            reply = await client.receive()

        assert reply.id == 5
        assert reply.stats.load.num_running + reply.stats.load.num_waiting == 4


async def test_drain_finishes_everyone_s_work_and_says_goodbye(host, request_for) -> None:
    async with host(step_s=0.002) as hosted:
        one, two = await hosted.client(), await hosted.client()
        one.send(Submit(request_for("a", 30)))
        await one.until(lambda: len(one.tokens("a")) > 0)
        two.send(Drain())
        await two.until(lambda: bool(two.frames) and two.frames[-1].draining)
        assert two.frames[-1].frame.load.credit == 0
        two.send(Submit(request_for("late")))
        await two.until(lambda: two.ended("late"))
        assert two.deltas("late")[-1].error_code == "draining"
        with pytest.raises(OSError):
            await hosted.client()
        goodbye = await one.goodbye()

        assert goodbye.reason is GoodbyeReason.DRAINED
        assert len(one.tokens("a")) == 30
        assert (await two.goodbye()).reason is GoodbyeReason.DRAINED
        await asyncio.wait_for(hosted.serving, 5)
        assert not hosted.path.exists()


async def test_held_sequences_are_refused_by_a_drain(host, request_for) -> None:
    async with host(step_s=0.005, max_num_seqs=1, max_waiting=0) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("runs", 20)), Submit(request_for("held")), Drain())
        await client.until(lambda: client.ended("held", "runs"))

        assert client.deltas("held")[-1].error_code == "draining"
        assert client.deltas("runs")[-1].finish is FinishReason.LENGTH


async def test_a_drain_does_not_wait_for_ever(host, request_for) -> None:
    async with host(step_s=0.002, worker={"drain_timeout_s": 0.1}) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 4000)))
        await client.until(lambda: len(client.tokens("a")) > 0)
        await asyncio.wait_for(hosted.service.drain(), 5)
        goodbye = await client.goodbye()

        assert goodbye.reason is GoodbyeReason.CLOSED
        assert "0.1 s" in goodbye.message


async def test_clients_hear_of_the_engine_s_death(host, request_for) -> None:
    async with host(die_at_step=4) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 30)))
        goodbye = await client.goodbye()

        assert goodbye.reason is GoodbyeReason.ENGINE_DEAD
        assert len(client.tokens("a")) == 3
        with pytest.raises(EngineDead, match="step 4"):
            await asyncio.wait_for(hosted.serving, 5)


async def test_close_tells_the_clients(host) -> None:
    async with host() as hosted:
        client = await hosted.client()
        await hosted.service.close()

        assert (await client.goodbye()).reason is GoodbyeReason.CLOSED
        await hosted.serving


async def test_a_stuck_engine_is_given_up(host, request_for, eventually) -> None:
    async with host(worker={"stall_timeout_s": 0.1, "exit_when_stuck_s": 0.2}, stall_at_step=3) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 30)))
        await eventually(lambda: not hosted.service.health.healthy)
        assert not hosted.service.ready
        await client.until(lambda: bool(client.frames) and client.frames[-1].frame.load.credit == 0)
        await eventually(lambda: bool(hosted.stuck))

        assert len(hosted.stuck) == 1
        assert "no step has finished" in hosted.stuck[0]


async def test_an_engine_that_recovers_is_healthy_again(host, request_for, eventually) -> None:
    async with host(worker={"stall_timeout_s": 0.1}, stall_at_step=3) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 30)))
        await eventually(lambda: not hosted.service.health.healthy)
        hosted.engine.resume()
        await client.until(lambda: client.ended("a"))
        await eventually(lambda: hosted.service.ready)

        assert hosted.stuck == []


async def test_a_busy_engine_is_healthy(host, request_for) -> None:
    async with host(step_s=0.3, worker={"stall_timeout_s": 2.0}) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 2)))
        while not client.ended("a"):
            await client.receive()
            assert hosted.service.ready


async def test_a_defect_in_one_request_harms_no_other(host, request_for, monkeypatch) -> None:
    async with host(step_s=0.002) as hosted:
        submit = hosted.engine.submit

        def trip(request) -> None:
            if request.sequence_id == "trips":
                raise ZeroDivisionError
            submit(request)

        monkeypatch.setattr(hosted.engine, "submit", trip)
        client = await hosted.client()
        client.send(Submit(request_for("a")), Submit(request_for("trips")), Submit(request_for("b")))
        await client.until(lambda: client.ended("a", "b", "trips"))

        assert client.deltas("trips")[-1].error_code == "internal_error"
        assert len(client.tokens("a")) == len(client.tokens("b")) == 8


async def test_a_left_over_socket_is_replaced_and_private(host) -> None:
    async with host() as hosted:
        path = hosted.path
        assert path.stat().st_mode & 0o777 == 0o600
    async with host() as hosted:
        hosted.path.rename(path.with_suffix(".moved"))
        path.with_suffix(".moved").rename(path)
        assert await hosted.client()


@pytest.mark.parametrize(
    ("listen", "complaint"),
    [("127.0.0.1:0", "mutual TLS"), ("unix:/nowhere/at/all.sock", "cannot listen"), ("here", "not an address")],
)
async def test_addresses_that_do_not_work_are_named(listen: str, complaint: str) -> None:
    from headrace.adapters.engine.fake import FakeEngine

    with pytest.raises(ConfigError, match=complaint):
        await WorkerService(FakeEngine(), WorkerConfig(listen=listen, http_listen=None), on_stuck=pytest.fail).start()


@pytest.mark.parametrize("part", ["_on_frame", "_judge", "_submit_held"])
async def test_a_worker_with_a_broken_part_ends_instead_of_looking_alive(host, request_for, monkeypatch, part) -> None:
    async with host() as hosted:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        client = await hosted.client()
        monkeypatch.setattr(hosted.service, part, fail)
        client.send(Submit(request_for("a")))
        goodbye = await client.goodbye()

        assert goodbye.reason is GoodbyeReason.ENGINE_DEAD
        with pytest.raises(EngineDead, match="a part of the worker failed"):
            await asyncio.wait_for(hosted.serving, 5)


async def test_an_answer_that_cannot_be_sent_costs_only_its_client(host, request_for, monkeypatch) -> None:
    async with host(step_s=0.001) as hosted:
        submit = hosted.engine.submit

        def refuse_with_nonsense(request) -> None:
            if request.sequence_id == "bad":
                raise InvalidRequest("\ud800")
            submit(request)

        monkeypatch.setattr(hosted.engine, "submit", refuse_with_nonsense)
        one, two = await hosted.client(), await hosted.client()
        two.send(Submit(request_for("a", 60)))
        one.send(Submit(request_for("bad")))

        assert (await one.goodbye()).reason is GoodbyeReason.PROTOCOL_ERROR
        await two.until(lambda: two.ended("a"))
        assert len(two.tokens("a")) == 60
