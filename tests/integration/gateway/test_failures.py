"""What callers see when something below the gateway fails, is full, slow, or shutting down."""

import asyncio
import json
import os
import signal

import openai
import pytest
from structlog.testing import capture_logs

from headrace.core.errors import InvalidRequest
from headrace.core.frames import SequenceDelta
from headrace.core.requests import FinishReason
from headrace.dispatch.config import DispatchConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def body(**changes):
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 1000, **changes}


async def read_events(platform, **changes):
    """Everything after the headers of a stream, with the status."""
    async with platform.http() as http, http.stream("POST", CHAT, json=body(stream=True, **changes)) as answer:
        text = "".join([part async for part in answer.aiter_text()])
    return answer, text


@pytest.mark.parametrize("n", [1, 3])
async def test_a_worker_that_dies_in_mid_stream_gives_an_error_and_no_finish(launch, fake_config, n):
    platform = await launch({"w0": fake_config(step_s=0.002)})
    task = asyncio.create_task(read_events(platform, n=n))
    await platform.until(lambda: platform.num_running() == n)
    await asyncio.sleep(0)
    engine = platform.engines["w0"]
    start = (await engine.stats()).step
    await platform.until(lambda: engine._step > start + 5)
    engine.kill()
    answer, text = await task
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert answer.status_code == 200
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "worker_lost"
    assert not any('"finish_reason":"' in event for event in events)
    platform.dispatcher.audit()


async def test_the_official_client_raises_on_an_error_in_mid_stream(launch, fake_config):
    platform = await launch({"w0": fake_config(die_at_step=6)})
    async with platform.client() as client:
        stream = await client.chat.completions.create(**body(), stream=True)
        with pytest.raises(openai.APIError, match="worker"):
            _ = [chunk async for chunk in stream]


async def test_a_worker_that_dies_before_the_answer_is_503(launch, fake_config):
    platform = await launch({"w0": fake_config(die_at_step=6)})
    async with platform.http() as http:
        answer = await http.post(CHAT, json=body())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "worker_lost"
        assert answer.headers["retry-after"] == "1"


