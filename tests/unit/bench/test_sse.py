from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench import sse
from headrace.bench.sse import EventParser, EventTooLarge

STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\r\ndata: one\r\ndata:two\r\nid: 3\r\n\r\n\r\ndata: [DONE]\r\r'
EVENTS = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_do_not_depend_on_where_chunks_are_cut(cuts: list[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [event for start, end in pairwise(edges) for event in parser.feed(STREAM[start:end])]
    # The last CR might be half of a CRLF, so the event may end only with the next byte.
    found += parser.feed(b"\n")
    assert found == EVENTS


def test_an_unfinished_event_is_not_an_event() -> None:
    assert EventParser().feed(b"data: x\n") == []


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: " + b"x" * 94 + b"\n"])
def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = EventParser()
    with pytest.raises(EventTooLarge):
        deque((parser.feed(piece) for _ in range(20)), maxlen=0)


def test_many_small_events_are_never_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = EventParser()
    assert sum(len(parser.feed(b"data: " + b"x" * 500 + b"\n\n")) for _ in range(20)) == 20
