"""Whatever a stranger or a broken client does to a worker, it is told off or dropped, and the others do not notice."""

import asyncio
import contextlib
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.adapters.engine.remote import connect
from headrace.adapters.engine.tls import TlsFiles, client_context, server_context
from headrace.apps.pki import ensure_authority, ensure_certificate
from headrace.core.errors import EngineDead
from headrace.core.requests import FinishReason
from headrace.core.wire import (
    MAX_SEQUENCE_ID_CHARS,
    Goodbye,
    GoodbyeReason,
    Hello,
    StatsRequest,
    Submit,
    Welcome,
    Writer,
)
from headrace.worker.config import WorkerConfig
from headrace.worker.service import WorkerService


def encode(*messages: object) -> bytes:
    writer = Writer()
    for message in messages:
        writer.add(message)
    return bytes(writer.take())


BEFORE_HELLO = {
    "garbage": b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    "random bytes": bytes(range(256)) * 40,
    "huge length": b"\xff\xff\xff\xff",
    "hello over its limit": struct.pack(">I", 4097),
    "not MessagePack": b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1",
    "unknown message": b"\x00\x00\x00\x02\x91\x63",
    "a worker's message": encode(Goodbye(GoodbyeReason.CLOSED, "no, you")),
    "no hello first": encode(StatsRequest(1)),
}


@pytest.mark.parametrize("case", BEFORE_HELLO)
async def test_nonsense_instead_of_hello_is_answered_and_dropped(host, request_for, case: str) -> None:
    async with host(step_s=0.001) as hosted:
        honest, rogue = await hosted.client(), await hosted.client(hello=False)
        honest.send(Submit(request_for("a", 40)))
        rogue.writer.write(BEFORE_HELLO[case])
        goodbye = await rogue.goodbye()
        await honest.until(lambda: honest.ended("a"))

        assert goodbye.reason is GoodbyeReason.PROTOCOL_ERROR
        assert goodbye.message
        assert honest.deltas("a")[-1].finish is FinishReason.LENGTH


AFTER_HELLO = {
    "huge length": b"\x7f\xff\xff\xff",
    "garbage": b"\x00\x00\x00\x03abc",
    "second hello": encode(Hello([1])),
    "a worker's message": encode(Goodbye(GoodbyeReason.CLOSED, "no, you")),
    "prompt of strings": struct.pack(">I", 5) + b"\x92\x02\x81\xa1a",
}


@pytest.mark.parametrize("case", AFTER_HELLO)
async def test_nonsense_after_hello_ends_the_connection_and_its_sequences(
    host, request_for, eventually, case: str
) -> None:
    async with host(step_s=0.001) as hosted:
        honest, rogue = await hosted.client(), await hosted.client()
        honest.send(Submit(request_for("a", 60)))
        rogue.send(Submit(request_for("a", 4000)))
        await rogue.until(lambda: len(rogue.tokens("a")) > 0)
        rogue.writer.write(AFTER_HELLO[case])
        goodbye = await rogue.goodbye()
        await honest.until(lambda: honest.ended("a"))
        await eventually(lambda: hosted.engine.load().num_running == 0)

        assert goodbye.reason is GoodbyeReason.PROTOCOL_ERROR
        assert (await hosted.engine.stats()).num_finished == {"abort": 1, "length": 1}


async def test_a_version_that_is_not_spoken_is_refused_as_such(host) -> None:
    async with host() as hosted:
        client = await hosted.client(hello=False)
        client.send(Hello([7, 8], "from the future"))
        goodbye = await client.goodbye()

        assert goodbye.reason is GoodbyeReason.VERSION
        assert "[7, 8]" in goodbye.message


async def test_an_id_in_flight_submitted_again_ends_the_connection(host, request_for, eventually) -> None:
    async with host(step_s=0.001) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 4000)), Submit(request_for("a", 4000)))

        assert (await client.goodbye()).reason is GoodbyeReason.PROTOCOL_ERROR
        await eventually(lambda: hosted.engine.load().num_running + hosted.engine.load().num_waiting == 0)


async def test_an_endless_sequence_id_ends_the_connection(host, request_for) -> None:
    async with host() as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("x" * (MAX_SEQUENCE_ID_CHARS + 1))))

        assert (await client.goodbye()).reason is GoodbyeReason.PROTOCOL_ERROR


async def test_a_flood_of_questions_ends_the_connection(host) -> None:
    async with host() as hosted:
        client = await hosted.client()
        client.send(*(StatsRequest(i) for i in range(1000)))

        assert (await client.goodbye()).reason is GoodbyeReason.PROTOCOL_ERROR


async def test_who_says_nothing_is_dropped(host) -> None:
    async with host(worker={"handshake_timeout_s": 0.1}) as hosted:
        silent = await hosted.client(hello=False)
        patient = await hosted.client()
        goodbye = await silent.goodbye()
        await patient.until(lambda: len(patient.frames) > 6)

        assert "Hello" in goodbye.message


