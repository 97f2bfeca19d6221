import dataclasses

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.memory_plan import free_memory, plan_memory
from headrace.nn.config import ModelConfig

CPU = torch.device("cpu")
MODEL = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Keys and values, two layers, two heads, sixteen numbers of four bytes."""
ROOMY = 1 << 30


def plan(free_bytes=ROOMY, **config):
    return plan_memory(MODEL, EngineConfig(**config), torch.float32, CPU, free_bytes)


def test_the_cache_is_as_large_as_asked():
    got = plan(kv_cache_bytes=100 * 16 * TOKEN_BYTES + 7)
    assert (got.num_blocks, got.kv_bytes) == (100, 100 * 16 * TOKEN_BYTES)


def test_the_cache_is_never_larger_than_all_sequences_could_use():
    got = plan(max_num_seqs=2, max_model_len=129)
    assert got.num_blocks == 2 * 8, "the last token of a sequence takes no room"


def test_what_the_fraction_leaves_goes_to_the_cache():
    small = 60 << 20
    got = plan(small, memory_fraction=0.5)
    total = got.weight_bytes + got.activation_bytes + got.kv_bytes
    assert small * 0.5 - 16 * TOKEN_BYTES < total <= small * 0.5


def test_without_a_wish_sequences_are_as_long_as_the_cache_allows():
    assert plan().max_model_len == 2048
    assert plan(kv_cache_bytes=10 * 16 * TOKEN_BYTES).max_model_len == 161


def test_a_length_that_does_not_fit_is_refused_with_the_one_that_does():
    with pytest.raises(ConfigError, match=r"needs \d+ bytes .* available.* has 161 tokens"):
        plan(kv_cache_bytes=10 * 16 * TOKEN_BYTES, max_model_len=162)
    assert plan(kv_cache_bytes=10 * 16 * TOKEN_BYTES, max_model_len=161).max_model_len == 161


@pytest.mark.parametrize(
    "config",
    [{}, {"memory_fraction": 0.9}, {"kv_cache_bytes": 1}, {"kv_cache_bytes": 1 << 20}],
)
def test_a_model_without_room_is_refused(config):
    with pytest.raises(ConfigError, match=r"needs \d+ bytes .* bytes are available.*no sequence fits"):
        plan(1 << 20, **config)


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 4096; this model's context ends at 2048"):
        plan(max_model_len=4096)


def test_an_untied_model_needs_more():
    untied = dataclasses.replace(MODEL, tie_embeddings=False)
    config = EngineConfig()
    cuda = torch.device("cuda")
    tied_bytes = plan_memory(MODEL, config, torch.float32, cuda, ROOMY).weight_bytes
    untied_bytes = plan_memory(untied, config, torch.float32, cuda, ROOMY).weight_bytes
    assert untied_bytes - tied_bytes == 1000 * 64 * 4


def test_planned_stands_beside_measured():
    got = plan()
    table = got.compared(weight_bytes=5, kv_bytes=6)
    assert (table["planned_weights"], table["measured_weights"]) == (got.weight_bytes, 5)
    assert (table["planned_kv"], table["measured_kv"]) == (got.kv_bytes, 6)


def test_this_machine_has_free_memory():
    assert free_memory(CPU) > 1 << 20


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "at least max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes is 0"),
        ({"memory_fraction": 0.0}, "memory_fraction is 0.0"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s is 0.0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
    ],
)
def test_settings_out_of_range_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**config)
