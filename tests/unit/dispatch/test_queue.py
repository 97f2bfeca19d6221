import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import Overloaded
from headrace.core.requests import ServiceClass
from headrace.dispatch.queue import BoundedQueue, Ticket

CLASSES = list(ServiceClass)


def push(
    queue: BoundedQueue[str, str],
    item: str,
    *,
    group: str = "m",
    service_class: ServiceClass = ServiceClass.DEFAULT,
    num_tokens: int = 1,
    now: float = 0.0,
) -> Ticket[str, str]:
    return queue.push(item, group=group, service_class=service_class, num_tokens=num_tokens, now=now)


def drained(queue: BoundedQueue[str, str]) -> list[str]:
    order = []
    while len(queue):
        order.append(queue.take(next(queue.heads()), now=0.0))
    return order


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.sampled_from("ab")), max_size=30))
def test_urgent_classes_come_first_and_each_class_in_order_of_arrival(arrivals: list[tuple[ServiceClass, str]]) -> None:
    queue: BoundedQueue[str, str] = BoundedQueue(max_items=100, max_tokens=100)
    for index, (service_class, group) in enumerate(arrivals):
        push(queue, str(index), group=group, service_class=service_class)
    expected = sorted(range(len(arrivals)), key=lambda index: (CLASSES.index(arrivals[index][0]), index))
    assert drained(queue) == [str(index) for index in expected]


@given(st.lists(st.sampled_from(CLASSES), max_size=12), st.data())
def test_what_is_put_back_stands_where_it_stood(classes: list[ServiceClass], data: st.DataObject) -> None:
    queue: BoundedQueue[int, str] = BoundedQueue(max_items=100, max_tokens=100)
    tickets = [
        queue.push(index, group="m", service_class=service_class, num_tokens=2, now=0.0)
        for index, service_class in enumerate(classes)
    ]
    order = [ticket.item for ticket in sorted(tickets, key=lambda ticket: (ticket.rank, ticket.arrival))]
    taken = data.draw(st.lists(st.sampled_from(tickets), unique=True)) if tickets else []
    for ticket in taken:
        queue.take(ticket, now=0.0)
    for ticket in data.draw(st.permutations(taken)):
        queue.put_back(ticket)
    assert (queue.num_items, queue.num_tokens) == (len(tickets), 2 * len(tickets))
    assert [queue.take(next(queue.heads()), now=0.0) for _ in tickets] == order


@given(
    st.lists(st.one_of(st.tuples(st.just("push"), st.integers(0, 40)), st.tuples(st.just("pop"), st.integers(0, 9))))
)
def test_bounds_hold_and_counts_are_exact_whatever_happens(actions: list[tuple[str, int]]) -> None:
    queue: BoundedQueue[str, str] = BoundedQueue(max_items=5, max_tokens=100)
    tickets: list[Ticket[str, str]] = []
    for action, number in actions:
        if action == "push":
            refused = len(tickets) >= 5 or (len(tickets) > 0 and sum(t.num_tokens for t in tickets) + number > 100)
            if refused:
                with pytest.raises(Overloaded) as refusal:
                    push(queue, "x", group=str(number % 3), num_tokens=number)
                assert refusal.value.retry_after_s is not None
                assert 1 <= refusal.value.retry_after_s <= 60
            else:
                tickets.append(push(queue, "x", group=str(number % 3), num_tokens=number))
        elif tickets:
            queue.remove(tickets.pop(number % len(tickets)))
        assert queue.num_items == len(tickets) <= 5
        assert queue.num_tokens == sum(t.num_tokens for t in tickets) <= 100
        assert {t.arrival for t in queue.tickets()} == {t.arrival for t in tickets}


def test_a_request_larger_than_the_bound_is_taken_by_an_empty_queue_only() -> None:
    queue: BoundedQueue[str, str] = BoundedQueue(max_items=5, max_tokens=10)
    push(queue, "large", num_tokens=50)
    with pytest.raises(Overloaded):
        push(queue, "small", num_tokens=1)


def test_one_group_does_not_hide_behind_another() -> None:
    queue: BoundedQueue[str, str] = BoundedQueue(max_items=9, max_tokens=9)
    for item, group in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        push(queue, item, group=group)
    assert [ticket.item for ticket in queue.heads()] == ["a1", "b1"]


def test_removing_twice_is_an_error() -> None:
    queue: BoundedQueue[str, str] = BoundedQueue(max_items=9, max_tokens=9)
    ticket = push(queue, "a")
    queue.remove(ticket)
    with pytest.raises(KeyError):
        queue.remove(ticket)


def test_retry_after_follows_the_measured_drain_rate() -> None:
    def retry_after_s(tokens_per_s: int) -> float:
        queue: BoundedQueue[str, str] = BoundedQueue(max_items=1, max_tokens=10**6)
        for second in range(60):
            queue.take(push(queue, "x", num_tokens=tokens_per_s, now=second), now=second)
        push(queue, "waits", num_tokens=1000, now=60)
        with pytest.raises(Overloaded) as refusal:
            push(queue, "refused", now=60)
        assert refusal.value.retry_after_s is not None
        return refusal.value.retry_after_s

    # A thousand tokens ahead.
    assert retry_after_s(100) == pytest.approx(10, rel=0.2)
    assert retry_after_s(25) == pytest.approx(40, rel=0.2)
    assert retry_after_s(1) == 60
    assert retry_after_s(100_000) == 1
