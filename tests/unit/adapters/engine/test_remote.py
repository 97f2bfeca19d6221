"""What a client makes of a worker that misbehaves."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.adapters.engine.remote import RemoteConfig, RemoteEngine, connect
from headrace.adapters.engine.tls import client_context, server_context
from headrace.apps.pki import ensure_authority, ensure_certificate
from headrace.core.errors import ConfigError, Draining, EngineDead, InvalidRequest, Overloaded
from headrace.core.frames import EngineDescription, EngineLoad, EngineStats, SequenceDelta, StepFrame
from headrace.core.ids import SequenceId, TenantId, VersionId
from headrace.core.requests import GenerationRequest, SamplingParams, StopConditions
from headrace.core.wire import (
    ClientMessage,
    Frame,
    Goodbye,
    GoodbyeReason,
    Hello,
    Message,
    Reader,
    StatsReply,
    Submit,
    Welcome,
    Writer,
)
from headrace.worker.config import WorkerConfig
from headrace.worker.service import WorkerService

DESCRIPTION = EngineDescription("m", VersionId("v"), 256, 1000, 16, 64, 8, "none", "none")
LOAD = EngineLoad(0, 0, 0, 64, 64, 4, 0.0, 0.0)
WELCOME = Welcome(1, DESCRIPTION, LOAD, 0.01)


def ask(name: str, max_tokens: int = 8, **more: object) -> GenerationRequest:
    return GenerationRequest(SequenceId(name), TenantId("t"), [20], StopConditions(max_tokens), **more)


def beat(num_seen: int = 0, credit: int = 4, *deltas: SequenceDelta, draining: bool = False) -> Frame:
    load = EngineLoad(0, 0, 0, 64, 64, credit, 0.0, 0.0)
    return Frame(StepFrame(1, list(deltas), load), num_seen, draining)


class Worker:
    """The other end, written out by the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._cutter = Reader(ClientMessage)
        self._arrived: list[Message] = []

    def say(self, *messages: Message) -> None:
        buffer = Writer()
        for message in messages:
            buffer.add(message)
        self.write(bytes(buffer.take()))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> Message:
        while not self._arrived:
            data = await self._reader.read(65536)
            if not data:
                raise ConnectionError
            self._arrived = self._cutter.feed(data)
        return self._arrived.pop(0)

    def end(self) -> None:
        """Close after what was written."""
        self._writer.close()

    def hang_up(self) -> None:
        self._writer.transport.abort()


