"""The tokenizer inside a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

GGUF names the way text is split before byte-pair encoding (``tokenizer.ggml.pre``) instead of storing it; the rules
behind the names are those of the models' own published tokenizers.
"""

import json
from typing import Any

from tokenizers import Tokenizer

from headrace.core.errors import ModelFormatError
from headrace.registry.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""``tokenizer.ggml.token_type``."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACE}",
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_ALIASES = {"llama-v3": "llama-bpe", "llama3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "gpt2": "gpt-2"}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")
"""Rules whose models look a whole word up in the vocabulary before they merge its parts."""
_LLAMA3_VOCAB = 128_256

_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Tokens that end a turn wherever they exist as control tokens; GGUF's own field holds only one."""


def convert(file: GgufFile) -> tuple[bytes, bytes]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        ModelFormatError: the tokenizer is of a kind that is not read, or contradicts itself.
    """
    kind = file.text("tokenizer.ggml.model")
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFormatError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    types = _types(file, len(tokens))
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens, types)
    else:
        raise ModelFormatError(f"the GGUF tokenizer model {kind!r} is not supported; supported are gpt2 and llama")
    tokenizer["added_tokens"] = [
        _added(index, token, special=types[index] in (_CONTROL, _UNKNOWN))
        for index, token in enumerate(tokens)
        if types[index] in (_CONTROL, _USER) or (types[index] == _UNKNOWN and kind == "llama")
    ]
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ModelFormatError(f"the GGUF tokenizer is inconsistent: {error}") from error
    return text.encode(), _json(_config(file, tokens, kind))


def end_token_ids(file: GgufFile) -> list[int]:
    """Tokens that end a generation: the file's own, and those known by their text; in ascending order."""
    tokens = file.texts("tokenizer.ggml.tokens")
    types = _types(file, len(tokens))
    ends = {index for index, token in enumerate(tokens) if token in _END_TOKENS and types[index] == _CONTROL}
    for key in ("eos", "eot", "eom"):
        if f"tokenizer.ggml.{key}_token_id" in file.metadata:
            ends.add(file.integer(f"tokenizer.ggml.{key}_token_id"))
    return sorted(ends)


def _types(file: GgufFile, num_tokens: int) -> list[int]:
    types = file.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [_NORMAL] * num_tokens
    if types.size != num_tokens:
        raise ModelFormatError(f"{types.size} token types for {num_tokens} tokens")
    return [int(kind) for kind in types.tolist()]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Ids by token; padding of the vocabulary is left out, so that no text can produce it."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if types[index] == _UNUSED:
            continue
        if token in vocabulary:
            raise ModelFormatError(f"token {token!r} has two ids, {vocabulary[token]} and {index}")
        vocabulary[token] = index
    return vocabulary


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    pre = _pre_tokenizer_name(file, len(tokens))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    normalizer: dict[str, Any] | None = None
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    elif pre == "gpt-2":
        steps = [byte_level]
    else:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [split, {**byte_level, "use_regex": False}]
        normalizer = {"type": "NFC"} if pre == "qwen2" else None
    merges = [merge.split(" ") for merge in file.texts("tokenizer.ggml.merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise ModelFormatError("tokenizer.ggml.merges must hold pairs separated by one space")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(file, tokens, adds_start=pre in _WHOLE_WORDS_FIRST),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
            "vocab": _vocabulary(tokens, types),
            "merges": merges,
        },
    }


def _pre_tokenizer_name(file: GgufFile, num_tokens: int) -> str:
    name = file.text("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(name, name)
    if name == "default":
        # Converters before the field existed left it out; the family then tells the rule.
        family = file.text("general.architecture")
        if family.startswith("qwen"):
            return "qwen2"
        return "llama-bpe" if num_tokens == _LLAMA3_VOCAB else "gpt-2"
    if name not in _SPLITS and name not in ("smollm", "gpt-2"):
        known = ", ".join(sorted([*_SPLITS, "smollm", "gpt-2"]))
        raise ModelFormatError(f"the GGUF pre-tokenizer {name!r} is not supported; supported are {known}")
    return name


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    vocabulary = _vocabulary(tokens, types)
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or scores.size != len(tokens):
        raise ModelFormatError("a GGUF tokenizer of the llama kind needs a score for every token")
    prefix = file.flag("tokenizer.ggml.add_space_prefix", default=True)
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.integer("tokenizer.ggml.unknown_token_id", 0)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, tokens, adds_start=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _token(tokens, unknown, "unknown"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges_by_score(tokens, types, [float(score) for score in scores.tolist()]),
        },
    }


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores best: every split of a token, best token first."""
    pieces = {token: index for index, token in enumerate(tokens) if types[index] in (_NORMAL, _USER)}
    ranked = [
        (-scores[index], -cut, len(token) - cut, token[:cut], token[cut:])
        for token, index in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _post_processor(file: GgufFile, tokens: list[str], *, adds_start: bool) -> dict[str, Any] | None:
    """Puts the start token before, and the end token after, as the file says; ``adds_start`` is its kind's default."""
    before, after = [], []
    if file.flag("tokenizer.ggml.add_bos_token", default=adds_start):
        before.append(file.integer("tokenizer.ggml.bos_token_id"))
    if file.flag("tokenizer.ggml.add_eos_token", default=False):
        after.append(file.integer("tokenizer.ggml.eos_token_id"))
    if not before and not after:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    names = {index: _token(tokens, index, "start or end") for index in (*before, *after)}

    def special(index: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[index], "type_id": 0}}

    single = [*map(special, before), text, *map(special, after)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()},
    }


def _added(index: int, token: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _config(file: GgufFile, tokens: list[str], kind: str) -> dict[str, object]:
    result: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer(f"{file.text('general.architecture')}.context_length"),
        "add_bos_token": file.flag("tokenizer.ggml.add_bos_token", default=kind == "llama"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in file.metadata:
            index = file.integer(f"tokenizer.ggml.{key}_token_id")
            result[f"{name}_token"] = _token(tokens, index, key)
    if template := file.text("tokenizer.chat_template"):
        result["chat_template"] = template
    return result


def _token(tokens: list[str], index: int, role: str) -> str:
    if not 0 <= index < len(tokens):
        raise ModelFormatError(f"the {role} token is {index}; the vocabulary has {len(tokens)} tokens")
    return tokens[index]


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True).encode()
