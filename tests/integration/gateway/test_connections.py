"""Raw sockets: clients that are slow, huge, half-hearted, or gone."""

import asyncio
import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}).encode()


def request(platform, body=BODY, *, path="/v1/chat/completions", extra=b"", length=None):
    length = len(body) if length is None else length
    return (
        b"POST %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n%s\r\n" % (path.encode(), platform.key.encode(), length, extra)
    ) + body


def stream_body(max_tokens=2000):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({**fields, "max_tokens": max_tokens, "stream": True}).encode()


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_headers_that_do_not_come_time_out(launch):
    platform = await launch(header_timeout_s=0.2)
    status, error = error_of(await platform.raw(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-slow: "))
    assert status == 408
    assert error["code"] == "request_timeout"


async def test_a_silent_connection_is_closed(launch):
    platform = await launch(header_timeout_s=0.2)
    assert await platform.raw(b"") == b""


async def test_a_body_that_does_not_come_times_out(launch):
    platform = await launch(body_timeout_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(request(platform, b'{"model"', length=100))
    status_line = await asyncio.wait_for(reader.readline(), 10)
    assert b" 408 " in status_line
    # The rest of the body is not waited for either: the connection ends.
    rest = await asyncio.wait_for(reader.read(), 10)
    assert b"request_timeout" in rest
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-endless: " + b"a" * 400_000,
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(200)) + b"\r\n",
    ],
    ids=["big", "endless", "url", "many"],
)
async def test_headers_over_the_limit_are_431(platform, head):
    status, error = error_of(await platform.raw(head))
    assert status == 431
    assert error["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: ten\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    ],
    ids=["tls", "nonsense", "version", "length", "smuggling", "header"],
)
async def test_what_is_not_http_is_400_in_our_shape(platform, data):
    status, error = error_of(await platform.raw(data))
    assert status == 400
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [b"ZZ\r\n{}\r\n", b"-1\r\n{}\r\n", b"f" * 17 + b"\r\n{}\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"2\r\n{}0\r\n"],
    ids=["no number", "negative", "huge", "too short", "no line end"],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_chunks_that_lie_are_400_in_our_shape(platform, body, at_once):
    head = request(platform, b"", extra=b"transfer-encoding: chunked\r\n").replace(b"content-length: 0\r\n", b"")
    reader, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(head + body if at_once else head)
    if not at_once:
        await platform.until(lambda: platform.app._generation._num_active == 1)
        writer.write(body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nx-request-id: " in answer
    status, error = error_of(answer)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    await platform.until(lambda: platform.app._generation._num_active == 0)


async def test_a_truncated_body_takes_nothing(platform):
    _, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(request(platform, BODY[:20], length=len(BODY)))
    await writer.drain()
    await platform.until(lambda: platform.app._generation._num_active == 1)
    writer.close()
    await platform.until(lambda: platform.app._generation._num_active == 0)
    assert platform.num_running() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation(launch, fake_config, stream):
    platform = await launch({"w0": fake_config(step_s=0.005, max_model_len=4096)})
    body = stream_body(4000) if stream else BODY.replace(b'"max_tokens": 3', b'"max_tokens": 4000')
    _, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(request(platform, body))
    await platform.until(lambda: platform.num_running() == 1)
    engine = platform.engines["w0"]
    writer.close()
    await platform.until(lambda: platform.app._generation._num_active == 0)
    step = (await engine.stats()).step
    await platform.until(lambda: platform.num_running() == 0)
    assert (await engine.stats()).step <= step + 2
    assert (await engine.stats()).num_finished == {"abort": 1}
    assert 'route="/v1/chat/completions",status="499"} 1.0' in platform.app.metrics.exposition().decode()
    platform.dispatcher.audit()


@pytest.mark.parametrize("num_requests", [2, 5])
async def test_a_client_that_sent_several_requests_and_leaves_ends_the_one_at_work(launch, fake_config, num_requests):
    platform = await launch({"w0": fake_config(step_s=0.005, max_model_len=4096)})
    _, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(request(platform, BODY.replace(b'"max_tokens": 3', b'"max_tokens": 4000')) * num_requests)
    await platform.until(lambda: platform.num_running() == 1)
    writer.close()
    await platform.until(lambda: platform.num_running() == 0, timeout_s=2.0)
    assert (await platform.engines["w0"].stats()).num_finished == {"abort": 1}


async def test_all_choices_end_when_their_client_leaves(launch, fake_config):
    platform = await launch({"w0": fake_config(step_s=0.005)})
    body = json.dumps({**json.loads(stream_body(1000)), "n": 8}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(request(platform, body))
    await platform.until(lambda: platform.num_running() == 8)
    writer.close()
    await platform.until(lambda: platform.num_running() == 0)
    platform.dispatcher.audit()


async def test_a_client_that_leaves_the_queue_takes_nothing(launch, fake_config):
    platform = await launch({"w0": fake_config(step_s=0.005, max_num_seqs=1, max_waiting=0)})
    _, first = await asyncio.open_connection("127.0.0.1", platform.port)
    first.write(request(platform, stream_body()))
    await platform.until(lambda: platform.num_running() == 1)
    _, second = await asyncio.open_connection("127.0.0.1", platform.port)
    second.write(request(platform, stream_body()))
    await platform.until(lambda: platform.dispatcher.num_queued == 1)
    second.close()
    await platform.until(lambda: platform.dispatcher.num_queued == 0)
    assert platform.num_running() == 1
    first.close()
    await platform.until(lambda: platform.num_running() == 0)


async def test_finished_requests_abort_nothing(launch):
    platform = await launch()
    async with platform.http() as http:
        for stream in (False, True):
            fields = {**json.loads(BODY), "stream": stream}
            assert (await http.post("/v1/chat/completions", json=fields)).status_code == 200
    assert (await platform.engines["w0"].stats()).num_finished == {"length": 2}


async def test_a_reader_that_stops_reading_is_cut(launch, fake_config):
    platform = await launch({"w0": fake_config(max_model_len=60_000)}, write_timeout_s=0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", platform.port, limit=1024)
    body = json.dumps({**json.loads(stream_body(50_000)), "logprobs": True, "top_logprobs": 20}).encode()
    writer.write(request(platform, body))
    assert b"200" in await asyncio.wait_for(reader.readline(), 10)
    # Nothing is read any more; buffers fill, and the write timer runs out.
    await platform.until(lambda: platform.app._generation._num_active == 0)
    await platform.until(lambda: platform.num_running() == 0)
    writer.transport.abort()


async def test_requests_on_one_connection_are_answered_in_order(platform):
    two = request(platform) + request(platform, extra=b"connection: close\r\n")
    answer = await platform.raw(two)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_expect_continue_is_answered(platform):
    reader, writer = await asyncio.open_connection("127.0.0.1", platform.port)
    writer.write(request(platform, b"", length=len(BODY), extra=b"expect: 100-continue\r\nconnection: close\r\n"))
    assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 100 Continue\r\n"
    writer.write(BODY)
    assert b"chat.completion" in await asyncio.wait_for(reader.read(), 10)
    writer.close()