Script = Callable[[Worker], Awaitable[None]]
Start = Callable[[Script], Awaitable[str]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a worker that follows a script; the answer is its address."""
    path = tmp_path / "rogue.sock"
    ends: list[Worker] = []
    servers: list[asyncio.Server] = []

    async def begin(script: Script) -> str:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            worker = Worker(reader, writer)
            ends.append(worker)
            with contextlib.suppress(ConnectionError):
                assert isinstance(await worker.hear(), Hello)
                await script(worker)
                await reader.read()

        servers.append(await asyncio.start_unix_server(talk, path))
        return f"unix:{path}"

    yield begin
    for server in servers:
        server.close()
    for end in ends:
        end.hang_up()
    await asyncio.sleep(0)


async def drained_frames(engine: RemoteEngine) -> list[StepFrame]:
    return [frame async for frame in engine.frames()]


AT_HELLO: dict[str, tuple[bytes | Message, str]] = {
    "garbage": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "broke the worker protocol"),
    "huge length": (b"\xff\xff\xff\xff", "broke the worker protocol"),
    "another version": (Welcome(9, DESCRIPTION, LOAD, 0.5), "out of place"),
    "a frame first": (beat(), "out of place"),
    "goodbye": (Goodbye(GoodbyeReason.VERSION, "only 2 is spoken here"), "only 2 is spoken here"),
}


@pytest.mark.parametrize("case", AT_HELLO)
async def test_a_handshake_that_goes_wrong_is_explained(start: Start, case: str) -> None:
    answer, complaint = AT_HELLO[case]

    async def script(worker: Worker) -> None:
        if isinstance(answer, bytes):
            worker.write(answer)
        else:
            worker.say(answer)

    address = await start(script)
    with pytest.raises(EngineDead, match=complaint):
        await connect(address)


async def test_a_worker_that_hangs_up_at_once(start: Start) -> None:
    async def script(worker: Worker) -> None:
        worker.hang_up()

    address = await start(script)
    with pytest.raises(EngineDead, match="lost during the handshake"):
        await connect(address)


async def test_a_worker_that_does_not_answer(start: Start) -> None:
    async def script(worker: Worker) -> None:
        pass

    address = await start(script)
    with pytest.raises(EngineDead, match=r"did not answer within 0\.1 s"):
        await connect(address, config=RemoteConfig(connect_timeout_s=0.1))


async def test_a_worker_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="cannot be reached"):
        await connect(f"unix:{tmp_path}/nobody.sock")


async def test_tcp_without_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match="mutual TLS"):
        await connect("127.0.0.1:1")


AFTER_WELCOME: dict[str, tuple[bytes | Message, str]] = {
    "garbage": (b"\x00\x00\x00\x01\xc1", "broke the worker protocol"),
    "huge length": (b"\x7f\xff\xff\xff", "broke the worker protocol"),
    "second welcome": (WELCOME, "out of place"),
    "half a frame": (b"\x00\x00\x00\x10\x93", "was lost"),
    "goodbye": (Goodbye(GoodbyeReason.ENGINE_DEAD, "out of memory"), "out of memory"),
    "drained unasked": (Goodbye(GoodbyeReason.DRAINED, "all done"), "all done"),
}


@pytest.mark.parametrize("case", AFTER_WELCOME)
async def test_a_connection_that_goes_wrong_kills_the_engine(start: Start, case: str) -> None:
    answer, complaint = AFTER_WELCOME[case]

    async def script(worker: Worker) -> None:
        worker.say(WELCOME, beat())
        assert isinstance(await worker.hear(), Submit)
        if isinstance(answer, bytes):
            worker.write(answer)
        else:
            worker.say(answer)
        if case == "half a frame":
            worker.end()

    engine = await connect(await start(script))
    engine.submit(ask("a"))
    with pytest.raises(EngineDead, match=complaint):
        await asyncio.wait_for(drained_frames(engine), 5)
    with pytest.raises(EngineDead, match=complaint):
        await engine.stats()


async def test_a_silent_worker_is_given_up(start: Start) -> None:
    async def script(worker: Worker) -> None:
        worker.say(WELCOME)

    engine = await connect(await start(script), config=RemoteConfig(silence_timeout_s=0.1))
    with pytest.raises(EngineDead, match=r"silent for 0\.1 s"):
        await asyncio.wait_for(drained_frames(engine), 5)


async def test_a_worker_with_slow_heartbeats_is_waited_for(start: Start) -> None:
    async def script(worker: Worker) -> None:
        worker.say(Welcome(1, DESCRIPTION, LOAD, 0.2))
        for _ in range(3):
            await asyncio.sleep(0.2)
            worker.say(beat())
        worker.say(Goodbye(GoodbyeReason.CLOSED, "enough"))

    engine = await connect(await start(script), config=RemoteConfig(silence_timeout_s=0.05))
    with pytest.raises(EngineDead, match="enough"):
        await asyncio.wait_for(drained_frames(engine), 5)


async def test_our_own_late_loop_is_not_the_worker_s_silence(start: Start) -> None:
    async def script(worker: Worker) -> None:
        worker.say(WELCOME)
        while True:
            worker.say(beat())
            await asyncio.sleep(0.02)

    engine = await connect(await start(script), config=RemoteConfig(silence_timeout_s=0.1))
    frames = engine.frames()
    await anext(frames)
    time.sleep(0.3)  # noqa: ASYNC251 -- blocks the event loop on purpose, for longer than the timeout
    for _ in range(20):
        await asyncio.wait_for(anext(frames), 5)

    await engine.close()


async def test_credit_counts_what_the_worker_has_not_seen(start: Start) -> None:
    told = asyncio.Event()

    async def script(worker: Worker) -> None:
        worker.say(WELCOME)
        for _ in range(3):
            assert isinstance(await worker.hear(), Submit)
        worker.say(beat(2, 5))  # the credit of a moment at which two of three had arrived
        told.set()

    engine = await connect(await start(script))
    for index in range(3):
        assert engine.load().credit == 4 - index
        engine.submit(ask(f"s{index}"))
    frames = engine.frames()
    await asyncio.wait_for(anext(frames), 5)

    assert told.is_set()
    assert engine.load().credit == 4
    await engine.close()


async def test_a_draining_worker_takes_nothing(start: Start) -> None:
    async def script(worker: Worker) -> None:
        worker.say(WELCOME, beat(draining=True))

    engine = await connect(await start(script))
    await asyncio.wait_for(anext(engine.frames()), 5)

    with pytest.raises(Draining):
        engine.submit(ask("a"))
    await engine.close()


async def test_statistics_for_which_nobody_waits_any_more_are_ignored(start: Start) -> None:
    stats = EngineStats(LOAD, 1, 0.0, True, False, 0, 0, 0, 0, {}, 0, 0)

    async def script(worker: Worker) -> None:
        worker.say(WELCOME, StatsReply(99, stats), beat())

    engine = await connect(await start(script))
    await asyncio.wait_for(anext(engine.frames()), 5)
    await engine.close()


async def test_a_worker_that_does_not_read_gets_no_more(start: Start) -> None:
    async def script(worker: Worker) -> None:
        worker._reader._transport.pause_reading()
        worker.say(Welcome(1, EngineDescription("m", VersionId("v"), 10**6, 1000, 16, 10**6, 8, "", ""), LOAD, 60.0))

    engine = await connect(await start(script), config=RemoteConfig(max_outgoing_bytes=100_000))
    big = [50_000] * 200_000
    engine.submit(GenerationRequest(SequenceId("a"), TenantId("t"), big, StopConditions(1)))
    with pytest.raises(Overloaded, match="does not keep up"):
        engine.submit(ask("c"))
    await engine.close()


@pytest.mark.parametrize("request_", [ask("x" * 257), ask("a", cache_salt="\ud800")])
async def test_what_cannot_be_sent_is_refused(start: Start, request_: GenerationRequest) -> None:
    async def script(worker: Worker) -> None:
        worker.say(WELCOME)

    engine = await connect(await start(script))
    with pytest.raises(InvalidRequest):
        engine.submit(request_)
    assert engine.load().credit == 4
    await engine.close()


async def test_frames_that_nobody_takes_wait_at_the_worker_which_then_gives_up(tmp_path: Path) -> None:
    ensure_authority(tmp_path)
    fake = FakeEngine(FakeConfig(max_model_len=10**6))
    worker = WorkerService(
        fake,
        WorkerConfig(listen="127.0.0.1:0", http_listen=None, max_outgoing_bytes=200_000),
        server_context(ensure_certificate(tmp_path, "worker")),
        on_stuck=pytest.fail,
    )
    await worker.start()
    engine = await connect(str(worker.address), client_context(ensure_certificate(tmp_path, "gateway")))
    for index in range(8):
        engine.submit(ask(f"s{index}", 900_000, sampling=SamplingParams(logprobs=20)))
    async with asyncio.timeout(20):
        while fake.load().num_running + fake.load().num_waiting > 0 or (await fake.stats()).step == 0:
            await asyncio.sleep(0.01)

    assert (await fake.stats()).num_finished == {"abort": 8}
    with pytest.raises(EngineDead):
        await asyncio.wait_for(drained_frames(engine), 10)
    await engine.close()
    await worker.close()
