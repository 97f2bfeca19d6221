"""Tiny tokenizers, trained on the fly: one for each way of spelling tokens as bytes, and one that has none."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.prompts.tokenizer import Tokenizer

CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog. " * 20,
    "naïve café über straße 日本語のテキスト 你好世界 Привет мир 👩‍👩‍👧 🙂🙃 " * 10,
    "def f(x):\n    return x + 1\n\n" * 10,
]
SPECIAL = ["<|start|>", "<|end|>"]


def _byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens(["<tool call>", "naïve☃"])
    return raw


def _byte_fallback() -> tokenizers.Tokenizer:
    """As SentencePiece models are converted: words after ``▁``, 256 byte tokens, one leading space stripped."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    definition = json.loads(trained.to_str())
    definition["model"].update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if not token["content"].startswith("<0x")
    ]
    raw = tokenizers.Tokenizer.from_str(json.dumps(definition))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


def _word_piece() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    raw.train_from_iterator(CORPUS, trainer)
    return raw


@pytest.fixture(scope="session")
def raw_byte_level() -> tokenizers.Tokenizer:
    return _byte_level()


@pytest.fixture(scope="session")
def raw_byte_fallback() -> tokenizers.Tokenizer:
    return _byte_fallback()


@pytest.fixture(scope="session")
def raw_word_piece() -> tokenizers.Tokenizer:
    return _word_piece()


@pytest.fixture(scope="session")
def byte_level(raw_byte_level: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw_byte_level.to_str().encode())


@pytest.fixture(scope="session")
def byte_fallback(raw_byte_fallback: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw_byte_fallback.to_str().encode())


@pytest.fixture(scope="session")
def word_piece(raw_word_piece: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw_word_piece.to_str().encode())


@pytest.fixture(scope="session")
def decodes_oddly(raw_byte_level: tokenizers.Tokenizer) -> Tokenizer:
    """Byte-level, with one more step of decoding, so that its tokens are not known to be bytes."""
    raw = tokenizers.Tokenizer.from_str(raw_byte_level.to_str())
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")])
    return Tokenizer(raw.to_str().encode())


@pytest.fixture
def model_dir(tmp_path: Path, raw_byte_level: tokenizers.Tokenizer) -> Path:
    """A model directory with a tokenizer.json that carries its training's truncation and padding."""
    raw = tokenizers.Tokenizer.from_str(raw_byte_level.to_str())
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
