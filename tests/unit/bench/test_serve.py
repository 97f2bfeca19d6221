import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from headrace.bench import serve
from headrace.bench.client import ClientOptions
from headrace.bench.report import ServeReport, remarks, render_text
from headrace.bench.serve import ClosedLoad, PoissonLoad, Progress, ServeOptions, TraceLoad
from headrace.bench.stats import Targets
from headrace.core.errors import ConfigError, InvalidRequest, Unavailable

from .openai_server import FakeServer, serving


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with serving() as fake:
        yield fake


def options(server: FakeServer, load: object, **changes: object) -> ServeOptions:
    client = {
        name: changes.pop(name)
        for name in ("endpoint", "stream", "request_timeout_s", "ignore_eos", "api_key")
        if name in changes
    }
    values: dict[str, object] = {"prompt_tokens": 5, "output_tokens": 4, "num_warmup": 0} | changes
    return ServeOptions(client=ClientOptions(server.base_url, "m", **client), load=load, **values)  # type: ignore[arg-type] # tables of test cases


CLOSED = ClosedLoad(concurrencies=(3,), num_requests=6)


async def test_poisson_load_counts_every_token_and_reports_latencies(server: FakeServer) -> None:
    seen: list[Progress] = []
    report = await serve.run(options(server, PoissonLoad(rates=(200.0,), num_requests=12), num_warmup=2), seen.append)
    (level,) = report.levels
    assert (level.num_ok, level.errors) == (12, {})
    assert (level.prompt_tokens, level.output_tokens) == (60, 48)
    assert level.counted_by_usage
    assert level.ttft is not None
    assert level.e2e is not None
    assert 0 < level.ttft.p50 <= level.e2e.p50
    assert level.gap is not None
    assert seen[-1] == Progress("200/s", 12, 12, 0)
    assert len(server.bodies) == 14


async def test_prompts_are_distinct_within_a_run_and_equal_between_runs_of_a_seed(server: FakeServer) -> None:
    load = ClosedLoad(concurrencies=(2, 1), num_requests=5)
    for seed in (1, 1, 2):
        await serve.run(options(server, load, num_warmup=1, seed=seed))
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    first, second, third = (set(prompts[start : start + 11]) for start in (0, 11, 22))
    assert len(first) == 11
    assert first == second
    assert not first & third
    assert {len(prompt) for prompt in prompts} == {5}


async def test_chat_sends_text_and_does_not_count_the_role_chunk(server: FakeServer) -> None:
    server.usage = False
    report = await serve.run(options(server, CLOSED, endpoint="chat"))
    (level,) = report.levels
    assert level.output_tokens == 6 * 4
    assert not level.counted_by_usage
    assert any("no usage" in line for line in remarks(level))
    assert isinstance(server.bodies[0]["messages"][0]["content"], str)


async def test_answers_in_one_piece_have_no_first_token_time(server: FakeServer) -> None:
    report = await serve.run(options(server, CLOSED, stream=False, targets=Targets(ttft_s=10.0)))
    (level,) = report.levels
    assert (level.num_ok, level.output_tokens, level.ttft, level.good_share) == (6, 24, None, 0.0)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, b'{"error": {"message": "full", "code": "overloaded"}}', "http_503:overloaded"),
        (
            429,
            b'{"error": {"message": "slow down", "type": "rate_limit_error", "code": null}}',
            "http_429:rate_limit_error",
        ),
        (500, b"<html>", "http_500"),
        (502, b"\xff\xfe", "http_502"),
        (400, b'{"error": "a string"}', "http_400:unspecified"),
    ],
)
async def test_refusals_are_counted_by_status_and_code(server: FakeServer, status: int, body: bytes, kind: str) -> None:
    server.status, server.refusal = status, body
    (level,) = (await serve.run(options(server, CLOSED))).levels
    assert (level.num_ok, level.errors) == (0, {kind: 6})


async def _error_event(response: web.StreamResponse, request: web.Request, index: int) -> bool:
    if index < 2:
        return False
    await response.write(b'data: {"error": {"message": "gone", "code": "worker_lost"}}\n\ndata: [DONE]\n\n')
    return True


async def _end_early(response: web.StreamResponse, request: web.Request, index: int) -> bool:
    return index == 2


async def _drop(response: web.StreamResponse, request: web.Request, index: int) -> bool:
    if index == 2:
        assert request.transport is not None
        request.transport.abort()
    return index == 2


async def _nonsense(response: web.StreamResponse, request: web.Request, index: int) -> bool:
    await response.write(b"data: {not json\n\n")
    return True


async def _hang(response: web.StreamResponse, request: web.Request, index: int) -> bool:
    await asyncio.Event().wait()
    return True


@pytest.mark.parametrize(
    ("misbehaviour", "kind"),
    [
        (_error_event, "stream_error:worker_lost"),
        (_end_early, "truncated"),
        (_drop, "disconnected"),
        (_nonsense, "malformed:DecodeError"),
        (_hang, "timeout"),
    ],
)
async def test_what_goes_wrong_in_mid_stream_is_an_error_of_its_own_kind(
    server: FakeServer, misbehaviour: object, kind: str
) -> None:
    server.after_tokens = misbehaviour  # type: ignore[assignment] # one of the functions above
    (level,) = (await serve.run(options(server, CLOSED, request_timeout_s=0.2))).levels
    assert (level.num_ok, level.errors) == (0, {kind: 6})
    assert level.ttft is None
    assert level.output_tokens_per_s == 0


