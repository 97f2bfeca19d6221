"""One client's connection, seen from the worker."""

import asyncio
from typing import Protocol

import structlog

from headrace.core.channel import GATEWAY_NAME, Channel
from headrace.core.errors import HeadraceError, ProtocolError
from headrace.core.frames import EngineLoad, EngineStats, SequenceDelta, StepFrame
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import FinishReason, GenerationRequest
from headrace.core.wire import (
    MAX_MESSAGE_BYTES,
    MAX_SEQUENCE_ID_CHARS,
    Abort,
    Drain,
    Frame,
    Goodbye,
    GoodbyeReason,
    Hello,
    Message,
    StatsReply,
    StatsRequest,
    Submit,
    Welcome,
    common_version,
)
from headrace.worker.config import WorkerConfig

log = structlog.get_logger(__name__)

_MAX_STATS_IN_FLIGHT = 16


class Host(Protocol):
    """What a connection asks of the service it belongs to."""

    def join(self, client: "Client", version: int) -> Welcome | Goodbye: ...

    def leave(self, client: "Client") -> None:
        """May be called more than once."""
        ...

    def submit(self, client: "Client", request: GenerationRequest) -> None: ...

    def abort(self, client: "Client", sequence_id: SequenceId) -> None: ...

    def begin_drain(self) -> None: ...

    async def stats(self) -> EngineStats: ...


class Client:
    """The channel's peer on the worker's side: checks who and what, counts, and keeps the outgoing side bounded."""

    def __init__(self, host: Host, config: WorkerConfig, *, check_name: bool) -> None:
        self._host = host
        self._config = config
        self._check_name = check_name
        self._channel: Channel | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._welcomed = False
        self._gone = False
        self._stats_tasks: set[asyncio.Task[None]] = set()
        self._service: dict[TenantId, int] = {}
        self.name = "?"
        self.num_submits_seen = 0
        self.told_credit = -1
        self.quiet = True
        """Nothing was sent since the last heartbeat."""

    # --- the channel's peer ------------------------------------------------------------------------------------------

    def connected(self, channel: Channel) -> None:
        self._channel = channel
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(self._config.handshake_timeout_s, self._handshake_late)
        if self._check_name and GATEWAY_NAME not in channel.peer_names():
            self.dismiss(GoodbyeReason.PROTOCOL_ERROR, f"the certificate does not name {GATEWAY_NAME}")

    def received(self, message: Message) -> None:
        if not self._welcomed:
            self._on_first(message)
            return
        match message:
            case Submit(request=request):
                self.num_submits_seen += 1
                if len(request.sequence_id) > MAX_SEQUENCE_ID_CHARS:
                    self.broken(ProtocolError(f"a sequence id has at most {MAX_SEQUENCE_ID_CHARS} characters"))
                else:
                    self._host.submit(self, request)
            case Abort(sequence_id=sequence_id):
                self._host.abort(self, sequence_id)
            case StatsRequest(id=request_id):
                self._on_stats_request(request_id)
            case Drain():
                log.info("drain requested", client=self.name)
                self._host.begin_drain()
            case _:
                self.broken(ProtocolError(f"a {type(message).__name__} is out of place"))

    def broken(self, error: ProtocolError) -> None:
        self.dismiss(GoodbyeReason.PROTOCOL_ERROR, str(error))

    def lost(self, reason: str) -> None:
        self._forget(f"connection lost: {reason}")

    # --- called by the service ---------------------------------------------------------------------------------------

    def send_frame(
        self, step: int, deltas: list[SequenceDelta], load: EngineLoad, service: dict[TenantId, int], *, draining: bool
    ) -> None:
        """Send one step's result; ``load.credit`` is this client's share. A client that does not read is dropped."""
        if self._channel is None or self._gone:
            return
        num_unread_bytes = self._channel.num_outgoing_bytes
        if num_unread_bytes > self._config.max_outgoing_bytes:
            log.warning("client does not read", client=self.name, num_unread_bytes=num_unread_bytes)
            self._forget("it left too much unread")
            self._channel.abort()
            return
        if self._service:
            self.add_service(service)
            service, self._service = self._service, {}
        self.told_credit = load.credit
        self.quiet = False
        frame = StepFrame(step=step, deltas=deltas, load=load, service=service)
        self._send(Frame(frame, self.num_submits_seen, draining))

    def add_service(self, service: dict[TenantId, int]) -> None:
        """Remember service of a step whose frame is not sent to this client; the next one that is carries it."""
        for tenant, num_tokens in service.items():
            self._service[tenant] = self._service.get(tenant, 0) + num_tokens

    def dismiss(self, reason: GoodbyeReason, message: str) -> None:
        """Say goodbye and disconnect."""
        if self._channel is not None and not self._gone:
            self._channel.send(Goodbye(reason, message))
            self._forget(f"dismissed ({reason}): {message}")
            self._channel.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _on_first(self, message: Message) -> None:
        assert self._channel is not None
        if not isinstance(message, Hello):
            self.broken(ProtocolError(f"the first message is Hello, not {type(message).__name__}"))
            return
        self.name = message.client or "?"
        version = common_version(message.versions)
        if version is None:
            self.dismiss(GoodbyeReason.VERSION, f"none of the protocol versions {message.versions} is spoken here")
            return
        answer = self._host.join(self, version)
        if isinstance(answer, Goodbye):
            self.dismiss(answer.reason, answer.message)
            return
        self._welcomed = True
        self._channel.reader.max_bytes = MAX_MESSAGE_BYTES
        self.told_credit = answer.load.credit
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self._channel.send(answer)
        log.info("client connected", client=self.name, version=version)

    def _handshake_late(self) -> None:
        self.dismiss(GoodbyeReason.PROTOCOL_ERROR, f"no Hello within {self._config.handshake_timeout_s} s")

    def _on_stats_request(self, request_id: int) -> None:
        if len(self._stats_tasks) >= _MAX_STATS_IN_FLIGHT:
            self.broken(ProtocolError(f"more than {_MAX_STATS_IN_FLIGHT} requests for statistics at once"))
            return
        task = asyncio.get_running_loop().create_task(self._reply_stats(request_id))
        self._stats_tasks.add(task)
        task.add_done_callback(self._stats_tasks.discard)

    async def _reply_stats(self, request_id: int) -> None:
        try:
            stats = await self._host.stats()
        except HeadraceError as error:
            # A dead engine is the service's to announce: it says goodbye to everyone.
            log.warning("no statistics", error=str(error))
            return
        self._send(StatsReply(request_id, stats))

    def _send(self, message: Message) -> None:
        if self._channel is None or self._gone:
            return
        try:
            self._channel.send(message)
        except ProtocolError as error:
            # Too large, or not expressible: this client must not take the others down.
            self.broken(error)

    def _forget(self, why: str) -> None:
        if self._gone:
            return
        self._gone = True
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        for task in self._stats_tasks:
            task.cancel()
        log.info("client gone", client=self.name, why=why)
        self._host.leave(self)


def refusal(sequence_id: SequenceId, error: HeadraceError) -> SequenceDelta:
    """The only delta of a sequence that was not taken."""
    return SequenceDelta(sequence_id, finish=FinishReason.ERROR, error=error.message, error_code=error.code)
