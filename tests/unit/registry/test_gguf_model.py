import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.core.errors import ModelFormatError
from headrace.registry import gguf_file, gguf_model
from headrace.registry.importer import prepare
from headrace.registry.progress import silent
from headrace.registry.safetensors_writer import to_bfloat16

WriteGguf = Callable[..., Path]
VOCAB = 260


def converted(path: Path, tmp_path: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    scratch = tmp_path / "out"
    scratch.mkdir()
    prepared = prepare(str(path), scratch, silent)
    return json.loads(prepared.files["config.json"].read_bytes()), load_file(prepared.files["model.safetensors"])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_tensor_comes_back_under_its_own_name_and_in_its_own_order(
    write_gguf: WriteGguf, tensors_of: Callable[[str, int], dict[str, np.ndarray]], tmp_path: Path, architecture: str
) -> None:
    config, tensors = converted(write_gguf(architecture), tmp_path)
    expected = tensors_of(architecture, VOCAB)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name].float(), torch.from_numpy(values)), name
    assert config["model_type"] == architecture
    assert config["tie_word_embeddings"] is True
    assert config["attention_bias"] is (architecture == "qwen2")


def test_the_configuration_holds_what_the_file_says_as_its_author_wrote_it(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config, _ = converted(write_gguf("llama"), tmp_path)
    expected = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantized_tensors_are_what_the_reference_dequantizes(write_gguf: WriteGguf, tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    path = write_gguf("qwen2", quantization=quantization)
    _, tensors = converted(path, tmp_path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(2):
        reference = gguf.quants.dequantize(stored[f"blk.{layer}.ffn_up.weight"].data, quantization)
        expected = torch.from_numpy(np.array(reference, np.float32)).to(torch.bfloat16)
        assert torch.equal(tensors[f"model.layers.{layer}.mlp.up_proj.weight"], expected)


def test_an_output_matrix_of_its_own_is_not_tied(
    write_gguf: WriteGguf, tensors_of: Callable[[str, int], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    tensors = tensors_of("llama", VOCAB)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    config, converted_tensors = converted(write_gguf("llama", tensors=tensors), tmp_path)
    assert config["tie_word_embeddings"] is False
    assert torch.equal(converted_tensors["lm_head.weight"].float(), torch.from_numpy(tensors["lm_head.weight"]))


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_rope_scaling_is_recovered_from_its_divisors(
    write_gguf: WriteGguf, tmp_path: Path, factor: float, original: int
) -> None:
    head_dim, theta, low, high = 64, 500_000.0, 1.0, 4.0
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(head_dim)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))

    path = write_gguf("llama", extra=extra)
    file = gguf_file.read(path)
    file.metadata["llama.rope.freq_base"] = theta
    assert gguf_model.config(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def test_yarn_scaling_is_kept(write_gguf: WriteGguf, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    config, _ = converted(write_gguf("qwen2", extra=extra), tmp_path)
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_an_unknown_architecture_is_refused_with_those_that_are_known(write_gguf: WriteGguf, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        converted(write_gguf("mamba"), tmp_path)


def test_an_unknown_tensor_is_refused_by_name(write_gguf: WriteGguf, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32))

    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        converted(write_gguf(extra=extra), tmp_path)


def test_a_truncated_file_is_refused(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFormatError, match="truncated"):
        converted(path, tmp_path)


def test_rounding_to_bfloat16_is_what_torch_does() -> None:
    rng = np.random.default_rng(1)
    bits = np.concatenate(
        [
            rng.integers(0, 2**32, 100_000, dtype=np.uint32),
            np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1], np.uint32),
        ]
    )
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    actual = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    same = (actual.view(torch.int16) == expected.view(torch.int16)) | (actual.isnan() & expected.isnan())
    assert bool(same.all())
