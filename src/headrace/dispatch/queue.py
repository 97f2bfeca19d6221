"""Requests that wait for a worker: bounded, urgent classes first, then first come, first served. Pure."""

import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from headrace.core.errors import Overloaded
from headrace.core.requests import ServiceClass

T = TypeVar("T")
G = TypeVar("G", bound=Hashable)

_CLASSES = list(ServiceClass)
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_RATE_WINDOW_S = 10.0


class Ticket(Generic[T, G]):
    """A place in the queue."""

    __slots__ = ("arrival", "group", "item", "num_tokens", "rank")

    def __init__(self, item: T, group: G, rank: int, arrival: int, num_tokens: int) -> None:
        self.item = item
        self.group = group
        self.rank = rank
        self.arrival = arrival
        self.num_tokens = num_tokens


class BoundedQueue(Generic[T, G]):
    """Waiting items, bounded by their number and by the tokens they are predicted to cost.

    Items of one ``group`` (a model version) wait for the same workers, so only the first of each class and group is
    ever considered; another group's shortage does not hold it up.
    """

    def __init__(self, *, max_items: int, max_tokens: int) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._lanes: dict[tuple[int, G], dict[int, Ticket[T, G]]] = {}
        """By class and group; tickets by arrival, oldest first. No lane is empty."""
        self._arrivals = itertools.count()
        self._drained = _DecayingSum(_RATE_WINDOW_S)
        self.num_items = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_items

    def push(self, item: T, *, group: G, service_class: ServiceClass, num_tokens: int, now: float) -> Ticket[T, G]:
        """Queue an item. One that alone is larger than the bound on tokens is taken by an empty queue.

        Raises:
            Overloaded: the queue is full. ``retry_after_s`` is how long it takes to drain, by the rate at which
                items left it lately.
        """
        too_many = self.num_items >= self._max_items
        too_large = self.num_items > 0 and self.num_tokens + num_tokens > self._max_tokens
        if too_many or too_large:
            raise Overloaded(
                f"{self.num_items} requests with {self.num_tokens} tokens wait already; try again later",
                retry_after_s=self.drain_time_s(now),
            )
        rank = _CLASSES.index(service_class)
        ticket = Ticket(item, group, rank, next(self._arrivals), num_tokens)
        self._lanes.setdefault((rank, group), {})[ticket.arrival] = ticket
        self.num_items += 1
        self.num_tokens += num_tokens
        return ticket

    def heads(self) -> Iterator[Ticket[T, G]]:
        """The first ticket of each class and group, most urgent first, then oldest first."""
        firsts = [next(iter(lane.values())) for lane in self._lanes.values()]
        return iter(sorted(firsts, key=lambda ticket: (ticket.rank, ticket.arrival)))

    def take(self, ticket: Ticket[T, G], *, now: float) -> T:
        """Remove a ticket whose item got what it waited for."""
        self.remove(ticket)
        self._drained.add(ticket.num_tokens, now)
        return ticket.item

    def remove(self, ticket: Ticket[T, G]) -> None:
        """Remove a ticket whose item waits no longer.

        Raises:
            KeyError: it is not in the queue.
        """
        key = (ticket.rank, ticket.group)
        lane = self._lanes[key]
        del lane[ticket.arrival]
        if not lane:
            del self._lanes[key]
        self.num_items -= 1
        self.num_tokens -= ticket.num_tokens

    def put_back(self, ticket: Ticket[T, G]) -> None:
        """Queue a ticket again whose item did not keep what it had got. It keeps its place among those that wait.

        The bounds are not asked: what was accepted once is not refused, and no more can come back than was taken.
        """
        key = (ticket.rank, ticket.group)
        lane = self._lanes.get(key, {}) | {ticket.arrival: ticket}
        self._lanes[key] = dict(sorted(lane.items()))
        self.num_items += 1
        self.num_tokens += ticket.num_tokens

    def tickets(self) -> list[Ticket[T, G]]:
        """All tickets, in no particular order."""
        return [ticket for lane in self._lanes.values() for ticket in lane.values()]

    def drain_time_s(self, now: float) -> float:
        """Seconds until what waits now has left the queue, between 1 and 60; 1 until something was measured."""
        rate = self._drained.value(now) / _RATE_WINDOW_S
        if rate <= 0:
            return _MIN_RETRY_S
        return min(max(math.ceil(self.num_tokens / rate), _MIN_RETRY_S), _MAX_RETRY_S)


class _DecayingSum:
    """A sum whose terms lose their weight exponentially; divided by the window it is a rate."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sum = 0.0
        self._at = -math.inf

    def add(self, amount: float, now: float) -> None:
        self._sum = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._at) / self._window_s)
