"""Small GGUF files of every supported architecture, and a registry on local parts."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.adapters.blobs.files import FileBlobs
from headrace.core.ids import ModelName, VersionId
from headrace.ports.store import ModelVersion
from headrace.registry.registry import Registry

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS, HEAD_DIM = 64, 4, 2, 96, 2, 16
SPECIAL = ["<|begin|>", "<|im_end|>"]
Tensors = dict[str, np.ndarray]


class MemoryCatalog:
    """Versions in a list, for tests of the registry alone."""

    def __init__(self) -> None:
        self.versions: list[ModelVersion] = []

    async def add_version(self, version: ModelVersion) -> bool:
        if await self.find_version(version.model, version.version) is not None:
            return False
        self.versions.insert(0, version)
        return True

    async def find_version(self, model: ModelName, version: VersionId | None = None) -> ModelVersion | None:
        return next((v for v in self.versions if v.model == model and version in (None, v.version)), None)

    async def list_versions(self) -> list[ModelVersion]:
        return sorted(self.versions, key=lambda version: version.model)


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


@pytest.fixture
def registry(blobs: FileBlobs, tmp_path: Path) -> Registry:
    return Registry(MemoryCatalog(), blobs, scratch_dir=tmp_path / "scratch")


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def hf_tensors(architecture: str, vocab_size: int) -> Tensors:
    """Random weights under Hugging Face names, in values that bfloat16 holds exactly."""
    rng = np.random.default_rng(7)

    def random(*shape: int) -> np.ndarray:
        return rng.integers(-64, 64, shape).astype(np.float32) / 64

    tensors = {"model.embed_tokens.weight": random(vocab_size, HIDDEN), "model.norm.weight": random(HIDDEN)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        tensors |= {
            base + "input_layernorm.weight": random(HIDDEN),
            base + "post_attention_layernorm.weight": random(HIDDEN),
            base + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            base + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            base + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            base + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            base + "mlp.gate_proj.weight": random(MLP, HIDDEN),
            base + "mlp.up_proj.weight": random(MLP, HIDDEN),
            base + "mlp.down_proj.weight": random(HIDDEN, MLP),
        }
        if architecture == "qwen2":
            tensors |= {
                base + "self_attn.q_proj.bias": random(HEADS * HEAD_DIM),
                base + "self_attn.k_proj.bias": random(KV_HEADS * HEAD_DIM),
                base + "self_attn.v_proj.bias": random(KV_HEADS * HEAD_DIM),
            }
        if architecture == "qwen3":
            tensors |= {
                base + "self_attn.q_norm.weight": random(HEAD_DIM),
                base + "self_attn.k_norm.weight": random(HEAD_DIM),
            }
    return tensors


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf(name: str, values: np.ndarray, architecture: str) -> tuple[str, np.ndarray]:
    """What llama.cpp's converter writes for a Hugging Face tensor."""
    module, _, kind = name.removeprefix("model.layers.").rpartition(".")
    layer, _, rest = module.partition(".")
    target = f"blk.{layer}.{NAMES[rest]}.{kind}" if layer.isdigit() else f"{NAMES[module]}.{kind}"
    heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(rest)
    if architecture in ("llama", "mistral") and heads is not None:
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return target, values


WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Write a small GGUF model; keyword arguments change its parts."""

    def write(
        architecture: str = "llama",
        *,
        name: str = "tiny.gguf",
        tensors: Tensors | None = None,
        quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        extra: Callable[[gguf.GGUFWriter], None] = lambda _: None,
        pre: str | None = "gpt-2",
        tokens: list[str] | None = None,
        merges: list[str] | None = None,
    ) -> Path:
        vocabulary = tokens if tokens is not None else [*SPECIAL, *byte_tokens(), "ab", "abc"]
        kinds = [3 if token in SPECIAL else 1 for token in vocabulary]
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(MLP)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10_000.0)
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges if merges is not None else ["a b", "ab c"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        extra(writer)
        for hf_name, values in (tensors or hf_tensors(architecture, len(vocabulary))).items():
            target, stored = to_gguf(hf_name, values, architecture)
            if quantization == gguf.GGMLQuantizationType.F32 or values.ndim == 1:
                writer.add_tensor(target, np.ascontiguousarray(stored))
            else:
                packed = gguf.quants.quantize(np.ascontiguousarray(stored), quantization)
                writer.add_tensor(target, packed, raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def tensors_of() -> Callable[[str, int], Tensors]:
    """The Hugging Face tensors that :func:`write_gguf` stores by default."""
    return hf_tensors