async def test_who_trickles_hello_is_dropped(host) -> None:
    async with host(worker={"handshake_timeout_s": 0.1}) as hosted:
        client = await hosted.client(hello=False)
        client.writer.write(encode(Hello([1], "slow"))[:-1])

        assert "Hello" in (await client.goodbye()).message


async def test_a_client_that_dies_in_the_middle_of_a_message_is_forgotten(host, request_for, eventually) -> None:
    async with host(step_s=0.001) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 4000)))
        await client.until(lambda: len(client.tokens("a")) > 0)
        client.writer.write(encode(Submit(request_for("b")))[:-5])
        await client.close()
        await eventually(lambda: hosted.engine.load().num_running == 0)

        assert (await hosted.engine.stats()).num_finished == {"abort": 1}


async def test_one_connection_too_many_is_refused(host) -> None:
    async with host(worker={"max_connections": 2}) as hosted:
        first, _ = await hosted.client(), await hosted.client()
        third = await hosted.client(hello=False)
        third.send(Hello([1], "third"))
        assert (await third.goodbye()).reason is GoodbyeReason.TOO_MANY_CONNECTIONS
        await first.close()

        fourth = await hosted.client(hello=False)
        while True:
            fourth.send(Hello([1], "fourth"))
            answer = await fourth.receive()
            if isinstance(answer, Welcome):
                break
            fourth = await hosted.client(hello=False)


async def test_a_client_that_does_not_read_is_dropped_and_its_sequences_aborted(host, request_for, eventually) -> None:
    async with host(step_s=0.001, max_num_seqs=40, worker={"max_outgoing_bytes": 100_000}) as hosted:
        honest, deaf = await hosted.client(), await hosted.client()
        honest.send(Submit(request_for("a", 300)))
        deaf.writer.transport.pause_reading()
        deaf.send(*(Submit(request_for(f"s{i}", 4000, logprobs=20)) for i in range(20)))
        await honest.until(lambda: honest.ended("a"))
        await eventually(lambda: hosted.engine.load().num_running == 0)

        assert honest.deltas("a")[-1].finish is FinishReason.LENGTH
        assert (await hosted.engine.stats()).num_finished == {"abort": 20, "length": 1}


# --- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    ensure_authority(directory)
    return directory


@pytest.fixture(scope="module")
def foreign_pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("foreign")
    ensure_authority(directory)
    return directory


@pytest.fixture
async def worker(pki: Path) -> AsyncIterator[WorkerService]:
    service = WorkerService(
        FakeEngine(FakeConfig()),
        WorkerConfig(listen="127.0.0.1:0", http_listen=None, heartbeat_s=0.05, handshake_timeout_s=0.3),
        server_context(ensure_certificate(pki, "worker")),
        on_stuck=pytest.fail,
    )
    await service.start()
    yield service
    # Whatever was tried, those who may still can.
    engine = await connect(str(service.address), client_context(ensure_certificate(pki, "gateway")))
    await engine.close()
    await service.close()


def quiet_loop() -> None:
    """Handshakes that fail on purpose are reported to the loop's handler, as they should."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)


async def test_a_client_without_a_certificate_is_refused(worker: WorkerService, pki: Path) -> None:
    quiet_loop()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(pki / "ca.pem")

    with pytest.raises(EngineDead, match=r"handshake|reached"):
        await connect(str(worker.address), context)


async def test_a_client_with_a_foreign_certificate_is_refused(
    worker: WorkerService, pki: Path, foreign_pki: Path
) -> None:
    quiet_loop()
    foreign = ensure_certificate(foreign_pki, "gateway")

    with pytest.raises(EngineDead, match=r"handshake|reached"):
        await connect(str(worker.address), client_context(TlsFiles(pki / "ca.pem", foreign.cert, foreign.key)))


async def test_a_worker_s_certificate_does_not_make_a_client(worker: WorkerService, pki: Path) -> None:
    with pytest.raises(EngineDead, match=r"gateway\.headrace\.internal"):
        await connect(str(worker.address), client_context(ensure_certificate(pki, "worker")))


async def test_a_client_refuses_a_worker_of_a_foreign_authority(worker: WorkerService, foreign_pki: Path) -> None:
    quiet_loop()
    with pytest.raises(EngineDead, match="certificate verify failed"):
        await connect(str(worker.address), client_context(ensure_certificate(foreign_pki, "gateway")))


async def test_a_client_refuses_a_gateway_that_poses_as_a_worker(pki: Path) -> None:
    quiet_loop()
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=server_context(ensure_certificate(pki, "gateway"))
    )
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(EngineDead, match="certificate"):
        await connect(f"127.0.0.1:{port}", client_context(ensure_certificate(pki, "gateway")))
    server.close()


async def test_older_tls_is_refused(worker: WorkerService, pki: Path) -> None:
    quiet_loop()
    context = client_context(ensure_certificate(pki, "gateway"))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2

    with pytest.raises(EngineDead):
        await connect(str(worker.address), context)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\x00" * 100])
async def test_who_does_not_speak_tls_is_dropped(worker: WorkerService, data: bytes) -> None:
    quiet_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.address.port)
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(5):
            while await reader.read(1000):
                pass
    writer.close()
