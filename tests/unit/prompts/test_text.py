import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headrace.prompts.text import TextStream
from headrace.prompts.tokenizer import Tokenizer

ids = st.lists(st.integers(0, 600), max_size=40)


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


def streamed(stream: TextStream, token_ids: list[int], num_per_push: int = 1) -> tuple[str, str | None, int]:
    """All text, what stopped it, and how many tokens were used."""
    text, num_used = "", 0
    for at in range(0, len(token_ids), num_per_push):
        part = stream.push(token_ids[at : at + num_per_push])
        text += part.text
        num_used += part.num_tokens_used
        if part.stopped_by is not None:
            return text, part.stopped_by, num_used
    end = stream.finish()
    return text + end.text, end.stopped_by, num_used


@given(token_ids=ids, num_per_push=st.integers(1, 5), skip=st.booleans())
def test_the_parts_joined_are_the_whole(
    tokenizer: Tokenizer, token_ids: list[int], num_per_push: int, skip: bool
) -> None:
    stream = TextStream(tokenizer, prompt_ids=[], skip_special_tokens=skip)
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert streamed(stream, token_ids, num_per_push) == (expected, None, len(token_ids))


@given(prompt=st.text("hélo 日🙂", min_size=1, max_size=9), token_ids=ids)
def test_a_text_goes_on_where_its_prompt_ends(tokenizer: Tokenizer, prompt: str, token_ids: list[int]) -> None:
    prompt_ids = tokenizer.encode(prompt)
    stream = TextStream(tokenizer, prompt_ids=prompt_ids)
    whole = tokenizer.decode(prompt_ids + token_ids)
    assert tokenizer.decode(prompt_ids) + streamed(stream, token_ids)[0] == whole


@given(
    token_ids=ids,
    num_per_push=st.integers(1, 5),
    stops=st.lists(st.sampled_from(["e", " ", "\n", "lo w", "日", "�", "he", "o"]), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_a_text_ends_at_the_first_stop(
    tokenizer: Tokenizer, token_ids: list[int], num_per_push: int, stops: list[str], include: bool
) -> None:
    stream = TextStream(tokenizer, prompt_ids=[], stop=stops, include_stop=include)
    text, stopped_by, num_used = streamed(stream, token_ids, num_per_push)
    whole = tokenizer.decode(token_ids)
    if stopped_by is None:
        assert text == whole
        assert not any(stop in whole for stop in stops)
        return
    assert whole.startswith(text)
    end = len(text) if include else len(text) + len(stopped_by)
    assert whole[:end].endswith(stopped_by)
    assert not any(stop in whole[: end - 1] for stop in stops)
    # The last token used is the one that completed the stop.
    assert stopped_by in tokenizer.decode(token_ids[:num_used])


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="�"), max_size=30))
def test_no_part_of_a_good_text_is_a_broken_character(byte_level: Tokenizer, text: str) -> None:
    stream = TextStream(byte_level, prompt_ids=[], skip_special_tokens=False)
    parts = [stream.push([token_id]).text for token_id in byte_level.encode(text)] + [stream.finish().text]
    assert "".join(parts) == text
    assert "�" not in "".join(parts)


def test_a_character_is_shown_with_its_last_byte(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("𒀀")
    stream = TextStream(byte_level, prompt_ids=[])
    assert [stream.push([token_id]).text for token_id in token_ids] == ["", "", "", "𒀀"]


def test_a_character_cut_off_at_the_end_shows_as_one_replacement(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, prompt_ids=[])
    assert stream.push(byte_level.encode("𒀀")[:3]).text == ""
    assert stream.finish().text == "�"
    assert stream.finish().text == ""


def test_a_prompt_that_ends_inside_a_character_is_completed(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("x𒀀y")
    stream = TextStream(byte_level, prompt_ids=token_ids[:3])
    assert stream.push(token_ids[3:]).text == "𒀀y"


def test_the_first_space_after_a_prompt_is_part_of_the_text(byte_fallback: Tokenizer) -> None:
    token_ids = byte_fallback.encode("hello")
    assert streamed(TextStream(byte_fallback, prompt_ids=[]), token_ids)[0] == "hello"
    assert streamed(TextStream(byte_fallback, prompt_ids=token_ids), token_ids)[0] == " hello"
    only_special = [byte_fallback.token_id("<|start|>") or 0]
    assert streamed(TextStream(byte_fallback, prompt_ids=only_special), token_ids)[0] == "hello"


def test_after_a_stop_nothing_more_comes(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, prompt_ids=[], stop=["wor"])
    first = stream.push(byte_level.encode("hello world"))
    assert (first.text, first.stopped_by) == ("hello ", "wor")
    assert first.num_tokens_used <= len(byte_level.encode("hello world"))
    again = stream.push([5, 6])
    assert (again.text, again.stopped_by, again.num_tokens_used) == ("", "wor", 0)
    assert stream.finish().text == ""


@given(prompt=st.sampled_from(["", "hello", "the quick"]), token_ids=st.lists(st.integers(3, 299), max_size=30))
def test_tokens_that_look_at_their_neighbours_join_as_the_library_joins_them(
    word_piece: Tokenizer, raw_word_piece: tokenizers.Tokenizer, prompt: str, token_ids: list[int]
) -> None:
    prompt_ids = word_piece.encode(prompt)
    text = streamed(TextStream(word_piece, prompt_ids=prompt_ids), token_ids)[0]
    assert raw_word_piece.decode(prompt_ids) + text == raw_word_piece.decode(prompt_ids + token_ids)


@given(text=st.text("aé日🙂 ", max_size=20))
def test_unknown_decoders_break_no_characters_either(decodes_oddly: Tokenizer, text: str) -> None:
    assert decodes_oddly.pieces is None
    stream = TextStream(decodes_oddly, prompt_ids=[])
    parts = [stream.push([token_id]).text for token_id in decodes_oddly.encode(text)] + [stream.finish().text]
    assert "".join(parts) == text.replace("a", "b")
    assert "�" not in "".join(parts)
