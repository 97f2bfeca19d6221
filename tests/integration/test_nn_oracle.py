"""Every family against `transformers`, in float32: logits close, and greedy tokens equal in every arrangement."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from headrace.nn.batch import StepBatch
from headrace.nn.kv import KVCache
from headrace.nn.loading import load_model
from headrace.nn.model import CausalLM

CPU = torch.device("cpu")
BLOCK_SIZE = 16
VOCAB = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**{**SHAPE, "tie_word_embeddings": True}),
    "llama-biased": LlamaConfig(**{**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": LlamaConfig(**{**SHAPE, "rope_parameters": LLAMA3}),
    "llama-linear": LlamaConfig(**{**SHAPE, "rope_parameters": LINEAR}),
    "llama-odd-heads": LlamaConfig(**{**SHAPE, "head_dim": 24, "num_attention_heads": 6, "hidden_size": 72}),
    "mistral": MistralConfig(**{**SHAPE, "sliding_window": None}),
    "mistral-window": MistralConfig(**{**SHAPE, "sliding_window": 11}),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-window": Qwen2Config(**{**SHAPE, **QWEN_WINDOW}),
    "qwen2-yarn": Qwen2Config(**{**SHAPE, "rope_parameters": YARN}),
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3-yarn-window": Qwen3Config(**{**SHAPE, **QWEN_WINDOW, "rope_parameters": {**YARN, "attention_factor": 1.3}}),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model as `transformers` runs it, and the directory it was saved to."""
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(MODELS[request.param], attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # they start as ones and zeros, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = tmp_path_factory.mktemp(request.param)
    oracle.save_pretrained(directory)
    return oracle, directory


class Sequences:
    """Sequences side by side in one cache, fed to the model in pieces."""

    def __init__(self, model: CausalLM, tokens: list[list[int]]) -> None:
        self.model = model
        self.tokens = tokens
        self.computed = [0] * len(tokens)
        self.max_blocks = 256 // BLOCK_SIZE
        order = np.random.default_rng(0).permutation(len(tokens) * self.max_blocks)
        self.table = order.reshape(len(tokens), self.max_blocks).astype(np.int32)
        self.kv = KVCache(model.config, len(tokens) * self.max_blocks, BLOCK_SIZE, model.dtype, CPU)

    def advance(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute the next ``counts[i]`` tokens of each sequence ``i`` in one step; logits of all of them."""
        rows = list(counts)
        positions = [np.arange(self.computed[i], self.computed[i] + counts[i]) for i in rows]
        slots = [
            self.table[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in zip(rows, positions, strict=True)
        ]
        for i in rows:
            self.computed[i] += counts[i]
        flat = np.concatenate(positions)
        batch = StepBatch(
            token_ids=np.concatenate([np.array(self.tokens[i])[p] for i, p in zip(rows, positions, strict=True)]),
            positions=flat.astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            query_start=np.cumsum([0, *counts.values()]).astype(np.int32),
            kv_lens=np.array([self.computed[i] for i in rows], np.int32),
            block_table=self.table[rows],
            logit_rows=np.arange(len(flat), dtype=np.int64),
        )
        logits = self.model.forward(batch, self.kv).clone()
        return dict(zip(rows, logits.split(list(counts.values())), strict=True))


def random_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, rng.integers(1, 70)).tolist() for _ in range(count)]


def oracle_greedy(oracle: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_logits_are_close_whole_and_in_chunks(pair: tuple[Any, Path]) -> None:
    oracle, directory = pair
    model = load_model(directory, torch.float32, CPU)
    prompts = random_prompts(4)
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt])).logits[0] for prompt in prompts]
    whole = Sequences(model, prompts).advance({i: len(prompt) for i, prompt in enumerate(prompts)})
    for i, logits in enumerate(expected):
        torch.testing.assert_close(whole[i], logits, rtol=1e-4, atol=1e-4)
    chunked, rng = Sequences(model, prompts), np.random.default_rng(3)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    while left := {i: len(p) - chunked.computed[i] for i, p in enumerate(prompts) if chunked.computed[i] < len(p)}:
        step = chunked.advance({i: int(rng.integers(1, min(n, 17) + 1)) for i, n in left.items()})
        for i, logits in step.items():
            pieces[i].append(logits)
    for i, logits in enumerate(expected):
        torch.testing.assert_close(torch.cat(pieces[i]), logits, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_equal_while_others_prefill(pair: tuple[Any, Path]) -> None:
    oracle, directory = pair
    model = load_model(directory, torch.float32, CPU)
    prompts = random_prompts(3)
    num_tokens = 8
    expected = [oracle_greedy(oracle, prompt, num_tokens) for prompt in prompts]
    running = Sequences(model, [list(prompt) for prompt in prompts])
    step = 0
    while any(len(running.tokens[i]) < len(prompt) + num_tokens for i, prompt in enumerate(prompts)):
        # Sequence i joins at step 2 i and prefills nine tokens at a time; the earlier ones decode meanwhile.
        counts = {
            i: min(9, len(running.tokens[i]) - running.computed[i])
            for i, prompt in enumerate(prompts)
            if 2 * i <= step and len(running.tokens[i]) < len(prompt) + num_tokens
        }
        for i, logits in (running.advance(counts) if counts else {}).items():
            if running.computed[i] == len(running.tokens[i]):
                running.tokens[i].append(int(logits[-1].argmax()))
        step += 1
    assert [running.tokens[i][len(prompt) :] for i, prompt in enumerate(prompts)] == expected


def test_bytes_are_as_computed_from_the_configuration(pair: tuple[Any, Path]) -> None:
    oracle, directory = pair
    model = load_model(directory, torch.float32, CPU)
    assert model.config.num_parameters() == sum(parameter.numel() for parameter in oracle.parameters())
    assert model.weight_bytes() == model.config.weight_bytes(torch.float32)
    kv = KVCache(model.config, 5, BLOCK_SIZE, torch.float32, CPU)
    assert kv.num_bytes == 5 * BLOCK_SIZE * model.config.kv_bytes_per_token(torch.float32)
