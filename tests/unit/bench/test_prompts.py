import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.prompts import LOWEST_TOKEN_ID, TextMaker, random_token_ids
from headrace.core.errors import InvalidRequest


@given(num=st.integers(0, 100), vocab_size=st.integers(2, 200_000), seed=st.text(max_size=10))
def test_token_ids_lie_in_the_vocabulary_and_depend_only_on_the_seed(num: int, vocab_size: int, seed: str) -> None:
    ids = random_token_ids(num, vocab_size=vocab_size, seed=seed)
    assert len(ids) == num
    assert all(min(LOWEST_TOKEN_ID, vocab_size // 2) <= token_id < vocab_size for token_id in ids)
    assert ids == random_token_ids(num, vocab_size=vocab_size, seed=seed)


def test_token_ids_are_fixed_for_ever() -> None:
    """Figures of different versions compare only if their prompts do."""
    assert random_token_ids(4, vocab_size=49_152, seed="0/1/whole/0") == [47_628, 33_308, 27_092, 13_843]


@pytest.mark.parametrize("vocab_size", [0, -5])
def test_a_vocabulary_without_room_is_refused(vocab_size: int) -> None:
    with pytest.raises(InvalidRequest, match="vocab_size"):
        random_token_ids(1, vocab_size=vocab_size, seed="")


class Words:
    """One token a word, except words with an ``o``, which take two."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        special = [0] if add_special_tokens else []
        return special + [1 for word in text.split() for _ in range(2 if "o" in word else 1)]


class Letters:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


@given(num=st.integers(1, 50), seed=st.text(max_size=5))
def test_text_has_exactly_the_asked_number_of_tokens(num: int, seed: str) -> None:
    text = TextMaker(Words()).make(num, seed=seed)
    assert len(Words().encode(text, add_special_tokens=False)) == num
    assert text == TextMaker(Words()).make(num, seed=seed)


def test_without_a_tokenizer_text_has_one_word_a_token() -> None:
    assert len(TextMaker().make(17, seed="x").split()) == 17


def test_a_tokenizer_without_word_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="exact length"):
        TextMaker(Letters())
