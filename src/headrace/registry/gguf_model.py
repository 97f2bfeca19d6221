"""A GGUF checkpoint as a Hugging Face model: its `config.json` and its tensors, in bfloat16.

Names and layouts are those of llama.cpp's `convert_hf_to_gguf.py`, undone.
"""

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headrace.core.errors import ModelFormatError
from headrace.registry.gguf_file import GgufFile, GgufTensor
from headrace.registry.progress import Progress
from headrace.registry.safetensors_writer import to_bfloat16, write_bfloat16

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""By GGUF architecture: Hugging Face's ``model_type`` and class name."""

_PERMUTED = ("llama", "mistral")
"""Architectures whose query and key rows llama.cpp reorders for its own rotary embedding."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_GROUP_VALUES = 1 << 21
"""Values converted at a time: large enough for numpy, small enough for the processor's cache and for memory."""


def architecture(file: GgufFile) -> str:
    """The file's architecture.

    Raises:
        ModelFormatError: it is not one that can be imported.
    """
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelFormatError(
            f"the GGUF architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return name


def config(file: GgufFile) -> dict[str, object]:
    """The content of `config.json`.

    Raises:
        ModelFormatError: the architecture is not supported, a value is missing, or sizes contradict each other.
    """
    name = architecture(file)
    model_type, class_name = ARCHITECTURES[name]
    hidden_size = file.integer(f"{name}.embedding_length")
    num_heads = file.integer(f"{name}.attention.head_count")
    if num_heads < 1:
        raise ModelFormatError(f"GGUF metadata {name}.attention.head_count is {num_heads}; at least 1 was expected")
    head_dim = file.integer(f"{name}.attention.key_length", hidden_size // num_heads)
    rotary_dim = file.integer(f"{name}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ModelFormatError(f"rotary embedding over {rotary_dim} of {head_dim} dimensions is not supported")
    if file.integer(f"{name}.expert_count", 0):
        raise ModelFormatError("mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError("the GGUF file has no tensor token_embd.weight")
    result: dict[str, object] = {
        "architectures": [class_name],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{name}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.integer(f"{name}.context_length"),
        # The file holds a float32; its shortest decimal form is what the author wrote.
        "rms_norm_eps": _shortest(file.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(file.number(f"{name}.rope.freq_base", 10_000.0)),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if (scaling := _rope_scaling(file, name)) is not None:
        result["rope_scaling"] = scaling
    if window := file.integer(f"{name}.attention.sliding_window", 0):
        result["sliding_window"] = window
    for key, metadata in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{metadata}_token_id" in file.metadata:
            result[key] = file.integer(f"tokenizer.ggml.{metadata}_token_id")
    return result


def convert(file: GgufFile, path: Path, progress: Progress) -> None:
    """Write all tensors to ``path`` as bfloat16 safetensors under Hugging Face names.

    Raises:
        ModelFormatError: a tensor is unknown, missing, out of bounds, or quantized in a way that is not read.
    """
    name = architecture(file)
    sources = {_hf_name(tensor.name): tensor for tensor in file.tensors.values() if tensor.name != _ROPE_FACTORS}
    for needed in ("model.embed_tokens.weight", "model.norm.weight"):
        if needed not in sources:
            raise ModelFormatError(f"the GGUF file lacks the tensor that becomes {needed}")
    raw = {target: _raw_rows(file, tensor) for target, tensor in sources.items()}
    shapes = {target: tensor.shape for target, tensor in sources.items()}
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    heads = {
        "self_attn.q_proj": file.integer(f"{name}.attention.head_count"),
        "self_attn.k_proj": file.integer(
            f"{name}.attention.head_count_kv", file.integer(f"{name}.attention.head_count")
        ),
    }

    def one(target: str) -> npt.NDArray[np.uint16]:
        values = _dequantized(raw[target], sources[target])
        module = next((module for module in heads if module in target), None)
        if name in _PERMUTED and module is not None:
            values = _unpermuted(values, heads[module], target)
        return values

    def converted() -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
        done = 0
        with ThreadPoolExecutor(2) as pool:
            # Two at a time: numpy lets go of the interpreter, and no more than two tensors wait in memory.
            names = iter(shapes)
            waiting = [(target, pool.submit(one, target)) for _, target in zip(range(2), names, strict=False)]
            while waiting:
                target, future = waiting.pop(0)
                values = future.result()
                if (following := next(names, None)) is not None:
                    waiting.append((following, pool.submit(one, following)))
                yield target, values
                done += values.nbytes
                progress("convert", done, total)

    write_bfloat16(path, shapes, converted())


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise ModelFormatError(f"the GGUF tensor {name!r} has no counterpart in the supported architectures")
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def _raw_rows(file: GgufFile, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
    """The tensor's stored bytes, ``[rows, bytes per row]``."""
    try:
        kind = GGMLQuantizationType(tensor.quantization)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelFormatError(
            f"tensor {tensor.name} has the unknown quantization type {tensor.quantization}"
        ) from error
    row_values = tensor.shape[-1]
    if row_values % block_values:
        raise ModelFormatError(f"tensor {tensor.name}: rows of {row_values} do not divide into {kind.name} blocks")
    row_bytes = row_values // block_values * block_bytes
    num_rows = math.prod(tensor.shape[:-1])
    end = tensor.offset + num_rows * row_bytes
    if end > file.data.size:
        raise ModelFormatError(f"truncated: tensor {tensor.name} ends at data byte {end} of {file.data.size}")
    return file.data[tensor.offset : end].reshape(num_rows, row_bytes)


def _dequantized(rows: npt.NDArray[np.uint8], tensor: GgufTensor) -> npt.NDArray[np.uint16]:
    kind = GGMLQuantizationType(tensor.quantization)
    result = np.empty((rows.shape[0], tensor.shape[-1]), np.uint16)
    step = max(1, _GROUP_VALUES // tensor.shape[-1])
    for start in range(0, rows.shape[0], step):
        group = rows[start : start + step]
        try:
            # A quantized block of garbage bytes may hold NaN or infinite scales; they pass through as such.
            with np.errstate(all="ignore"):
                values = dequantize(np.ascontiguousarray(group), kind)
        except NotImplementedError as error:
            raise ModelFormatError(f"tensor {tensor.name}: {kind.name} quantization cannot be read") from error
        result[start : start + step] = to_bfloat16(values.astype(np.float32, copy=False))
    return result.reshape(tensor.shape)


def _unpermuted(values: npt.NDArray[np.uint16], num_heads: int, name: str) -> npt.NDArray[np.uint16]:
    """Back from llama.cpp's row order, where a head's two rotary halves interleave::

    stored, per head:   a0 b0 a1 b1 …   →   a0 a1 … b0 b1 …
    """
    if num_heads < 1 or values.shape[0] % (2 * num_heads):
        raise ModelFormatError(f"{name} has {values.shape[0]} rows, which {num_heads} heads do not divide")
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _rope_scaling(file: GgufFile, name: str) -> dict[str, object] | None:
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, name)
    if kind == "none":
        return None
    factor = file.number(f"{name}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.integer(f"{name}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelFormatError(f"rope scaling of type {kind!r} is not supported")


def _llama3_scaling(file: GgufFile, name: str) -> dict[str, object]:
    """Llama 3's scaling, recovered from the per-frequency divisors that GGUF stores instead of the four parameters.

    The divisor is 1 for wavelengths below ``original / high``, ``factor`` above ``original / low``, and between them
    runs so that its inverse is linear in ``original / wavelength``. ``low`` is 1 and ``high`` 4 in every published
    checkpoint, so the largest divisor gives ``factor``, and any divisor between gives ``original``.
    """
    tensor = file.tensors[_ROPE_FACTORS]
    divisors = _raw_rows(file, tensor).view(np.float32).ravel().astype(np.float64)
    head_dim = 2 * divisors.size
    wavelengths = (
        2 * math.pi * file.number(f"{name}.rope.freq_base", 10_000.0) ** (np.arange(divisors.size) / divisors.size)
    )
    factor, low, high = float(divisors.max()), 1.0, 4.0
    between = (divisors > 1.0) & (divisors < factor)
    if not np.isfinite(divisors).all() or divisors.min() < 1.0 or not between.any():
        raise ModelFormatError(f"{_ROPE_FACTORS} ({head_dim} dimensions) does not follow Llama 3's scaling")
    # 1/divisor = (1 - s)/factor + s with s = (original/wavelength - low)/(high - low).
    smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    originals = (smooth * (high - low) + low) * wavelengths[between]
    original = round(float(np.median(originals)))
    if np.abs(originals - original).max() > 0.01 * original:
        raise ModelFormatError(f"{_ROPE_FACTORS} does not follow Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))
