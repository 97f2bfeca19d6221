import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.prompts.stops import StopMatcher

texts = st.text("ab.", max_size=30)
stop_lists = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The reference: (start, stop) of the earliest end, and of those the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


def cut(text: str, borders: list[int]) -> list[str]:
    at = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


@given(texts, stop_lists, st.lists(st.integers(0, 30)), st.booleans())
@example("aaab", ["aab"], [1, 2], False)
@example("ab", ["b", "ab"], [1], False)
@example("abab.", ["abab.", "ba"], [], False)
def test_what_is_shown_is_the_text_up_to_the_first_stop_however_it_is_cut(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown, stopped_by = "", None
    for part in cut(text, borders):
        more, stopped_by = matcher.push(part)
        shown += more
        if stopped_by is not None:
            break
    if stopped_by is None:
        shown += matcher.finish()
    expected = first_stop(text, stops)
    if expected is None:
        assert (shown, stopped_by) == (text, None)
    else:
        start, stop = expected
        assert (shown, stopped_by) == (text[: start + len(stop)] if include else text[:start], stop)


@given(texts, stop_lists)
def test_only_what_may_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for character in text:
        more, stopped_by = matcher.push(character)
        if stopped_by is not None:
            return
        seen += character
        shown += more
        held = seen[len(shown) :]
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        StopMatcher(["a", ""])