async def test_a_lost_worker_makes_its_model_unavailable_and_comes_back(launch, fake_config):
    platform = await launch({"w0": fake_config()}, dispatch=DispatchConfig(reconnect_min_s=0.3))
    platform.engines["w0"].kill()
    await platform.until(lambda: not platform.app.models.served())
    async with platform.http() as http:
        answer = await http.post(CHAT, json=body())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/v1/models")).json()["data"] == []
        await platform.until(lambda: bool(platform.app.models.served()))
        assert (await http.post(CHAT, json=body(max_tokens=3))).status_code == 200
        assert (await http.get("/readyz")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_full_queue_is_503_and_never_a_stream(launch, fake_config, stream, n):
    platform = await launch(
        {"w0": fake_config(step_s=0.005, max_num_seqs=1, max_waiting=0)},
        dispatch=DispatchConfig(max_queued_requests=1),
    )
    busy = [asyncio.create_task(read_events(platform)) for _ in range(2)]
    await platform.until(lambda: platform.dispatcher.num_queued == 1)
    async with platform.http() as http:
        answer = await http.post(CHAT, json=body(stream=stream, n=n))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    await platform.until(lambda: platform.num_running() == 0)
    platform.dispatcher.audit()


async def test_the_gateway_has_a_cap_of_its_own(launch, fake_config):
    platform = await launch({"w0": fake_config(step_s=0.005)}, max_concurrent_requests=1)
    busy = asyncio.create_task(read_events(platform))
    await platform.until(lambda: platform.num_running() == 1)
    async with platform.http() as http:
        answer = await http.post(CHAT, json=body())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert (await http.get("/healthz")).status_code == 200
    busy.cancel()


async def test_a_wait_in_the_queue_that_ends_badly_is_an_error_in_the_stream(launch, fake_config):
    platform = await launch(
        {"w0": fake_config(step_s=0.005, max_num_seqs=1, max_waiting=0)},
        dispatch=DispatchConfig(queue_timeout_s=0.3),
        admission_grace_s=0.05,
    )
    busy = asyncio.create_task(read_events(platform))
    await platform.until(lambda: platform.num_running() == 1)
    answer, text = await read_events(platform)
    assert answer.status_code == 200
    assert '"code":"overloaded"' in text
    assert text.endswith("data: [DONE]\n\n")
    busy.cancel()


async def test_comments_keep_a_stream_alive_while_nothing_comes(launch, fake_config):
    platform = await launch({"w0": fake_config(stall_at_step=2)}, keepalive_s=0.1, admission_grace_s=0.05)
    async with platform.http() as http, http.stream("POST", CHAT, json=body(stream=True, max_tokens=5)) as answer:
        parts = answer.aiter_text()
        text = ""
        while text.count(": keep-alive\n\n") < 3:
            text += await anext(parts)
        platform.engines["w0"].resume()
        async for part in parts:
            text += part
    assert text.count('"finish_reason":"length"') == 1
    assert text.endswith("data: [DONE]\n\n")


async def test_headers_come_before_the_first_token(launch, fake_config):
    platform = await launch({"w0": fake_config(stall_at_step=1)}, admission_grace_s=0.05)
    async with platform.http() as http, http.stream("POST", CHAT, json=body(stream=True, max_tokens=5)) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        platform.engines["w0"].resume()
        text = "".join([part async for part in answer.aiter_text()])
    assert text.startswith('data: {"id":"chatcmpl-')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_ended(launch, fake_config, stream):
    platform = await launch({"w0": fake_config(stall_at_step=3)}, request_timeout_s=0.3)
    if stream:
        answer, text = await read_events(platform)
        assert answer.status_code == 200
        assert '"code":"deadline_exceeded"' in text
    else:
        async with platform.http() as http:
            answer = await http.post(CHAT, json=body())
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    platform.engines["w0"].resume()
    await platform.until(lambda: platform.num_running() == 0)


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_the_engine_gave_up_has_no_finish_reason(launch, fake_config, finish, stream):
    platform = await launch()
    engine = platform.engines["w0"]
    compute = engine._compute

    def fail_third_step():
        frame = compute()
        if frame.step < 3:
            return frame
        gone = [SequenceDelta(d.sequence_id, [], [], finish=finish, error="out of memory") for d in frame.deltas]
        engine._in_flight.clear()
        engine._running.clear()
        return type(frame)(frame.step, gone, frame.load)

    engine._compute = fail_third_step
    if stream:
        _, text = await read_events(platform)
        assert '"finish_reason":"' not in text
        assert text.endswith("data: [DONE]\n\n")
        error = json.loads(text.splitlines()[-4].removeprefix("data: "))["error"]
    else:
        async with platform.http() as http:
            answer = await http.post(CHAT, json=body())
        error = answer.json()["error"]
        assert answer.status_code == (500 if finish is FinishReason.ERROR else 503)
    if finish is FinishReason.ERROR:
        assert error["message"] == "out of memory"


async def test_a_refusal_by_the_worker_keeps_its_status(launch, fake_config):
    platform = await launch()

    def refuse(request):
        raise InvalidRequest("the worker does not like it", param="prompt")

    platform.engines["w0"].submit = refuse
    async with platform.http() as http:
        answer = await http.post(CHAT, json=body(stream=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the worker does not like it"


async def test_a_defect_of_ours_tells_nothing_and_hurts_nobody_else(launch, fake_config):
    platform = await launch()
    platform.engines["w0"].submit = lambda request: 1 / 0
    with capture_logs() as logs:
        async with platform.http() as http:
            answer = await http.post(CHAT, json=body(messages=[{"role": "user", "content": "my secret"}]))
            assert (await http.get("/healthz")).status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "division" not in answer.text
    assert [log["kind"] for log in logs if log["event"] == "defect"] == ["ZeroDivisionError"]
    assert "my secret" not in str(logs)
    assert platform.app._generation._num_active == 0


async def test_draining_lets_streams_finish_and_refuses_new_ones(launch, fake_config):
    platform = await launch({"w0": fake_config(step_s=0.002)})
    running = asyncio.create_task(read_events(platform, max_tokens=150))
    async with platform.http() as http:
        # Opened before the drain: afterwards the listening socket is gone.
        assert (await http.get("/readyz")).status_code == 200
        await platform.until(lambda: platform.num_running() == 1)
        platform.app.drain()
        assert (await http.get("/readyz")).status_code == 503
        refused = await http.post(CHAT, json=body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
    platform.server.should_exit = True
    _, text = await running
    assert '"finish_reason":"length"' in text
    await asyncio.wait_for(platform.serving, 10)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", platform.port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_returns(launch, fake_config, number):
    platform = await launch({"w0": fake_config(step_s=0.002)})
    running = asyncio.create_task(read_events(platform, max_tokens=50))
    await platform.until(lambda: platform.num_running() == 1)
    with platform.server.capture_signals():
        os.kill(os.getpid(), number)
        await asyncio.wait_for(platform.serving, 10)
    _, text = await running
    assert '"finish_reason":"length"' in text


async def test_streams_that_outlast_the_drain_end_with_an_error(launch, fake_config):
    platform = await launch({"w0": fake_config(step_s=0.005)}, drain_s=0.2)
    running = asyncio.create_task(read_events(platform))
    await platform.until(lambda: platform.num_running() == 1)
    platform.server.should_exit = True
    _, text = await running
    assert '"code":"draining"' in text
    assert text.endswith("data: [DONE]\n\n")
    await asyncio.wait_for(platform.serving, 10)
    await platform.until(lambda: platform.num_running() == 0)
