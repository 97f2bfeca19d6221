"""What a decoder looks like, from its ``config.json`` alone, and how many bytes it will need."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import ModelFormatError
from headrace.nn.rope_config import RopeConfig, parse_rope

MAX_CONFIG_BYTES = 1 << 20

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""``architectures`` entries of ``config.json`` that can be served, and the family that says how they differ."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    # What `config.json` leaves out takes the family's own default, as the original authors' code does.
    "llama": {"max_position_embeddings": 2048, "tie_word_embeddings": False},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, gated SiLU."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys before the rotary embedding (Qwen3)."""
    sliding_windows: tuple[int | None, ...] = ()
    """For each layer: how many tokens back a query sees, itself included; None is all of them."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    """The dtype the weights were published in, e.g. ``bfloat16``; None if the config does not say."""

    @classmethod
    def from_dir(cls, directory: Path) -> "ModelConfig":
        """Read ``config.json`` and, where there is one, ``generation_config.json`` (for end-of-sequence ids).

        Raises:
            ModelFormatError: a file is missing or damaged, or the model is of a kind that cannot be served.
        """
        path = directory / "config.json"
        raw = _read_json(path)
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return cls.from_dict(raw, generation, source=str(path))

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, source: str = "config.json"
    ) -> "ModelConfig":
        """As :meth:`from_dir`, from parsed files. ``source`` names the origin in messages.

        Raises:
            ModelFormatError: as for :meth:`from_dir`.
        """
        family = _family(raw, source)
        read = _Reader({**_DEFAULTS[family], **raw}, source)
        _refuse_unsupported(read)
        hidden_size = read.count("hidden_size")
        num_heads = read.count("num_attention_heads")
        head_dim = read.count("head_dim", default=hidden_size // num_heads)
        num_kv_heads = read.count("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelFormatError(
                f"{source}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        if head_dim % 2:
            raise ModelFormatError(f"{source}: head_dim is {head_dim}; rotary embedding needs an even number")
        num_layers = read.count("num_hidden_layers")
        max_positions = read.count("max_position_embeddings")
        attention_bias = family in ("llama", "qwen3") and read.flag("attention_bias", default=False)
        generation_eos = (generation or {}).get("eos_token_id")
        return cls(
            family=family,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=read.count("intermediate_size"),
            vocab_size=read.count("vocab_size"),
            max_position_embeddings=max_positions,
            rope=parse_rope(raw, max_positions, source),
            rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
            tie_embeddings=read.flag("tie_word_embeddings", default=False),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and read.flag("mlp_bias", default=False),
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(family, read, num_layers),
            bos_token_id=next(iter(read.token_ids("bos_token_id", raw.get("bos_token_id"))), None),
            eos_token_ids=read.token_ids(
                "eos_token_id", generation_eos if generation_eos is not None else raw.get("eos_token_id")
            ),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )

    @property
    def qkv_size(self) -> int:
        """Rows of the packed query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def num_parameters(self) -> int:
        """Weights and biases of the model; a head tied to the embedding counts once."""
        hidden, inter = self.hidden_size, self.intermediate_size
        layer = 2 * hidden  # two norms
        layer += hidden * self.qkv_size + (self.qkv_size if self.qkv_bias else 0)
        layer += self.num_heads * self.head_dim * hidden + (hidden if self.o_bias else 0)
        layer += 3 * hidden * inter + (2 * inter + hidden if self.mlp_bias else 0)
        layer += 2 * self.head_dim if self.qk_norm else 0
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * hidden
        return self.num_layers * layer + embeddings + hidden

    def weight_bytes(self, dtype: torch.dtype, *, head_copied: bool = False, row_multiple: int = 1) -> int:
        """Bytes of the weights once loaded.

        ``head_copied``: products keep weights in a layout of their own (``headrace.nn.ops.linear``), so a head tied to
        the embedding is kept twice. ``row_multiple``: that layout pads output features to a multiple of this, gates
        and their other factors each to half of it.
        """

        def padding(rows: int, inputs: int, multiple: int = row_multiple) -> int:
            return -rows % multiple * inputs

        hidden, inter, query = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        layer = padding(self.qkv_size, hidden) + padding(hidden, query) + padding(hidden, inter)
        layer += 2 * padding(inter, hidden, max(1, row_multiple // 2))
        head = padding(self.vocab_size, hidden)
        if head_copied and self.tie_embeddings:
            head += self.vocab_size * hidden
        return (self.num_parameters() + self.num_layers * layer + head) * dtype.itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def activation_bytes(self, num_tokens: int, num_logit_rows: int, dtype: torch.dtype) -> int:
        """An upper bound of what one forward pass allocates at once, kernels' own workspaces left out.

        The widest moment is inside the gated MLP (residual, its input, gate and up, their product, the output) or
        inside attention (residual, its input, packed projection, rotated copies, the output); logits come after.
        """
        hidden, inter = self.hidden_size, self.intermediate_size
        mlp = 3 * hidden + 3 * inter
        attention = 3 * hidden + 2 * self.qkv_size + self.num_heads * self.head_dim
        body = num_tokens * max(mlp, attention)
        logits = num_logit_rows * (self.vocab_size + hidden)
        return (max(body, num_tokens * 2 * hidden + logits)) * dtype.itemsize


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelFormatError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes; not a model configuration")
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ModelFormatError(f"{path}: must hold a JSON object")
    return table


def _family(raw: Mapping[str, Any], source: str) -> str:
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelFormatError(f"{source}: architecture {name!r} is not supported; supported are {known}")
    return FAMILIES[name]


def _refuse_unsupported(read: "_Reader") -> None:
    table, source = read.table, read.source
    if table.get("quantization_config") is not None:
        raise ModelFormatError(f"{source}: quantized checkpoints (quantization_config) are not supported")
    activation = table.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelFormatError(f"{source}: hidden_act {activation!r} is not supported, only silu")


def _sliding_windows(family: str, read: "_Reader", num_layers: int) -> tuple[int | None, ...]:
    table, source = read.table, read.source
    full: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama" or table.get("sliding_window") is None:
        return full
    if family != "mistral" and not read.flag("use_sliding_window", default=False):
        return full
    window = read.count("sliding_window")
    kinds = table.get("layer_types")
    if kinds is None:
        first = 0 if family == "mistral" else read.count("max_window_layers", default=28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFormatError(f"{source}: layer_types must list {num_layers} layers, one each")
    if family == "mistral":
        raise ModelFormatError(f"{source}: layer_types is not supported for Mistral models")
    unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelFormatError(f"{source}: layer_types names {', '.join(unknown)}, which is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, slots=True)
class _Reader:
    table: Mapping[str, Any]
    source: str

    def count(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self.table.get(key)
        if value is None:
            if default is None:
                raise ModelFormatError(f"{self.source}: {key!r} is missing")
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            raise ModelFormatError(f"{self.source}: {key} is {value!r}; it must be a whole number, at least {minimum}")
        return value

    def number(self, key: str, *, default: float) -> float:
        value = self.table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ModelFormatError(f"{self.source}: {key} is {value!r}; it must be between 0 and 1")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.source}: {key} is {value!r}; it must be true or false")
        return value

    def token_ids(self, key: str, value: object) -> tuple[int, ...]:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise ModelFormatError(f"{self.source}: {key} is {value!r}; it must be a token id or a list of them")
        return tuple(dict.fromkeys(ids))
