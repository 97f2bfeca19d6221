"""Requests in, streams out: each waits here until some worker has credit for it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import (
    AuditFailed,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineDead,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from headrace.core.frames import EngineDescription, EngineLoad
from headrace.core.ids import ModelName, SequenceId, VersionId, WorkerId
from headrace.core.requests import GenerationRequest
from headrace.dispatch.config import DispatchConfig
from headrace.dispatch.link import Connector, WorkerLink
from headrace.dispatch.pick import pick
from headrace.dispatch.queue import BoundedQueue, Ticket
from headrace.dispatch.stream import GenerationStream, StreamState

_Group = tuple[ModelName, VersionId | None]
_Ticket = Ticket[GenerationStream, _Group]


class Dispatcher:
    """The way into the workers. Everything happens on one event loop; nothing here blocks it.

    A request is bound to a worker as late as possible: only when one has credit for it. Until then it waits in a
    bounded queue, and leaves it when its consumer does. All methods are called from that event loop.
    """

    def __init__(
        self,
        connectors: Mapping[WorkerId, Connector],
        config: DispatchConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``connectors`` make a connection to each worker; they are called again whenever it was lost."""
        self._config = config or DispatchConfig()
        self._clock = clock or SystemClock()
        self._links = {
            worker_id: WorkerLink(
                worker_id,
                connect,
                self._config,
                self._clock,
                on_membership=self._membership_changed,
                on_load=self._bind,
            )
            for worker_id, connect in connectors.items()
        }
        self._queue: BoundedQueue[GenerationStream, _Group] = BoundedQueue(
            max_items=self._config.max_queued_requests, max_tokens=self._config.max_queued_tokens
        )
        self._tickets: dict[SequenceId, _Ticket] = {}
        self._streams: dict[SequenceId, GenerationStream] = {}
        """Those whose consumer is inside the block of :meth:`stream`."""
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[], None]] = []
        self._served: frozenset[tuple[str, VersionId]] = frozenset()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None
        # Dispatchers that start together must not go round the workers in step.
        self._rotation = random.randrange(2**16)  # noqa: S311 - nothing secret

    async def start(self) -> None:
        """Begin connecting to the workers; does not wait for any. See :meth:`wait_until_served`."""
        self._tasks = [
            asyncio.create_task(link.run(), name=f"worker {worker_id}") for worker_id, link in self._links.items()
        ]

    async def close(self) -> None:
        """Stop now: streams in flight fail, waiting requests are refused, connections are closed. Idempotent."""
        self._draining = True
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for ticket in self._queue.tickets():
            self._fail_queued(ticket, Draining("the server is shutting down"))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Refuse new requests, and return when all present ones have been left by their consumers."""
        self._draining = True
        await self._idle.wait()

    def served(self) -> list[EngineDescription]:
        """One description for each worker that is connected and takes requests."""
        return [link.serves for link in self._links.values() if link.serves is not None]

    def loads(self) -> dict[WorkerId, EngineLoad]:
        """The load of each worker that is connected."""
        return {worker_id: load for worker_id, link in self._links.items() if (load := link.load()) is not None}

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker."""
        return self._queue.num_items

    @property
    def num_running(self) -> int:
        """Sequences that workers have from here."""
        return sum(len(link.streams) for link in self._links.values())

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the set of served model versions has changed. It must not block or raise."""
        self._listeners.append(listener)

    async def wait_until_served(self, model: ModelName | None = None) -> None:
        """Return once a connected worker serves ``model``, or any model."""
        while not any(model is None or description.model == model for description in self.served()):
            await self._changed.wait()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        request: GenerationRequest,
        model: ModelName,
        version: VersionId | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[GenerationStream]:
        """Generate one sequence. The block is entered when a worker has taken the request; leaving it, for whatever
        reason, aborts a sequence that has not finished.

        ``timeout_s`` bounds the wait for a worker if the caller's patience is shorter than the configuration's.

        Raises:
            Unavailable: no connected worker serves the model (any version of it, without ``version``).
            Overloaded: the queue is full, or no worker had room in ``queue_timeout_s``.
            DeadlineExceeded: no worker had room in ``timeout_s``.
            Draining: the dispatcher is shutting down.
            InvalidRequest: the worker refused the request, or its ``sequence_id`` is in use.
            EngineDead: the worker was lost; raised by the stream.
        """
        stream = self._admit(request, (model, version))
        try:
            await self._started(stream, timeout_s)
            yield stream
        finally:
            self._release(stream)

    def audit(self) -> None:
        """Check that nothing is left behind; for when no stream is open.

        Raises:
            AuditFailed: something was not released.
        """
        left = {
            "open streams": len(self._streams),
            "queue tickets": len(self._tickets) + self._queue.num_items,
            "queued tokens": self._queue.num_tokens,
            "streams at workers": self.num_running,
        }
        if any(left.values()):
            raise AuditFailed("the dispatcher is idle but holds " + ", ".join(f"{n} {k}" for k, n in left.items() if n))

    def _admit(self, request: GenerationRequest, group: _Group) -> GenerationStream:
        if self._draining:
            raise Draining("the server is shutting down; try another", retry_after_s=1.0)
        if request.sequence_id in self._streams:
            raise InvalidRequest(f"sequence {request.sequence_id} is in flight already")
        serving = [d for link in self._serving(group) if (d := link.serves) is not None]
        if not serving:
            raise _no_worker(group)
        longest = max(description.max_model_len for description in serving)
        if len(request.prompt) >= longest:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens; {group[0]} takes {longest} with the answer, at most"
            )
        now = self._clock.monotonic()
        stream = GenerationStream(request, now)
        ticket = self._queue.push(
            stream,
            group=group,
            service_class=request.service_class,
            num_tokens=len(request.prompt) + request.stop.max_tokens,
            now=now,
        )
        self._tickets[request.sequence_id] = ticket
        self._streams[request.sequence_id] = stream
        self._idle.clear()
        self._bind()
        return stream

    async def _started(self, stream: GenerationStream, timeout_s: float | None) -> None:
        limit_s = self._config.queue_timeout_s if timeout_s is None else min(timeout_s, self._config.queue_timeout_s)
        if stream.state is not StreamState.QUEUED:
            await stream.started()
            return
        try:
            async with asyncio.timeout(limit_s):
                await stream.started()
        except TimeoutError:
            if timeout_s is not None and limit_s == timeout_s:
                raise DeadlineExceeded(f"no worker had room within {limit_s:g} s") from None
            retry_s = self._queue.drain_time_s(self._clock.monotonic())
            raise Overloaded(f"no worker had room within {limit_s:g} s", retry_after_s=retry_s) from None

    def _release(self, stream: GenerationStream) -> None:
        """The consumer has left: whoever holds the sequence lets go of it."""
        sequence_id = stream.request.sequence_id
        if self._streams.pop(sequence_id, None) is None:
            return
        ticket = self._tickets.pop(sequence_id, None)
        if ticket is not None:
            self._queue.remove(ticket)
        elif stream.breakdown.worker_id is not None:
            self._links[stream.breakdown.worker_id].abort(stream)
        stream.leave()
        if not self._streams:
            self._idle.set()
        self._bind()

    def _bind(self) -> None:
        """Give waiting requests to workers while both are there. Called whenever either may have changed."""
        starved: set[_Group] = set()
        while len(self._queue):
            ticket = next((head for head in self._queue.heads() if head.group not in starved), None)
            if ticket is None:
                return
            if not self._bind_one(ticket):
                starved.add(ticket.group)

    def _bind_one(self, ticket: _Ticket) -> bool:
        """Find a worker for a ticket. False if it goes on waiting."""
        stream = ticket.item
        while True:
            candidates = [c for link in self._serving(ticket.group) if (c := link.candidate()) is not None]
            self._rotation += 1
            chosen = pick(candidates, len(stream.request.prompt), rotation=self._rotation)
            if chosen is None:
                return False
            link = self._links[chosen]
            try:
                link.submit(stream)
            except (Overloaded, EngineDead):
                # Its credit was out of date, or its end is about to be noticed.
                link.refuses = True
                self._retry_soon()
            except Draining:
                link.drains = True
                self._announce()
            except HeadraceError as error:
                self._fail_queued(ticket, error)
                return True
            else:
                del self._tickets[stream.request.sequence_id]
                self._queue.take(ticket, now=self._clock.monotonic())
                return True

    def _serving(self, group: _Group) -> list[WorkerLink]:
        model, version = group
        return [
            link
            for link in self._links.values()
            if (description := link.serves) is not None
            and description.model == model
            and version in (None, description.version)
        ]

    def _fail_queued(self, ticket: _Ticket, error: HeadraceError) -> None:
        self._queue.remove(ticket)
        del self._tickets[ticket.item.request.sequence_id]
        ticket.item.fail(error)

    def _membership_changed(self) -> None:
        self._announce()
        self._bind()

    def _announce(self) -> None:
        """A worker came or went: refuse what nobody serves now, and tell those who follow the set of versions."""
        for ticket in self._queue.tickets():
            if not self._serving(ticket.group):
                self._fail_queued(ticket, _no_worker(ticket.group))
        served = frozenset((description.model, description.version) for description in self.served())
        if served == self._served:
            return
        self._served = served
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    def _retry_soon(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(self._config.refusal_pause_s, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        for link in self._links.values():
            link.refuses = False
        self._bind()


def _no_worker(group: _Group) -> Unavailable:
    model, version = group
    name = model if version is None else f"{model}@{version}"
    return Unavailable(f"no worker serves {name} now; try again", retry_after_s=1.0)
