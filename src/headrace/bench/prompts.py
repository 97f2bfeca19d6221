"""Prompts that nobody has cached: random, seeded, of an exact length where the endpoint lets us choose tokens."""

import random
from collections.abc import Sequence
from typing import Protocol

from headrace.core.errors import InvalidRequest

LOWEST_TOKEN_ID = 1000
"""Vocabularies keep special tokens and single bytes at the low end; ordinary ones live above."""

# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend",
)
# fmt: on


def random_token_ids(num_tokens: int, *, vocab_size: int, seed: str) -> list[int]:
    """``num_tokens`` ordinary token ids; a pure function of its arguments, on every Python version.

    Raises:
        InvalidRequest: the vocabulary has no room above the special tokens.
    """
    low = min(LOWEST_TOKEN_ID, vocab_size // 2)
    if vocab_size - low < 1:
        raise InvalidRequest(f"vocab_size is {vocab_size}; it must be at least 2")
    # A Random seeded by a string, and its random(), are stable across versions and processes; randrange() is not.
    draw = random.Random(seed).random  # noqa: S311 - prompts, not secrets
    return [low + int(draw() * (vocab_size - low)) for _ in range(num_tokens)]


class Encoder(Protocol):
    """What exact text needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class TextMaker:
    """Random text of ``num_tokens`` common words.

    With a tokenizer the words are those which it maps to one token each, and the number of tokens is exact (without
    what a chat template adds); without one it is about one token per word, and only the server's usage knows.
    """

    def __init__(self, tokenizer: Encoder | None = None) -> None:
        self._words: Sequence[str] = WORDS
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._words = [
                word for word in WORDS if _adds_one_token(tokenizer, word) and len(_encode(tokenizer, word)) == 1
            ]
            if len(self._words) < 2:
                raise InvalidRequest(
                    "this tokenizer maps hardly any common English word to one token, so text of an exact length "
                    "cannot be made; use token-id prompts on the completions endpoint"
                )

    def make(self, num_tokens: int, *, seed: str) -> str:
        """Text of ``num_tokens`` words; a pure function of its arguments."""
        draw = random.Random(seed).random  # noqa: S311 - prompts, not secrets
        text = " ".join(self._words[int(draw() * len(self._words))] for _ in range(num_tokens))
        if self._tokenizer is not None and (num := len(_encode(self._tokenizer, text))) != num_tokens:
            raise InvalidRequest(f"a text meant to have {num_tokens} tokens has {num} under this tokenizer")
        return text


def _encode(tokenizer: Encoder, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _adds_one_token(tokenizer: Encoder, word: str) -> bool:
    return len(_encode(tokenizer, f"{WORDS[0]} {word}")) == len(_encode(tokenizer, WORDS[0])) + 1
