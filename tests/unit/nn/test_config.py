"""Configurations are read as published, and what cannot be served is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import ModelFormatError
from headrace.nn.config import ModelConfig
from headrace.nn.rope import Rotary, inverse_frequencies
from headrace.nn.rope_config import RopeConfig, RopeKind

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}


def test_defaults_of_a_bare_llama() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.max_position_embeddings) == (16, 2, 2048)
    assert config.rope == RopeConfig()
    assert config.sliding_windows == (None,) * 4
    assert not config.tie_embeddings


def test_end_of_sequence_ids_come_from_the_generation_configuration_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2, "bos_token_id": 1}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    config = ModelConfig.from_dir(tmp_path)
    assert config.eos_token_ids == (7, 9)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 4),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
            | {"max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
            | {"layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 8, None, 8),
        ),
        ({"sliding_window": 8}, (None,) * 4),
    ],
)
def test_sliding_windows_by_layer(extra: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert ModelConfig.from_dict({**LLAMA, **extra}).sliding_windows == windows


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_both_spellings_of_rotary_settings(key: str, type_key: str) -> None:
    scaling: dict[str, Any] = {type_key: "linear", "factor": 2.0}
    raw = {**LLAMA, key: scaling}
    (raw if key == "rope_scaling" else scaling)["rope_theta"] = 5000.0
    assert ModelConfig.from_dict(raw).rope == RopeConfig(kind=RopeKind.LINEAR, theta=5000.0, factor=2.0)


def test_yarn_tempers_attention_as_its_paper_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope = ModelConfig.from_dict({**LLAMA, "rope_scaling": yarn}).rope
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    explicit = ModelConfig.from_dict({**LLAMA, "rope_scaling": {**yarn, "attention_factor": 1.5}}).rope
    cos, _ = Rotary(explicit, 16, torch.device("cpu")).at(torch.zeros(1, dtype=torch.int32))
    assert torch.equal(cos, torch.full((1, 8), 1.5))


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones() -> None:
    config = RopeConfig(kind=RopeKind.YARN, factor=4.0, original_max_position_embeddings=2048)
    ratio = inverse_frequencies(RopeConfig(), 128) / inverse_frequencies(config, 128)
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert bool((ratio.diff() > -1e-5).all())


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architecture"),
        ({"architectures": "LlamaForCausalLM"}, "architecture"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 2**31}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["a"]}, "layer_types"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    raw = {key: value for key, value in {**LLAMA, **extra}.items() if value is not None}
    with pytest.raises(ModelFormatError, match=named):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a":' * 5000, b" " * (1 << 21)])
def test_a_damaged_file_is_a_format_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_a_missing_file_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
