import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.core.errors import EngineDead
from headrace.core.frames import SequenceDelta
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import GenerationRequest, SamplingParams, StopConditions
from headrace.core.wire import Frame, Goodbye, Hello, Message, Reader, Welcome, WorkerMessage, Writer
from headrace.worker.config import WorkerConfig
from headrace.worker.service import WorkerService

DEADLINE_S = 10.0


class RawClient:
    """Speaks the protocol byte by byte, and can break it in every way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stream = reader
        self.writer = writer
        self._cutter = Reader(WorkerMessage)
        self._arrived: list[Message] = []
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, path: Path, *, hello: bool = True) -> "RawClient":
        client = cls(*await asyncio.open_unix_connection(str(path)))
        if hello:
            client.send(Hello([1], "raw"))
            assert isinstance(await client.receive(), Welcome)
        return client

    def send(self, *messages: Message) -> None:
        writer = Writer()
        for message in messages:
            writer.add(message)
        self.writer.write(bytes(writer.take()))

    async def receive(self) -> Message | None:
        """The next message; None at the end of the stream."""
        while not self._arrived:
            try:
                data = await asyncio.wait_for(self.stream.read(65536), DEADLINE_S)
            except (ConnectionError, ssl.SSLError):
                return None
            if not data:
                return None
            self._arrived = self._cutter.feed(data)
        message = self._arrived.pop(0)
        if isinstance(message, Frame):
            self.frames.append(message)
        return message

    async def until(self, condition: Callable[[], bool]) -> None:
        """Receive until ``condition`` holds; the stream must not end before."""
        while not condition():
            message = await self.receive()
            assert message is not None, "the worker hung up"
            assert not isinstance(message, Goodbye), message

    async def goodbye(self) -> Goodbye:
        """Receive until the worker's last word, after which nothing comes."""
        while not isinstance(message := await self.receive(), Goodbye):
            assert message is not None, "the worker hung up without a word"
        assert await self.receive() is None
        return message

    async def hung_up(self) -> None:
        while await self.receive() is not None:
            pass

    def deltas(self, name: str) -> list[SequenceDelta]:
        return [d for frame in self.frames for d in frame.frame.deltas if d.sequence_id == name]

    def ended(self, *names: str) -> bool:
        return all(any(d.finish is not None for d in self.deltas(name)) for name in names)

    def tokens(self, name: str) -> list[int]:
        return [token_id for d in self.deltas(name) for token_id in d.token_ids]

    async def close(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


class Hosted:
    """A fake engine in a worker service on a Unix socket."""

    def __init__(self, engine: FakeEngine, service: WorkerService, path: Path) -> None:
        self.engine = engine
        self.service = service
        self.path = path
        self.stuck: list[str] = []
        self.serving: asyncio.Task[None] | None = None
        self._clients: list[RawClient] = []

    async def client(self, *, hello: bool = True) -> RawClient:
        client = await RawClient.open(self.path, hello=hello)
        self._clients.append(client)
        return client

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        await self.service.close()
        if self.serving is not None:
            with contextlib.suppress(EngineDead):
                await self.serving


Host = Callable[..., AbstractAsyncContextManager[Hosted]]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    @asynccontextmanager
    async def make(
        *, http: bool = False, worker: dict[str, object] | None = None, **fake: object
    ) -> AsyncIterator[Hosted]:
        path = tmp_path / "w.sock"
        settings = {"heartbeat_s": 0.05, "http_listen": "127.0.0.1:0" if http else None, **(worker or {})}
        engine = FakeEngine(FakeConfig(**fake))
        stuck: list[str] = []
        service = WorkerService(engine, WorkerConfig(listen=f"unix:{path}", **settings), on_stuck=stuck.append)
        await service.start()
        hosted = Hosted(engine, service, path)
        hosted.stuck = stuck
        hosted.serving = asyncio.create_task(service.serve())
        try:
            yield hosted
        finally:
            await hosted.stop()

    return make


def ask(
    name: str,
    max_tokens: int = 8,
    *,
    prompt: list[int] | None = None,
    seed: int = 0,
    logprobs: int | None = None,
    tenant: str = "t",
) -> GenerationRequest:
    return GenerationRequest(
        SequenceId(name),
        TenantId(tenant),
        prompt or [20, 21, 22],
        StopConditions(max_tokens),
        SamplingParams(seed=seed, logprobs=logprobs),
    )


@pytest.fixture
def request_for() -> Callable[..., GenerationRequest]:
    return ask


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until other tasks have made ``condition`` true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(name="eventually")
def _eventually() -> object:
    return eventually
