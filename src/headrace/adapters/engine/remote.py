"""A worker's engine, reached over the worker protocol."""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from headrace.core.channel import WORKER_NAME, Channel, TcpAddress, check_transport_security, parse_address
from headrace.core.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
    ProtocolError,
)
from headrace.core.frames import EngineDescription, EngineLoad, EngineStats, StepFrame
from headrace.core.ids import SequenceId
from headrace.core.requests import GenerationRequest
from headrace.core.wire import (
    MAX_SEQUENCE_ID_CHARS,
    VERSIONS,
    Abort,
    Drain,
    Frame,
    Goodbye,
    GoodbyeReason,
    Hello,
    Message,
    Reader,
    StatsReply,
    StatsRequest,
    Submit,
    Welcome,
    WorkerMessage,
)

_MAX_UNREAD_FRAMES = 256
"""Above this the worker's bytes stay in the kernel: a slow consumer is the worker's slow reader, not our memory."""


class RemoteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client treats its connection to a worker."""

    connect_timeout_s: float = 5.0
    """For connection, TLS and ``Welcome`` together."""
    silence_timeout_s: float = 5.0
    """Without a word for so long the worker counts as lost; three of its heartbeats are waited for at least."""
    max_outgoing_bytes: int = 64 * 1024 * 1024
    """Requests that the worker has not read; above it, submit refuses."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")


async def connect(
    address: str,
    tls: ssl.SSLContext | None = None,
    config: RemoteConfig | None = None,
    *,
    client: str = "",
) -> "RemoteEngine":
    """Connect to the worker at ``HOST:PORT`` (needs ``tls``) or ``unix:PATH``; ``client`` names us in its log.

    Raises:
        EngineDead: nobody answers in time, the handshake fails, or the versions do not match.
        ConfigError: the address is malformed, or is TCP without TLS.
    """
    config = config or RemoteConfig()
    target = parse_address(address)
    check_transport_security(target, tls)
    loop = asyncio.get_running_loop()
    engine = RemoteEngine(str(target), config, client)

    def make_channel() -> Channel:
        return Channel(engine, Reader(WorkerMessage))

    try:
        async with asyncio.timeout(config.connect_timeout_s):
            if isinstance(target, TcpAddress):
                await loop.create_connection(
                    make_channel, target.host, target.port, ssl=tls, server_hostname=WORKER_NAME
                )
            else:
                await loop.create_unix_connection(make_channel, str(target.path))
            await engine.wait_until_welcome()
    except TimeoutError as error:
        await engine.close()
        raise EngineDead(f"worker {target} did not answer within {config.connect_timeout_s} s") from error
    except OSError as error:  # ssl.SSLError is one
        await engine.close()
        raise EngineDead(f"worker {target} cannot be reached: {error}") from error
    except BaseException:
        await engine.close()
        raise
    return engine


