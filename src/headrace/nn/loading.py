"""From a model directory to a decoder that is ready to run."""

from collections.abc import Callable
from pathlib import Path

import torch

from headrace.core.errors import ModelFormatError
from headrace.nn.config import ModelConfig
from headrace.nn.model import CausalLM, Layer
from headrace.nn.ops.choose import make_ops
from headrace.nn.ops.interface import HeadNorms
from headrace.nn.ops.linear import Gated, Linear, layout_for, make_gated, make_linear
from headrace.nn.safetensors import Checkpoint, TensorInfo

Progress = Callable[[int, int], None]
"""Called with ``(bytes read so far, bytes in all)``."""

MAX_NAMES_IN_ERROR = 5


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, *, progress: Progress | None = None
) -> CausalLM:
    """Load a model directory (``config.json``, safetensors) as ``dtype`` onto ``device``.

    Raises:
        ModelFormatError: the configuration or a weights file is damaged or not supported, or a tensor is missing,
            not expected, or of the wrong shape. The message names it.
    """
    config = ModelConfig.from_dir(directory)
    checkpoint = Checkpoint(directory)
    _check_tensors(config, checkpoint.infos, directory)
    weights = _Weights(checkpoint, dtype, device, progress)
    embedding = weights.take("model.embed_tokens.weight")
    layers = [_load_layer(config, weights, index) for index in range(config.num_layers)]
    final_norm = weights.take("model.norm.weight")
    head_weight = embedding if config.tie_embeddings else weights.take("lm_head.weight")
    head = make_linear(head_weight)
    return CausalLM(
        config,
        make_ops(config, dtype, device),
        embedding,
        layers,
        final_norm,
        head,
        head_is_embedding=config.tie_embeddings and not layout_for(dtype, device).is_copy,
    )


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of this model must hold."""
    hidden, inter = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    products = [
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", key, hidden, config.qkv_bias),
        ("self_attn.v_proj", key, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.o_bias),
        ("mlp.gate_proj", inter, hidden, config.mlp_bias),
        ("mlp.up_proj", inter, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inter, config.mlp_bias),
    ]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        tensors[layer + "input_layernorm.weight"] = (hidden,)
        tensors[layer + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in products:
            tensors[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                tensors[f"{layer}{name}.bias"] = (rows,)
        if config.qk_norm:
            tensors[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            tensors[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
    return tensors


def _check_tensors(config: ModelConfig, infos: dict[str, TensorInfo], directory: Path) -> None:
    expected = expected_tensors(config)
    # Old converters wrote the rotary frequencies out, and the tied head a second time; neither is read.
    ignored = {name for name in infos if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    for what, names in (
        ("is missing", expected.keys() - infos.keys()),
        ("is not part of this model", infos.keys() - expected.keys() - ignored),
    ):
        if names:
            shown = ", ".join(sorted(names)[:MAX_NAMES_IN_ERROR])
            more = f" and {len(names) - MAX_NAMES_IN_ERROR} more" if len(names) > MAX_NAMES_IN_ERROR else ""
            raise ModelFormatError(f"{directory}: tensor {shown}{more} {what}")
    for name, shape in expected.items():
        info = infos[name]
        if info.shape != shape:
            raise ModelFormatError(f"{directory}: tensor {name} has shape {list(info.shape)}, not {list(shape)}")
        if not info.dtype.is_floating_point:
            raise ModelFormatError(f"{directory}: tensor {name} holds {info.dtype}, not floating-point numbers")


class _Weights:
    """Hands out checkpoint tensors as the model wants them, and counts what was read."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._total = sum(info.end - info.start for info in checkpoint.infos.values())
        self._done = 0

    def take(self, *names: str) -> torch.Tensor:
        """The tensors one below the other in fresh memory of the model's dtype and device."""
        parts = [self._checkpoint.read(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        packed = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        for part in parts:
            packed[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
            self._done += part.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return packed


def _load_layer(config: ModelConfig, weights: _Weights, index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def taken(*names: str, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights.take(*(f"{prefix}{name}.weight" for name in names))
        return weight, weights.take(*(f"{prefix}{name}.bias" for name in names)) if bias else None

    def linear(*names: str, bias: bool) -> Linear:
        return make_linear(*taken(*names, bias=bias))

    def gated(*names: str, bias: bool) -> Gated:
        return make_gated(*taken(*names, bias=bias))

    head_norms = None
    if config.qk_norm:
        head_norms = HeadNorms(
            query=weights.take(prefix + "self_attn.q_norm.weight"), key=weights.take(prefix + "self_attn.k_norm.weight")
        )
    return Layer(
        input_norm=weights.take(prefix + "input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
        head_norms=head_norms,
        attention_output=linear("self_attn.o_proj", bias=config.o_bias),
        mlp_norm=weights.take(prefix + "post_attention_layernorm.weight"),
        gate_up=gated("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
        down=linear("mlp.down_proj", bias=config.mlp_bias),
        window=config.sliding_windows[index],
    )
