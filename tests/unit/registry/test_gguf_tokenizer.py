import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.core.errors import ModelFormatError
from headrace.registry import gguf_file, gguf_tokenizer

WriteGguf = Callable[..., Path]

CORPUS = [
    "Hello, world! It's I'm WE'LL don't they'd 'Re",
    "  leading spaces\n\n\tand tabs \r\n mixed   \n",
    "numbers 1 12 123 1234567890 3.14 ½ ² x2y",
    "日本語のテキスト 中文 한국어 العربية हिन्दी ไทย",
    "emoji 🙂👩‍👩‍👧‍👦🇩🇪 and ümläuts é e\u0301 ﬁ",
    "def f(x):\n    return x**2  # comment\n\n\nclass A: pass\n",
    "camelCaseWords SCREAMING_SNAKE https://example.com/a?b=c&d",
    "\x00\x01\x7f\u00a0\u3000\ufeff",
    "<|im_end|> in <|begin|>text<|im_end|>",
    "",
    " ",
    "a" * 100,
]
RULES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def imported(path: Path) -> tuple[Tokenizer, dict[str, object]]:
    tokenizer, config = gguf_tokenizer.convert(gguf_file.read(path))
    return Tokenizer.from_str(tokenizer.decode()), json.loads(config)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_a_byte_level_tokenizer_gives_the_ids_of_the_one_it_was_made_from(write_gguf: WriteGguf, pre: str) -> None:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = RULES[pre]
    original.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    original.train_from_iterator(CORPUS * 3, trainer)
    saved = json.loads(original.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in saved["merges"]]
    tokenizer, _ = imported(write_gguf(tokens=tokens, merges=merges, pre=pre))
    rng = random.Random(3)
    mixed = ["".join(rng.choice(CORPUS)[:9] for _ in range(6)) for _ in range(50)]
    for text in [*CORPUS, *mixed]:
        assert tokenizer.encode(text).ids == original.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 1234", " A", "'", "S", " x", "\n\n ", " y"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " A", "'", "S", " x", "\n\n ", " y"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " A", "'S", " x", "\n\n", " ", " y"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " A", "'S", " x", "\n\n", " ", " y"]),
    ],
)
def test_each_rule_splits_text_as_its_models_do(write_gguf: WriteGguf, pre: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    tokenizer, _ = imported(write_gguf(pre=pre))
    assert tokenizer.pre_tokenizer is not None
    split = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert split == pieces


def test_special_tokens_are_marked_and_found_in_text(write_gguf: WriteGguf) -> None:
    tokenizer, config = imported(write_gguf())
    assert tokenizer.encode("<|begin|>a<|im_end|>").ids[0] == 0
    assert tokenizer.encode("<|begin|>a<|im_end|>").ids[-1] == 1
    assert tokenizer.decode([0, tokenizer.token_to_id("a"), 1]) == "a"
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|im_end|>")


def test_padding_of_the_vocabulary_cannot_be_written(write_gguf: WriteGguf) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        kinds = [3, 3, *[1] * 258]
        kinds[-1] = 5
        writer.kv_data[0]["tokenizer.ggml.token_type"].value = kinds

    tokenizer, _ = imported(write_gguf(extra=extra, merges=["a b"]))
    assert tokenizer.token_to_id("abc") is None
    assert tokenizer.token_to_id("ab") == 258


@pytest.mark.parametrize(
    ("pre", "flag", "starts"),
    [("llama-bpe", None, True), ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", False, False)],
)
def test_the_start_token_is_added_where_the_file_or_its_kind_says(
    write_gguf: WriteGguf, pre: str, flag: bool | None, starts: bool
) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        if flag is not None:
            writer.add_add_bos_token(flag)

    tokenizer, _ = imported(write_gguf(pre=pre, extra=extra))
    assert (tokenizer.encode("a").ids[0] == 0) is starts
    assert tokenizer.encode("a", add_special_tokens=False).ids[0] != 0


def test_the_chat_template_and_the_end_tokens_are_kept(write_gguf: WriteGguf) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template("{{ messages }}")
        writer.add_eot_token_id(5)

    path = write_gguf(extra=extra)
    assert imported(path)[1]["chat_template"] == "{{ messages }}"
    assert gguf_tokenizer.end_token_ids(gguf_file.read(path)) == [1, 5]


@pytest.mark.parametrize(("architecture", "expected"), [("qwen2", {"type": "NFC"}), ("llama", None)])
def test_a_file_that_does_not_name_its_rule_gets_that_of_its_family(
    write_gguf: WriteGguf, architecture: str, expected: object
) -> None:
    raw, _ = gguf_tokenizer.convert(gguf_file.read(write_gguf(architecture, pre=None)))
    assert json.loads(raw)["normalizer"] == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "mystery"}, "'mystery' is not supported; supported are gpt-2"),
        ({"merges": ["a"]}, "pairs"),
        ({"merges": ["a zzz"]}, "inconsistent"),
        ({"tokens": ["a", "b", "a"], "merges": []}, "two ids"),
        ({"extra": lambda writer: writer.kv_data[0].pop("tokenizer.ggml.tokens")}, "no tokenizer"),
        ({"extra": lambda writer: writer.add_pad_token_id(999)}, "padding token is 999"),
        ({"extra": lambda writer: writer.add_bos_token_id(999) or writer.add_add_bos_token(True)}, "999"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_makes_no_sense_is_refused(
    write_gguf: WriteGguf, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelFormatError, match=reason):
        imported(write_gguf(**changes))


PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "▁h",
    "he",
    "ll",
    "llo",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "ld",
    "world",
    "▁world",
    "lo",
]


def sentencepiece_writer(tokens: list[str], scores: list[float], *, prefix: bool) -> Callable[[gguf.GGUFWriter], None]:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.model"].value = "llama"
        kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
        writer.kv_data[0]["tokenizer.ggml.token_type"].value = kinds
        writer.kv_data[0]["tokenizer.ggml.bos_token_id"].value = 1
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 2
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(prefix)

    return extra


def merge_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's algorithm at its plainest: join the neighbours whose union scores best, the leftmost first."""
    index = {token: number for number, token in enumerate(tokens)}
    parts = list(text)
    while True:
        joined = [(-scores[index[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in index]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        index[token]
        for part in parts
        for token in ([part] if part in index else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score_and_falls_back_to_bytes(write_gguf: WriteGguf, prefix: bool) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 259 + [-float(number) for number in range(len(PIECES))]
    tokenizer, config = imported(write_gguf(tokens=tokens, extra=sentencepiece_writer(tokens, scores, prefix=prefix)))
    rng = random.Random(5)
    texts = ["hello world", "helloworld", "  hello", "wé🙂o", "hello\n"] + [
        "".join(rng.choice("helowrd  é") for _ in range(rng.randrange(1, 30))) for _ in range(200)
    ]
    for text in texts:
        expected = merge_by_score(("▁" if prefix else "") + text.replace(" ", "▁"), tokens, scores)
        assert tokenizer.encode(text).ids == [1, *expected], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert config["add_bos_token"] is True
