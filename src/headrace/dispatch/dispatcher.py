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
from headrace.dispatch.stream import GenerationStream

_Group = tuple[ModelName, VersionId | None]


class _Request:
    """An open stream, from its admission until its consumer has left."""

    __slots__ = ("expiry", "stream", "timeout_s")

    def __init__(self, stream: GenerationStream, timeout_s: float | None) -> None:
        self.stream = stream
        self.timeout_s = timeout_s
        """The caller's patience with the queue, if that is its own."""
        self.expiry: asyncio.TimerHandle | None = None
        """Ends the waiting; None when it does not wait."""

    def stop_timer(self) -> None:
        """It does not wait any more."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


_Ticket = Ticket[_Request, _Group]


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
                on_refused=self._refused,
            )
            for worker_id, connect in connectors.items()
        }
        self._queue: BoundedQueue[_Request, _Group] = BoundedQueue(
            max_items=self._config.max_queued_requests, max_tokens=self._config.max_queued_tokens
        )
        self._tickets: dict[SequenceId, _Ticket] = {}
        """Of the streams whose consumer is inside the block of :meth:`stream`, whether they still wait or not."""
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

        A worker that finds no room for what it has just taken gives it back. The request then waits again, out of what
        is left of its time, and the stream raises what the block's entry would have raised.

        Raises:
            Unavailable: no connected worker serves the model (any version of it, without ``version``).
            Overloaded: the queue is full, or no worker had room in ``queue_timeout_s``.
            DeadlineExceeded: no worker had room in ``timeout_s``.
            Draining: the dispatcher is shutting down.
            InvalidRequest: the worker refused the request, or its ``sequence_id`` is in use.
            EngineDead: the worker was lost; raised by the stream.
        """
        ticket = self._admit(request, (model, version), timeout_s)
        stream = ticket.item.stream
        try:
            self._bind()
            await stream.started()
            yield stream
        finally:
            self._release(ticket)

    def audit(self) -> None:
        """Check that nothing is left behind; for when no stream is open.

        Raises:
            AuditFailed: something was not released.
        """
        left = {
            "open streams": len(self._tickets),
            "queue tickets": self._queue.num_items,
            "queued tokens": self._queue.num_tokens,
            "streams at workers": self.num_running,
        }
        if any(left.values()):
            raise AuditFailed("the dispatcher is idle but holds " + ", ".join(f"{n} {k}" for k, n in left.items() if n))

    def _admit(self, request: GenerationRequest, group: _Group, timeout_s: float | None) -> _Ticket:
        if self._draining:
            raise Draining("the server is shutting down; try another", retry_after_s=1.0)
        if request.sequence_id in self._tickets:
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
        ticket = self._queue.push(
            _Request(GenerationStream(request, now), timeout_s),
            group=group,
            service_class=request.service_class,
            num_tokens=len(request.prompt) + request.stop.max_tokens,
            now=now,
        )
        self._tickets[request.sequence_id] = ticket
        self._idle.clear()
        self._limit_wait(ticket, now)
        return ticket

    def _limit_wait(self, ticket: _Ticket, now: float) -> None:
        """What waits in the queue from now on is refused when its time is over."""
        request = ticket.item
        limit_s = self._config.queue_timeout_s
        if request.timeout_s is not None:
            limit_s = min(limit_s, request.timeout_s)
        left_s = max(0.0, request.stream.breakdown.queued_at + limit_s - now)
        request.expiry = asyncio.get_running_loop().call_later(left_s, self._expire, ticket, limit_s)

    def _expire(self, ticket: _Ticket, limit_s: float) -> None:
        message = f"no worker had room within {limit_s:g} s"
        if limit_s == ticket.item.timeout_s:
            self._fail_queued(ticket, DeadlineExceeded(message))
        else:
            retry_s = self._queue.drain_time_s(self._clock.monotonic())
            self._fail_queued(ticket, Overloaded(message, retry_after_s=retry_s))

    def _refused(self, stream: GenerationStream) -> None:
        """A worker did not keep what it had credit for: the sequence waits for another, or for the same one later."""
        ticket = self._tickets[stream.request.sequence_id]
        stream.requeue()
        self._queue.put_back(ticket)
        self._limit_wait(ticket, self._clock.monotonic())
        self._retry_soon()

    def _release(self, ticket: _Ticket) -> None:
        """The consumer has left: whoever holds the sequence lets go of it."""
        stream = ticket.item.stream
        del self._tickets[stream.request.sequence_id]
        if ticket.item.expiry is not None:
            self._unqueue(ticket)
        elif stream.breakdown.worker_id is not None:
            self._links[stream.breakdown.worker_id].abort(stream)
        stream.leave()
        if not self._tickets:
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
        stream = ticket.item.stream
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
                ticket.item.stop_timer()
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
        self._unqueue(ticket)
        ticket.item.stream.fail(error)

    def _unqueue(self, ticket: _Ticket) -> None:
        ticket.item.stop_timer()
        self._queue.remove(ticket)

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
