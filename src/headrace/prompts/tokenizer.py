"""Text to token ids and back."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from headrace.core.errors import InvalidRequest, ModelFormatError, Overloaded, RequestTooLarge
from headrace.prompts.pieces import Pieces, read_pieces

# The library's own thread pool spreads a batch over all cores. Batches here have one text, and threads of its own
# would compete with the event loop and warn after every fork. It reads the variable when it encodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_INLINE_CHARS = 2048
"""Shorter texts are encoded where they are: about a millisecond at most, less than a round trip to a thread."""
MAX_PENDING_ENCODES = 256
_NUM_THREADS = 2


class Tokenizer:
    """A model's tokenizer. All methods may be called from any thread; each thread works on its own copy."""

    def __init__(self, definition: bytes, *, eos_token_ids: frozenset[int] = frozenset(), max_chars: int = 8_000_000):
        """``definition`` is the content of a tokenizer.json; see :meth:`load` for one of a model directory.

        Raises:
            ModelFormatError: the definition is damaged or of an unknown kind.
        """
        self._definition = definition
        self._max_chars = max_chars
        first = self._parse()
        self._spare = [first]
        self._local = threading.local()
        self._num_pending = 0
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "tokenize", initializer=self._adopt_new_copy)
        self.eos_token_ids = eos_token_ids
        """Any of these ends an answer."""
        self._vocab: dict[str, int] = first.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        """One more than the highest token id. A model may have more rows of logits than that."""
        special = frozenset(i for i, token in first.get_added_tokens_decoder().items() if token.special)
        decoder = json.loads(first.to_str()).get("decoder")
        self._pieces = read_pieces(self._vocab, special, decoder)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer of a model directory (``tokenizer.json``).

        End-of-sequence ids are those of generation_config.json, config.json and tokenizer_config.json together.

        Raises:
            ModelFormatError: tokenizer.json is missing or damaged, or one of the others is not JSON.
        """
        path = directory / "tokenizer.json"
        try:
            definition = path.read_bytes()
        except OSError as error:
            raise ModelFormatError(
                f"{path}: cannot read it: {error.strerror}; a model needs the tokenizer.json of a fast tokenizer"
            ) from error
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids.update(_ids(read_json(directory / name).get("eos_token_id")))
        tokenizer = cls(definition)
        eos_id = tokenizer.token_id(special_token(read_json(directory / "tokenizer_config.json"), "eos_token"))
        if eos_id is not None:
            ids.add(eos_id)
        tokenizer.eos_token_ids = frozenset(ids)
        return tokenizer

    def warm_up(self) -> None:
        """Make the threads' copies now, so that no long text waits for one. Blocks for some tenths of a second."""
        # A thread that parses is not idle, so each of these starts one of its own.
        concurrent.futures.wait([self._pool.submit(self.encode, "a") for _ in range(_NUM_THREADS)])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, in the calling thread.

        Chat templates write the special tokens themselves: pass ``add_special_tokens=False`` for what they render.

        Raises:
            RequestTooLarge: the text is longer than any context could hold.
            InvalidRequest: the text has a lone surrogate, which no encoding of text can express.
        """
        if len(text) > self._max_chars:
            raise RequestTooLarge(
                f"the text has {len(text)} characters; at most {self._max_chars} are tokenized at once"
            )
        try:
            # The batch call, unlike the single one, lets other threads run, and "fast" computes no offsets.
            encodings = self._copy().encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequest("the text has a lone surrogate; it must be valid Unicode") from error
        ids: list[int] = encodings[0].ids
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As :meth:`encode`, but a long text is encoded in another thread and the event loop goes on.

        Raises:
            Overloaded: more than ``MAX_PENDING_ENCODES`` long texts wait already.
        """
        if len(text) <= MAX_INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        if self._num_pending >= MAX_PENDING_ENCODES:
            raise Overloaded(f"{self._num_pending} long texts wait for the tokenizer; try again", retry_after_s=1.0)
        with _PENDING:
            self._num_pending += 1
        work = self._pool.submit(self.encode, text, add_special_tokens=add_special_tokens)
        work.add_done_callback(self._encoded)
        return await asyncio.wrap_future(work)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``. Bytes that are not UTF-8 become U+FFFD; ids without a token are skipped."""
        pieces = self._pieces
        if pieces is None:
            text: str = self._copy().decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        table = pieces.visible if skip_special_tokens else pieces.all
        text = b"".join([table[i] for i in token_ids if i < len(table)]).decode("utf-8", "replace")
        return text.removeprefix(" ") if pieces.strips_first_space else text

    def token_text(self, token_id: int) -> str:
        """One token as text for people; part of a character shows as U+FFFD, a special token as it is written."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; possibly part of a character. Empty for an id without a token."""
        if self._pieces is not None:
            table = self._pieces.all
            return table[token_id] if 0 <= token_id < len(table) else b""
        text: str = self._copy().decode([token_id], skip_special_tokens=False)
        return text.encode()

    def token_id(self, token: str | None) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return None if token is None else self._vocab.get(token)

    @property
    def pieces(self) -> Pieces | None:
        """The bytes of every token; None for a tokenizer whose tokens have none of their own."""
        return self._pieces

    @property
    def num_pending(self) -> int:
        """Long texts that wait for a thread, or are being encoded in one."""
        return self._num_pending

    def close(self) -> None:
        """End the threads. Idempotent; waiting encodes are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encoded(self, _work: object) -> None:
        # Called in whichever thread finished or cancelled the work.
        with _PENDING:
            self._num_pending -= 1

    def _copy(self) -> Any:
        """The calling thread's own library object: calls on a shared one can fail with "Already borrowed"."""
        copy = getattr(self._local, "raw", None)
        if copy is None:
            with contextlib.suppress(IndexError):
                copy = self._spare.pop()
            if copy is None:
                copy = self._parse()
            self._local.raw = copy
        return copy

    def _adopt_new_copy(self) -> None:
        # Leaves the spare, which was paid for at load, to the event loop's thread.
        self._local.raw = self._parse()

    def _parse(self) -> Any:
        try:
            # The library raises bare Exception.
            raw = tokenizers.Tokenizer.from_buffer(self._definition)
        except Exception as error:
            raise ModelFormatError(f"tokenizer.json cannot be used: {error}") from error
        # Published tokenizers often carry their training's truncation and padding.
        raw.no_truncation()
        raw.no_padding()
        return raw


_PENDING = threading.Lock()


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file; empty if there is no such file.

    Raises:
        ModelFormatError: the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFormatError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """``bos_token``, ``eos_token``, … of a tokenizer_config.json, which writes them as text or as an object."""
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> Iterable[int]:
    """One id, a list of them, or nothing: configurations write all three. ``true`` is not an id."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
