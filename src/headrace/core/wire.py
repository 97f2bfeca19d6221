"""The worker protocol: messages, and how they lie in a byte stream. ``docs/reference/worker-protocol.md`` explains it.

A stream is a sequence of messages, each a length (4 bytes, big-endian) and that many bytes of MessagePack. A message is
an array whose first element says which one it is. Fields are only ever appended, with defaults, so a peer of the same
version ignores what it does not know.
"""

import enum
import struct

import msgspec

from headrace.core.errors import ProtocolError
from headrace.core.frames import EngineDescription, EngineLoad, EngineStats, StepFrame
from headrace.core.ids import SequenceId
from headrace.core.requests import GenerationRequest

VERSIONS = (1,)
"""The protocol versions that this build speaks."""

MAX_HELLO_BYTES = 4096
"""What a worker reads of a message before it knows who speaks."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message, either way; a prompt of a million tokens takes five."""

MAX_SEQUENCE_ID_CHARS = 256

_LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Client, first: which versions it speaks, and a name for the worker's log."""

    versions: list[int]
    client: str = ""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Client: take this sequence. A refusal comes back as the sequence's only delta."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Client: end this sequence; ignored if this connection has no such sequence in flight."""

    sequence_id: SequenceId


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Client: let the worker take nothing new, finish what it has, and say ``Goodbye``."""


class StatsRequest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Client: send the engine's statistics; the reply repeats ``id``."""

    id: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Worker, in answer to ``Hello``: the version both will speak, and what it serves."""

    version: int
    description: EngineDescription
    load: EngineLoad
    """As in ``Frame``: ``credit`` is this connection's share."""
    heartbeat_s: float
    """A ``Frame`` comes at least this often."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Worker: what one step gave this connection's sequences. Without deltas it is a heartbeat."""

    frame: StepFrame
    """``frame.load.credit`` is this connection's share of the engine's credit."""
    num_submits_seen: int
    """Of this connection, since its start. What the client sent beyond that, ``credit`` does not account for yet."""
    draining: bool = False


class StatsReply(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Worker, in answer to ``StatsRequest``."""

    id: int
    stats: EngineStats


class GoodbyeReason(enum.StrEnum):
    DRAINED = "drained"
    """Everything was finished; the worker leaves."""
    CLOSED = "closed"
    """The worker stops now; sequences in flight are lost."""
    ENGINE_DEAD = "engine_dead"
    PROTOCOL_ERROR = "protocol_error"
    """The peer sent what the protocol does not allow."""
    VERSION = "version"
    """No protocol version in common."""
    TOO_MANY_CONNECTIONS = "too_many_connections"


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Worker, last: the connection ends, and why."""

    reason: GoodbyeReason
    message: str


ClientMessage = Hello | Submit | Abort | Drain | StatsRequest
WorkerMessage = Welcome | Frame | StatsReply | Goodbye
Message = ClientMessage | WorkerMessage


def common_version(theirs: list[int]) -> int | None:
    """The highest version that both speak, or None."""
    return max(set(theirs) & set(VERSIONS), default=None)


class Writer:
    """Collects messages into one buffer; one per connection, so its memory and encoder are reused by nobody else."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._pending = bytearray()

    def add(self, message: Message) -> None:
        """Append a message.

        Raises:
            ProtocolError: it is longer than ``MAX_MESSAGE_BYTES``, or holds what MessagePack cannot express (an integer
                over 64 bits, a lone surrogate). What was added before is kept.
        """
        buffer = self._pending
        start = len(buffer)
        buffer += b"\0\0\0\0"
        try:
            self._encoder.encode_into(message, buffer, start + _LENGTH.size)
        except (OverflowError, ValueError) as error:
            del buffer[start:]
            raise ProtocolError(f"a {type(message).__name__} cannot be encoded: {error}") from error
        num_bytes = len(buffer) - start - _LENGTH.size
        if num_bytes > MAX_MESSAGE_BYTES:
            del buffer[start:]
            raise ProtocolError(f"a message of {num_bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        _LENGTH.pack_into(buffer, start, num_bytes)

    @property
    def num_bytes(self) -> int:
        return len(self._pending)

    def take(self) -> bytearray:
        """What was added since the last call. The buffer passes to the caller."""
        taken, self._pending = self._pending, bytearray()
        return taken


class Reader:
    """Cuts a byte stream into messages of one direction; holds less than one message, never more than the limit."""

    def __init__(self, kind: type[Message] | object, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes.

        Raises:
            ProtocolError: a length over ``max_bytes`` (found before the message's bytes are kept), or bytes that are
                not a message of this direction. The stream is of no further use.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - start >= _LENGTH.size:
                (num_bytes,) = _LENGTH.unpack_from(view, start)
                if num_bytes > self.max_bytes:
                    raise ProtocolError(f"a message announces {num_bytes} bytes; at most {self.max_bytes} are taken")
                body = start + _LENGTH.size
                if end - body < num_bytes:
                    break
                with view[body : body + num_bytes] as piece:
                    messages.append(self._decode(piece))
                start = body + num_bytes
        del buffer[:start]
        return messages

    def _decode(self, piece: memoryview) -> Message:
        try:
            return self._decoder.decode(piece)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of the worker protocol: {error}") from error
