"""Token ids to text while they come: no broken characters, and stop strings across token borders."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from headrace.prompts.pieces import Pieces
from headrace.prompts.stops import StopMatcher
from headrace.prompts.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What some tokens added to a text."""

    text: str
    stopped_by: str | None
    """The stop string that ended the text, now or earlier."""
    num_tokens_used: int
    """How many of the pushed tokens belong to the text: all, or those up to the one that completed a stop string."""


class _Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """The text of one sequence, as it grows.

    All texts returned, joined, are the decoded tokens cut at the first stop string (see
    :class:`~headrace.prompts.stops.StopMatcher`). A character is returned when its last byte is there; U+FFFD stands
    only for bytes that are not UTF-8. A token costs the same whatever came before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """``prompt_ids`` is what the tokens continue: it decides whether a first space is part of the text.

        Raises:
            InvalidRequest: a stop string is empty.
        """
        self._matcher = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._detokenizer: _Detokenizer
        if tokenizer.pieces is not None:
            self._detokenizer = _ByteDetokenizer(tokenizer.pieces, prompt_ids, skip_special_tokens=skip_special_tokens)
        else:
            self._detokenizer = _WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._stopped_by: str | None = None
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens. After a stop string, or after :meth:`finish`, they are ignored."""
        if self._ended:
            return TextDelta("", self._stopped_by, 0)
        texts = []
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.push(token_id)
            if text:
                texts.append(self._match(text))
                if self._stopped_by is not None:
                    return TextDelta("".join(texts), self._stopped_by, index + 1)
        return TextDelta("".join(texts), None, len(token_ids))

    def finish(self) -> TextDelta:
        """No more tokens come: what was held back. Idempotent."""
        if self._ended:
            return TextDelta("", self._stopped_by, 0)
        text = self._match(self._detokenizer.finish())
        if self._matcher is not None and self._stopped_by is None:
            text += self._matcher.finish()
        self._ended = True
        return TextDelta(text, self._stopped_by, 0)

    def _match(self, text: str) -> str:
        if self._matcher is None:
            return text
        shown, self._stopped_by = self._matcher.push(text)
        self._ended = self._stopped_by is not None
        return shown


class _ByteDetokenizer:
    """Joins the bytes of tokens and decodes them as UTF-8 while they come."""

    def __init__(self, pieces: Pieces, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._table = pieces.visible if skip_special_tokens else pieces.all
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._may_strip = pieces.strips_first_space and not any(self._pieces_of(prompt_ids))
        # A prompt given as token ids may end inside a character; four bytes decide what state that leaves.
        tail = b""
        for piece in self._pieces_of(reversed(prompt_ids)):
            tail = piece + tail
            if len(tail) >= 4:
                break
        self._utf8.decode(tail[-4:])

    def push(self, token_id: int) -> str:
        table = self._table
        text = self._utf8.decode(table[token_id]) if token_id < len(table) else ""
        return self._without_first_space(text) if self._may_strip and text else text

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        return self._without_first_space(text) if self._may_strip and text else text

    def _without_first_space(self, text: str) -> str:
        self._may_strip = False
        return text.removeprefix(" ")

    def _pieces_of(self, token_ids: Iterable[int]) -> Iterable[bytes]:
        return (self._table[token_id] for token_id in token_ids if token_id < len(self._table))


class _WindowDetokenizer:
    """For tokens whose text depends on their neighbours: decodes a short window twice, and takes the difference.

        ids   … a b c | d e f
                ^ begin ^ shown: text of ids[begin:] without the text of ids[begin:shown]

    A window whose text ends with U+FFFD may end inside a character: it grows, up to ``_MAX_WINDOW`` tokens.
    """

    _NUM_CONTEXT = 6
    _MAX_WINDOW = 32

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_ids[-self._NUM_CONTEXT :])
        self._num_shown = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._difference()
        unsettled = not text or text.endswith("\N{REPLACEMENT CHARACTER}")
        if unsettled and len(self._ids) - self._num_shown < self._MAX_WINDOW:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._difference())

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_shown], skip_special_tokens=self._skip_special_tokens)
        after = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        return after[len(before) :]

    def _show(self, text: str) -> str:
        del self._ids[: max(0, self._num_shown - self._NUM_CONTEXT)]
        self._num_shown = len(self._ids)
        return text