async def test_a_level_ends_at_its_deadline_whatever_hangs(server: FakeServer) -> None:
    server.after_tokens = _hang
    load = PoissonLoad(rates=(1000.0,), num_requests=8)
    (level,) = (await serve.run(options(server, load, max_duration_s=0.3, max_in_flight=3))).levels
    assert level.errors == {"unfinished": 3, "not_sent": 5}
    assert server.max_in_flight == 3
    (level,) = (await serve.run(options(server, CLOSED, max_duration_s=0.2))).levels
    assert level.errors == {"unfinished": 3, "not_sent": 3}


async def test_open_loop_latency_counts_from_the_intended_time(server: FakeServer) -> None:
    """One connection only: requests queue in the client, and their wait must show in TTFT, not vanish."""

    async def slow(response: web.StreamResponse, request: web.Request, index: int) -> bool:
        await asyncio.sleep(0.01)
        return False

    server.after_tokens = slow
    load = PoissonLoad(rates=(2000.0,), num_requests=10)
    (level,) = (await serve.run(options(server, load, max_in_flight=1))).levels
    assert level.num_ok == 10
    assert level.lateness is not None
    assert level.ttft is not None
    assert level.lateness.max > 0.2
    assert level.ttft.max > level.lateness.max
    assert level.offered_rate is not None
    assert level.achieved_rate < level.offered_rate
    assert any("not what was asked for" in line for line in remarks(level))


async def test_closed_loop_keeps_exactly_its_concurrency_in_flight(server: FakeServer) -> None:
    (level,) = (await serve.run(options(server, ClosedLoad(concurrencies=(4,), num_requests=20)))).levels
    assert (level.num_ok, server.max_in_flight, level.offered_rate) == (20, 4, None)


async def test_trace_load_sends_the_lengths_of_the_trace_cut_to_the_limits(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time,prompt_tokens,output_tokens\n10,3,2\n20,50,3\n25,4,99\n")
    load = TraceLoad(path=trace, rates=(300.0, 600.0), max_prompt_tokens=8, max_output_tokens=5)
    report = await serve.run(options(server, load))
    assert [level.label for level in report.levels] == ["t 300/s", "t 600/s"]
    sizes = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    assert sizes == sorted([(3, 2), (8, 3), (4, 5)] * 2)


async def test_a_failed_warm_up_stops_the_run_and_says_why(server: FakeServer) -> None:
    server.status, server.refusal = 401, b'{"error": {"code": "invalid_api_key"}}'
    with pytest.raises(Unavailable, match="http_401:invalid_api_key"):
        await serve.run(options(server, CLOSED, num_warmup=1))
    assert len(server.bodies) == 1


async def test_nobody_listens(server: FakeServer) -> None:
    dead = ClientOptions("http://127.0.0.1:9/v1", "m")
    (level,) = (await serve.run(ServeOptions(client=dead, load=CLOSED, num_warmup=0))).levels
    assert level.errors == {"connect": 6}


async def test_files_hold_the_report_and_no_key(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = await serve.run(
        options(server, CLOSED, api_key="hr-secret", json_path=tmp_path / "r" / "r.json", plot_path=tmp_path / "r.png")
    )
    data = (tmp_path / "r" / "r.json").read_bytes()
    assert b"hr-secret" not in data
    assert json.loads(data)["levels"][0]["num_ok"] == 6
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    text = render_text(report)
    assert "3 users" in text
    assert "hr-secret" not in text


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"max_duration_s": 0.0}, "max_duration_s"),
        ({"max_duration_s": float("nan")}, "max_duration_s"),
        ({"load": PoissonLoad(rates=(0.0,))}, "positive"),
        ({"load": PoissonLoad(rates=())}, "nothing to send"),
        ({"load": PoissonLoad(rates=(1.0,), num_requests=0)}, "nothing to send"),
        ({"load": ClosedLoad(concurrencies=(0,))}, "at least 1"),
        ({"client": ClientOptions("localhost:8000", "m")}, "base_url"),
    ],
)
async def test_impossible_options_are_refused_before_anything_is_sent(change: dict[str, object], match: str) -> None:
    values: dict[str, object] = {"client": ClientOptions("http://127.0.0.1:9/v1", "m"), "load": CLOSED}
    with pytest.raises(InvalidRequest, match=match):
        await serve.run(ServeOptions(**(values | change)))  # type: ignore[arg-type] # tables of test cases


async def test_a_plot_without_matplotlib_fails_before_the_run(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"headrace\[plot\]"):
        await serve.run(options(server, CLOSED, plot_path=tmp_path / "p.png"))
    assert server.bodies == []


async def test_a_report_survives_its_own_json(server: FakeServer) -> None:
    report = await serve.run(options(server, CLOSED))
    assert msgspec.json.decode(report.to_json(), type=ServeReport) == report
