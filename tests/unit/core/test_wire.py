import itertools
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ProtocolError
from headrace.core.frames import EngineDescription, EngineLoad, SequenceDelta, SequenceTiming, StepFrame
from headrace.core.ids import SequenceId, TenantId, VersionId
from headrace.core.requests import FinishReason, GenerationRequest, SamplingParams, StopConditions
from headrace.core.wire import (
    MAX_MESSAGE_BYTES,
    Abort,
    ClientMessage,
    Drain,
    Frame,
    Goodbye,
    GoodbyeReason,
    Hello,
    Message,
    Reader,
    StatsRequest,
    Submit,
    Welcome,
    WorkerMessage,
    Writer,
    common_version,
)

LOAD = EngineLoad(1, 2, 3, 4, 5, 6, 7.5, 0.25)
DESCRIPTION = EngineDescription("m", VersionId("abc"), 4096, 1000, 16, 64, 8, "bfloat16", "cpu")
REQUEST = GenerationRequest(
    SequenceId("r/0"),
    TenantId("t"),
    [1, 2, 70_000],
    StopConditions(5, (2,), 1),
    SamplingParams(seed=2**63 - 1, logit_bias={5: -1.5}, logprobs=3),
    cache_salt="salt",
    num_resumed_tokens=2,
)
DELTA = SequenceDelta(SequenceId("r/0"), [9], finish=FinishReason.LENGTH, timing=SequenceTiming(0.1, 0.2, 0.3, 4, 5))
FROM_CLIENT: list[Message] = [Hello([1, 2], "gw"), Submit(REQUEST), Abort(SequenceId("r/0")), Drain(), StatsRequest(7)]
FROM_WORKER: list[Message] = [
    Welcome(1, DESCRIPTION, LOAD, 0.5),
    Frame(StepFrame(3, [DELTA], LOAD, {TenantId("t"): 4}), 2, draining=True),
    Goodbye(GoodbyeReason.DRAINED, "done"),
]


def encode(*messages: Message) -> bytes:
    writer = Writer()
    for message in messages:
        writer.add(message)
    return bytes(writer.take())


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(("kind", "messages"), [(ClientMessage, FROM_CLIENT), (WorkerMessage, FROM_WORKER)])
def test_messages_come_back_as_they_were(kind: object, messages: list[Message]) -> None:
    assert Reader(kind).feed(encode(*messages)) == messages


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_it_does_not_matter_how_the_stream_is_cut(cuts: list[int]) -> None:
    data = encode(*FROM_CLIENT)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = Reader(ClientMessage)

    messages = [m for start, end in itertools.pairwise(edges) for m in reader.feed(data[start:end])]

    assert messages == FROM_CLIENT


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_incomplete_but_never_another_error(data: bytes) -> None:
    reader = Reader(ClientMessage, max_bytes=200)
    try:
        reader.feed(data)
    except ProtocolError:
        return
    assert len(reader._buffer) <= 204


@given(st.binary(min_size=1, max_size=100))
def test_a_garbage_body_is_refused(body: bytes) -> None:
    valid = {encode(m)[4:] for m in FROM_CLIENT}
    if body in valid or _decodes(body):
        return
    with pytest.raises(ProtocolError):
        Reader(ClientMessage).feed(framed(body))


def _decodes(body: bytes) -> bool:
    try:
        msgspec.msgpack.decode(body, type=ClientMessage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Reader(ClientMessage).feed(framed(b""))


def test_a_huge_length_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(ProtocolError, match="4294967295"):
        Reader(ClientMessage).feed(b"\xff\xff\xff\xff")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Reader(ClientMessage).feed(framed(b"\x91" * 100_000 + b"\xc0"))


def test_messages_of_the_other_direction_are_refused() -> None:
    for message in FROM_WORKER:
        with pytest.raises(ProtocolError):
            Reader(ClientMessage).feed(encode(message))
    for message in FROM_CLIENT:
        with pytest.raises(ProtocolError):
            Reader(WorkerMessage).feed(encode(message))


def test_fields_of_a_later_revision_are_ignored() -> None:
    (message,) = Reader(ClientMessage).feed(framed(msgspec.msgpack.encode([1, [1], "gw", "a field to come"])))

    assert message == Hello([1], "gw")


def test_a_message_over_the_limit_is_not_queued() -> None:
    writer = Writer()
    writer.add(Drain())
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
        writer.add(Hello([1], "x" * MAX_MESSAGE_BYTES))
    writer.add(StatsRequest(1))

    assert Reader(ClientMessage).feed(bytes(writer.take())) == [Drain(), StatsRequest(1)]


@pytest.mark.parametrize("changes", [{"prompt": [2**70]}, {"cache_salt": "\ud800"}])
def test_what_cannot_be_encoded_is_not_queued(changes: dict[str, object]) -> None:
    writer = Writer()
    with pytest.raises(ProtocolError):
        writer.add(Submit(msgspec.structs.replace(REQUEST, **changes)))

    assert writer.take() == b""


def test_taking_hands_the_buffer_over() -> None:
    writer = Writer()
    writer.add(Drain())
    first = writer.take()
    writer.add(StatsRequest(1))

    assert bytes(first) == encode(Drain())
    assert writer.num_bytes == len(encode(StatsRequest(1)))


@pytest.mark.parametrize(("theirs", "common"), [([1], 1), ([1, 99], 1), ([99], None), ([], None)])
def test_the_highest_common_version_is_spoken(theirs: list[int], common: int | None) -> None:
    assert common_version(theirs) == common