class RemoteEngine:
    """Implements :class:`headrace.ports.engine.Engine` over a channel; made by :func:`connect`.

    It is also the channel's :class:`headrace.core.channel.Peer`.
    """

    def __init__(self, name: str, config: RemoteConfig, client: str) -> None:
        self._name = name
        self._config = config
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._welcome: Welcome | None = None
        self._load: EngineLoad | None = None
        self._in_flight: dict[SequenceId, bool] = {}
        """Sequences that have not ended, and whether their abort was sent."""
        self._num_submits = 0
        self._num_submits_seen = 0
        self._frames: deque[StepFrame] = deque()
        self._news = asyncio.Event()
        """Set when there is a frame, or will never be one again."""
        self._paused = False
        self._draining = False
        self._drain_asked = False
        self._dead: EngineDead | None = None
        self._closed = False
        self._ended = asyncio.Event()
        self._stats: dict[int, asyncio.Future[EngineStats]] = {}
        self._num_stats_asked = 0
        self._last_heard_at = self._loop.time()
        self._watchdog: asyncio.TimerHandle | None = None

    # --- the Engine port ---------------------------------------------------------------------------------------------

    def describe(self) -> EngineDescription:
        assert self._welcome is not None, "connect() hands out an engine only after Welcome"
        return self._welcome.description

    def load(self) -> EngineLoad:
        assert self._load is not None, "connect() hands out an engine only after Welcome"
        return msgspec.structs.replace(self._load, credit=self._credit())

    def submit(self, request: GenerationRequest) -> None:
        if self._drain_asked:
            raise Draining(f"worker {self._name} was asked to drain and takes no new sequences")
        channel = self._living_channel()
        if self._draining:
            raise Draining(f"worker {self._name} is draining and takes no new sequences")
        self._check(request)
        if self._credit() <= 0:
            raise Overloaded(f"worker {self._name} takes no more sequences now")
        if channel.num_outgoing_bytes > self._config.max_outgoing_bytes:
            raise Overloaded(f"worker {self._name} does not keep up with what is sent to it")
        try:
            channel.send(Submit(request))
        except ProtocolError as error:
            raise InvalidRequest(f"the request cannot be sent to a worker: {error}") from error
        self._num_submits += 1
        self._in_flight[request.sequence_id] = False

    def abort(self, sequence_id: SequenceId) -> None:
        if self._channel is not None and self._in_flight.get(sequence_id) is False and self._dead is None:
            self._in_flight[sequence_id] = True
            self._channel.send(Abort(sequence_id))

    async def frames(self) -> AsyncIterator[StepFrame]:
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if self._paused and len(self._frames) < _MAX_UNREAD_FRAMES // 2 and self._channel is not None:
                    self._paused = False
                    self._last_heard_at = self._loop.time()
                    self._channel.resume_reading()
                yield frame
            if self._ended.is_set():
                break
            self._news.clear()
            await self._news.wait()
        if self._dead is not None and not self._closed:
            raise self._dead

    async def stats(self) -> EngineStats:
        channel = self._living_channel()
        self._num_stats_asked += 1
        reply: asyncio.Future[EngineStats] = self._loop.create_future()
        self._stats[self._num_stats_asked] = reply
        request = StatsRequest(self._num_stats_asked)
        channel.send(request)
        try:
            return await reply
        finally:
            self._stats.pop(request.id, None)

    async def drain(self) -> None:
        if self._dead is not None or self._closed or self._channel is None:
            return
        if not self._drain_asked:
            self._drain_asked = self._draining = True
            self._channel.send(Drain())
        await self._ended.wait()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end(EngineDead(f"the connection to worker {self._name} was closed here"))

    # --- the channel's peer ------------------------------------------------------------------------------------------

    async def wait_until_welcome(self) -> None:
        """Return once the worker has said what it serves.

        Raises:
            EngineDead: it said something else, or went away.
        """
        while self._welcome is None and self._dead is None:
            self._news.clear()
            await self._news.wait()
        if self._dead is not None:
            raise self._dead

    def connected(self, channel: Channel) -> None:
        self._channel = channel
        channel.send(Hello(list(VERSIONS), self._client))

    def received(self, message: Message) -> None:
        self._last_heard_at = self._loop.time()
        match message:
            case Frame() if self._welcome is not None:
                self._on_frame(message)
            case StatsReply():
                reply = self._stats.pop(message.id, None)
                if reply is not None and not reply.done():
                    reply.set_result(message.stats)
            case Welcome() if self._welcome is None and message.version in VERSIONS:
                self._welcome = message
                self._load = message.load
                self._news.set()
                self._watch()
            case Goodbye():
                self._on_goodbye(message)
            case _:
                self.broken(ProtocolError(f"a {type(message).__name__} is out of place"))

    def broken(self, error: ProtocolError) -> None:
        self._end(EngineDead(f"worker {self._name} broke the worker protocol: {error}"))

    def lost(self, reason: str) -> None:
        during = " during the handshake" if self._welcome is None else ""
        self._end(EngineDead(f"the connection to worker {self._name} was lost{during}: {reason}"))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _living_channel(self) -> Channel:
        if self._dead is not None:
            raise self._dead
        if self._channel is None:
            raise EngineDead(f"worker {self._name} is not connected")
        return self._channel

    def _check(self, request: GenerationRequest) -> None:
        """What can be seen from here; the worker checks the rest and answers with an error delta."""
        max_model_len = self.describe().max_model_len
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed", param="prompt")
        if len(request.prompt) >= max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens; with at least one to generate the model takes at most "
                f"{max_model_len}",
                param="prompt",
            )
        if request.sequence_id in self._in_flight:
            raise InvalidRequest(f"sequence {request.sequence_id} is already in flight", param="sequence_id")
        if len(request.sequence_id) > MAX_SEQUENCE_ID_CHARS:
            raise InvalidRequest(f"a sequence id has at most {MAX_SEQUENCE_ID_CHARS} characters", param="sequence_id")

    def _credit(self) -> int:
        if self._load is None or self._dead is not None or self._draining:
            return 0
        return max(0, self._load.credit - (self._num_submits - self._num_submits_seen))

    def _on_frame(self, message: Frame) -> None:
        frame = message.frame
        self._load = frame.load
        self._num_submits_seen = message.num_submits_seen
        self._draining = self._draining or message.draining
        for delta in frame.deltas:
            if delta.finish is not None:
                self._in_flight.pop(delta.sequence_id, None)
        self._frames.append(frame)
        self._news.set()
        if len(self._frames) >= _MAX_UNREAD_FRAMES and not self._paused and self._channel is not None:
            self._paused = True
            self._channel.pause_reading()

    def _on_goodbye(self, message: Goodbye) -> None:
        error = EngineDead(f"worker {self._name} said goodbye ({message.reason}): {message.message}")
        asked = self._drain_asked and message.reason is GoodbyeReason.DRAINED
        self._end(error, expected=asked)

    def _end(self, error: EngineDead, *, expected: bool = False) -> None:
        """The first call decides how it ended; ``expected`` means that :meth:`frames` just ends."""
        if self._dead is not None:
            return
        self._dead = error
        self._closed = self._closed or expected
        self._in_flight.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._channel is not None:
            self._channel.abort()
        for reply in self._stats.values():
            if not reply.done():
                reply.set_exception(error)
        self._stats.clear()
        self._ended.set()
        self._news.set()

    def _watch(self) -> None:
        """Look four times per timeout whether the worker was heard."""
        assert self._welcome is not None
        timeout_s = max(self._config.silence_timeout_s, 3 * self._welcome.heartbeat_s)
        period_s = timeout_s / 4
        due_at = self._loop.time() + period_s

        def look() -> None:
            nonlocal due_at
            now = self._loop.time()
            if now - due_at > period_s or self._paused:
                # We were late ourselves, or chose not to read: what the worker said may wait unread. Start over.
                self._last_heard_at = now
            elif now - self._last_heard_at > timeout_s:
                self._end(EngineDead(f"worker {self._name} was silent for {timeout_s} s"))
                return
            due_at = now + period_s
            self._watchdog = self._loop.call_later(period_s, look)

        self._watchdog = self._loop.call_later(period_s, look)
