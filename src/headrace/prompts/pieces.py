"""The bytes that each token stands for, so that text is made by joining bytes and never by decoding twice.

Nearly all models of today spell tokens in one of two ways: byte-level BPE (GPT-2's printable stand-ins for the 256
bytes), or SentencePiece with byte fallback (``▁`` for a space, ``<0xE2>`` for a byte). Both turn a token into bytes
without looking at its neighbours. A tokenizer that spells differently has no :class:`Pieces`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class Pieces(msgspec.Struct, frozen=True):
    """A vocabulary as bytes."""

    all: list[bytes]
    """By token id; ids without a token are empty."""
    visible: list[bytes]
    """As ``all``, but special tokens are empty."""
    strips_first_space: bool
    """Whether one space at the very beginning of a text is dropped (SentencePiece adds one when it encodes)."""


def read_pieces(vocab: Mapping[str, int], special: frozenset[int], decoder: Mapping[str, Any] | None) -> Pieces | None:
    """The pieces of ``vocab`` (token to id) as ``decoder``, that section of tokenizer.json, spells them.

    None when the decoder is of a kind whose tokens depend on their neighbours.
    """
    steps = _flatten(decoder)
    if [step.get("type") for step in steps] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        table = _table(vocab, _byte_level_piece)
        strips_first_space = False
    elif _is_sentencepiece(steps):
        table = _table(vocab, _sentencepiece_piece)
        strips_first_space = any(step["type"] == "Strip" and step.get("start") == 1 for step in steps)
    else:
        return None
    visible = [b"" if token_id in special else piece for token_id, piece in enumerate(table)]
    return Pieces(all=table, visible=visible, strips_first_space=strips_first_space)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for nested in decoder.get("decoders", []) for step in _flatten(nested)]
    return [decoder]


def _is_sentencepiece(steps: list[Mapping[str, Any]]) -> bool:
    kinds = [step.get("type") for step in steps]
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return False
    replaces_space = steps[0].get("pattern") == {"String": "▁"} and steps[0].get("content") == " "
    strips_space = len(steps) == 3 or (
        steps[3].get("content") == " " and steps[3].get("start") in (0, 1) and steps[3].get("stop") == 0
    )
    return replaces_space and strips_space


def _table(vocab: Mapping[str, int], piece: Any) -> list[bytes]:
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = piece(token)
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's bijection between the bytes and printable characters: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        # Added tokens are written as they are; the reference decoder falls back the same way, for the whole token.
        return token.encode()


def _sentencepiece_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()
