"""The worker: one engine, many clients, one frame per step for each of them."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from headrace.core.channel import Address, Channel, UnixAddress, check_transport_security, parse_address
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import Draining, EngineDead, HeadraceError, InternalError, Overloaded
from headrace.core.frames import EngineStats, SequenceDelta, StepFrame
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import FinishReason, GenerationRequest
from headrace.core.wire import MAX_HELLO_BYTES, ClientMessage, Goodbye, GoodbyeReason, Reader, Welcome
from headrace.ports.engine import Engine
from headrace.worker.client import Client, refusal
from headrace.worker.config import WorkerConfig
from headrace.worker.credit import share
from headrace.worker.health import Health
from headrace.worker.http import HttpServer
from headrace.worker.listener import Listener
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.sequences import SequenceTable

log = structlog.get_logger(__name__)


class WorkerService:
    """Hosts an engine and serves it over the worker protocol. The engine passes to the service, which closes it.

    ``on_stuck`` is called once, with the reason, when the engine has been stuck for ``exit_when_stuck_s``: the process
    should end at once, because a stuck engine cannot be closed in good order.
    """

    def __init__(
        self,
        engine: Engine,
        config: WorkerConfig,
        tls: ssl.SSLContext | None = None,
        *,
        on_stuck: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        address = parse_address(config.listen)
        check_transport_security(address, tls)
        self._engine = engine
        self._config = config
        self._clock = clock or SystemClock()
        self._on_stuck = on_stuck
        self._listener = Listener(address, tls, self._make_channel, handshake_timeout_s=config.handshake_timeout_s)
        self._check_names = not isinstance(address, UnixAddress)
        self._clients: dict[Client, None] = {}
        self._table: SequenceTable[Client] = SequenceTable()
        self._held: deque[tuple[Client, GenerationRequest]] = deque()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._last_step = 0
        self._turn = 0
        self._draining = False
        self._drain_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._finished = asyncio.Event()
        self._failure: EngineDead | None = None
        self._stuck_reported = False
        self.health = Health(
            stall_timeout_s=config.stall_timeout_s,
            exit_when_stuck_s=config.exit_when_stuck_s,
            now=self._clock.monotonic(),
        )
        self.metrics = WorkerMetrics(engine.describe().model)
        self._http = HttpServer(self, config.http_listen) if config.http_listen is not None else None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and begin to consume the engine's frames.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        await self._listener.open()
        if self._http is not None:
            await self._http.start()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._pump(), name="worker-pump"),
            loop.create_task(self._beat(), name="worker-beat"),
            loop.create_task(self._watch(), name="worker-watch"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def serve(self) -> None:
        """Run until the worker was drained or closed; :meth:`start` first if that has not happened.

        Raises:
            EngineDead: the engine died.
            ConfigError: as for :meth:`start`.
        """
        if not self._tasks:
            await self.start()
        try:
            await self._finished.wait()
        finally:
            await self.close()
        if self._failure is not None:
            raise self._failure

    def begin_drain(self) -> None:
        """Take nothing new; finish what runs; then leave. Returns at once. Idempotent."""
        if self._drain_task is None:
            self._draining = True
            self._drain_task = asyncio.get_running_loop().create_task(self._drain(), name="worker-drain")
            self._drain_task.add_done_callback(self._on_task_done)

    async def drain(self) -> None:
        """:meth:`begin_drain`, and wait until every sequence has ended and every client was told."""
        self.begin_drain()
        await self._finished.wait()

    async def close(self) -> None:
        """Stop now: sequences in flight are lost, clients are told. Idempotent."""
        self._finish(GoodbyeReason.CLOSED, "the worker was stopped")
        tasks = [task for task in (*self._tasks, self._drain_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()
        await self._engine.close()

    @property
    def address(self) -> Address:
        """Where clients connect, with the port that was really taken."""
        return self._listener.address

    @property
    def http_address(self) -> Address | None:
        """Where health and metrics answer, with the port that was really taken."""
        return None if self._http is None else self._http.address

    @property
    def ready(self) -> bool:
        """New sequences are welcome."""
        return self.health.healthy and not self._draining and not self._finished.is_set()

    # --- called by clients -------------------------------------------------------------------------------------------

    def join(self, client: Client, version: int) -> Welcome | Goodbye:
        if len(self._clients) >= self._config.max_connections:
            return Goodbye(
                GoodbyeReason.TOO_MANY_CONNECTIONS, f"{len(self._clients)} clients are connected, which is the limit"
            )
        self._clients[client] = None
        self.metrics.num_connections = len(self._clients)
        load = self._engine.load()
        credit = share(self._credit(load.credit), len(self._clients), len(self._clients) - 1, self._turn)
        return Welcome(
            version=version,
            description=self._engine.describe(),
            load=msgspec.structs.replace(load, credit=credit),
            heartbeat_s=self._config.heartbeat_s,
        )

    def leave(self, client: Client) -> None:
        self._clients.pop(client, None)
        self.metrics.num_connections = len(self._clients)
        held = {request.sequence_id for owner, request in self._held if owner is client}
        self._held = deque(item for item in self._held if item[0] is not client)
        for engine_id in self._table.leave(client):
            if engine_id in held:
                self._forget(engine_id)
            else:
                self._engine.abort(engine_id)

    def submit(self, client: Client, request: GenerationRequest) -> None:
        engine_id = self._table.add(client, request.sequence_id)
        if engine_id is None:
            # Whatever is said of this id would be taken for the first one's end, so the connection cannot go on.
            client.dismiss(GoodbyeReason.PROTOCOL_ERROR, f"sequence {request.sequence_id} is already in flight")
            return
        self._quiet.clear()
        if engine_id != request.sequence_id:
            request = msgspec.structs.replace(request, sequence_id=engine_id)
        try:
            if self._held:
                raise Overloaded("other sequences wait already")
            self._submit_to_engine(request)
        except Overloaded as error:
            # The credit that this came on was given to another client meanwhile. A step or two will free some.
            if len(self._held) < self._config.max_held and not self._draining:
                self._held.append((client, request))
            else:
                self._refuse(client, engine_id, error)
        except HeadraceError as error:
            self._refuse(client, engine_id, error)

    def abort(self, client: Client, sequence_id: SequenceId) -> None:
        engine_id = self._table.find(client, sequence_id)
        if engine_id is None:
            return
        held = next((item for item in self._held if item[1].sequence_id == engine_id), None)
        if held is None:
            self._engine.abort(engine_id)
            return
        self._held.remove(held)
        self._forget(engine_id)
        self._tell(client, [SequenceDelta(sequence_id, finish=FinishReason.ABORT)])

    async def stats(self) -> EngineStats:
        """The engine's statistics; sequences held here count as waiting."""
        stats = await self._engine.stats()
        load = msgspec.structs.replace(stats.load, num_waiting=stats.load.num_waiting + len(self._held))
        return msgspec.structs.replace(stats, load=load, draining=stats.draining or self._draining)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _make_channel(self) -> Channel:
        client = Client(self, self._config, check_name=self._check_names)
        return Channel(client, Reader(ClientMessage, max_bytes=MAX_HELLO_BYTES))

    def _submit_to_engine(self, request: GenerationRequest) -> None:
        try:
            self._engine.submit(request)
        except HeadraceError:
            raise
        except Exception as error:
            # One request that trips a defect must not take the others down.
            log.exception("the engine failed to take a request")
            raise InternalError("the engine failed to take the request") from error

    def _submit_held(self) -> None:
        while self._held:
            client, request = self._held[0]
            try:
                self._submit_to_engine(request)
            except Overloaded:
                return
            except HeadraceError as error:
                self._held.popleft()
                self._refuse(client, request.sequence_id, error)
            else:
                self._held.popleft()

    def _refuse(self, client: Client, engine_id: SequenceId, error: HeadraceError) -> None:
        sequence_id = self._table.name_of(engine_id)
        self._forget(engine_id)
        self.metrics.num_refused += 1
        self._tell(client, [refusal(sequence_id, error)])

    def _forget(self, engine_id: SequenceId) -> None:
        self._table.discard(engine_id)
        if not self._table:
            self._quiet.set()

    def _credit(self, engine_credit: int) -> int:
        if self._draining or not self.health.healthy:
            return 0
        return max(0, engine_credit - len(self._held))

    def _tell(self, client: Client, deltas: list[SequenceDelta]) -> None:
        """Send a frame without a step to one client."""
        load = self._engine.load()
        index = next((i for i, other in enumerate(self._clients) if other is client), 0)
        credit = share(self._credit(load.credit), max(1, len(self._clients)), index, self._turn)
        client_load = msgspec.structs.replace(load, credit=credit)
        client.send_frame(self._last_step, deltas, client_load, {}, draining=self._draining)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A worker with a part missing would look alive and serve nobody: it ends instead."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("a part of the worker failed", part=task.get_name(), exc_info=error)
            self._failure = EngineDead(f"a part of the worker failed ({task.get_name()}); its log says why")
            self._finish(GoodbyeReason.ENGINE_DEAD, str(self._failure))

    async def _pump(self) -> None:
        try:
            async for frame in self._engine.frames():
                self._on_frame(frame)
        except EngineDead as error:
            log.error("engine died", error=str(error))
            self._failure = error
            self._finish(GoodbyeReason.ENGINE_DEAD, str(error))
        else:
            self._finish(GoodbyeReason.CLOSED, "the engine was closed")

    def _on_frame(self, frame: StepFrame) -> None:
        self._last_step = frame.step
        self.metrics.observe(frame)
        parts = self._table.split(frame.deltas)
        self._submit_held()
        if not self._table:
            self._quiet.set()
        self._broadcast(parts, frame.service)

    def _broadcast(self, parts: dict[Client, list[SequenceDelta]], service: dict[TenantId, int]) -> None:
        """Send a frame to every client that has deltas, or whose share of the credit has changed."""
        self._turn += 1
        load = self._engine.load()
        credit = self._credit(load.credit)
        num_clients = len(self._clients)
        # A copy: a client that does not read leaves while it is told.
        for index, client in enumerate(list(self._clients)):
            deltas = parts.get(client, [])
            client_credit = share(credit, num_clients, index, self._turn)
            if deltas or client_credit != client.told_credit:
                client_load = msgspec.structs.replace(load, credit=client_credit)
                client.send_frame(self._last_step, deltas, client_load, service, draining=self._draining)
            else:
                client.add_service(service)

    async def _beat(self) -> None:
        """Twice per heartbeat, send a frame to every client that got none since the last time."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s / 2)
            self._submit_held()
            for client in list(self._clients):
                if client.quiet and client in self._clients:
                    self._tell(client, [])
                client.quiet = True

    async def _watch(self) -> None:
        """Ask for statistics, one question at a time, and judge whether the engine is stuck."""
        question: asyncio.Task[EngineStats] | None = None
        try:
            while True:
                question = question or asyncio.ensure_future(self._engine.stats())
                await asyncio.wait([question], timeout=self._config.heartbeat_s)
                stats = None
                if question.done():
                    stats, question = self._answer(question), None
                self._judge(stats)
                await asyncio.sleep(self._config.heartbeat_s)
        finally:
            if question is not None:
                question.cancel()

    @staticmethod
    def _answer(question: asyncio.Task[EngineStats]) -> EngineStats | None:
        try:
            return question.result()
        except HeadraceError as error:
            log.warning("no statistics", error=str(error))
            return None

    def _judge(self, stats: EngineStats | None) -> None:
        now = self._clock.monotonic()
        was_healthy = self.health.healthy
        self.health.observe(now, stats)
        if self.health.healthy != was_healthy:
            log.warning("health changed", healthy=self.health.healthy, reason=self.health.reason)
            self._broadcast({}, {})
        if self.health.stuck_for_good(now) and not self._stuck_reported:
            self._stuck_reported = True
            log.error("engine stuck for good", reason=self.health.reason)
            self._on_stuck(self.health.reason or "the engine is stuck")

    async def _drain(self) -> None:
        self._listener.close()
        while self._held:
            client, request = self._held.popleft()
            self._refuse(client, request.sequence_id, Draining("the worker is draining and takes no new sequences"))
        for client in list(self._clients):
            self._tell(client, [])
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._engine.drain()
                await self._quiet.wait()  # until the last deltas have passed through the pump
        except TimeoutError:
            self._finish(
                GoodbyeReason.CLOSED, f"some sequences did not end within {self._config.drain_timeout_s} s of draining"
            )
        else:
            self._finish(GoodbyeReason.DRAINED, "every sequence has ended")

    def _finish(self, reason: GoodbyeReason, message: str) -> None:
        """The first call decides what clients are told."""
        if self._finished.is_set():
            return
        self._finished.set()
        log.info("worker leaves", reason=reason.value, message=message)
        self._listener.close()
        for client in list(self._clients):
            client.dismiss(reason, message)
