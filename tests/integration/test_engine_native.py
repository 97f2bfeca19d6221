"""The whole engine on a tiny random Llama: from a directory to tokens, alone, batched, preempted, resumed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.core.errors import ConfigError
from headrace.core.ids import SequenceId, TenantId, VersionId
from headrace.core.requests import FinishReason, GenerationRequest, SamplingParams, StopConditions
from headrace.engine.build import build, build_core
from headrace.engine.config import EngineConfig
from headrace.nn.config import ModelConfig
from headrace.nn.loading import expected_tensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
PROMPTS = [[7, 8, 9], list(range(3, 120)), [5], [*list(range(3, 90)), 400, 401], [300] * 33]
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=5),
    "filtered": SamplingParams(temperature=0.9, seed=6, top_k=50, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.5),
}


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """Engines here run on one thread, as their tensors are tiny; others find the setting as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.15
        for name, shape in expected_tensors(ModelConfig.from_dict(CONFIG)).items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def requests(sampling: SamplingParams, num_tokens: int = 16) -> list[GenerationRequest]:
    return [
        GenerationRequest(SequenceId(f"s/{i}"), TenantId("t"), prompt, StopConditions(num_tokens), sampling)
        for i, prompt in enumerate(PROMPTS)
    ]


def generate(core, batch: list[GenerationRequest]) -> list[list[int]]:
    tokens: dict[str, list[int]] = {request.sequence_id: [] for request in batch}
    for request in batch:
        core.add(request)
    while core.has_news:
        for delta in core.step().deltas:
            tokens[delta.sequence_id] += delta.token_ids
    core.audit()
    return list(tokens.values())


def core_of(directory: Path, **config: object):
    settings = {
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_bytes": 64 * BLOCK_BYTES,
        **config,
    }
    return build_core(directory, EngineConfig(**settings)).core


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, list[list[int]]]:
    """Each prompt by itself, without a prefix cache."""
    core = core_of(directory, prefix_cache=False, max_num_batched_tokens=256)
    return {
        name: [generate(core, [request])[0] for request in requests(sampling)] for name, sampling in SAMPLING.items()
    }


def test_greedy_is_what_transformers_says(directory: Path, alone: dict[str, list[list[int]]]):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    missing, unexpected = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    for prompt, tokens in zip(PROMPTS, alone["greedy"], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == tokens


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 11}, {"max_num_seqs": 2}, {"kv_cache_bytes": 16 * BLOCK_BYTES, "block_size": 16}],
    ids=["batched", "small chunks", "two at a time", "few blocks"],
)
def test_the_arrangement_does_not_change_tokens(directory: Path, alone, config, name):
    core = core_of(directory, **config)
    assert generate(core, requests(SAMPLING[name])) == alone[name]
    assert generate(core, requests(SAMPLING[name])) == alone[name], "with prefix hits"


@pytest.mark.parametrize("name", SAMPLING)
def test_a_resumed_generation_goes_on(directory: Path, alone, name):
    core = core_of(directory)
    resumed = [
        GenerationRequest(
            request.sequence_id,
            request.tenant_id,
            request.prompt + tokens[:6],
            StopConditions(10),
            request.sampling,
            num_resumed_tokens=6,
        )
        for request, tokens in zip(requests(SAMPLING[name]), alone[name], strict=True)
    ]
    assert generate(core, resumed) == [tokens[6:] for tokens in alone[name]]


async def test_an_engine_built_from_a_directory_serves(directory: Path, alone):
    stages = []
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, kv_cache_bytes=64 * BLOCK_BYTES, num_threads=1)
    engine = await asyncio.to_thread(
        build, directory, "tiny", VersionId("v1"), config, progress=lambda stage, done: stages.append((stage, done))
    )
    try:
        description = engine.describe()
        assert (description.max_model_len, description.vocab_size, description.dtype) == (256, 512, "float32")
        assert {stage for stage, _ in stages} == {"load", "warm up"}
        assert stages[-1] == ("warm up", 1.0)
        assert engine.load().prefill_tokens_per_s > 0, "measured during warm-up"
        fresh = await engine.stats()
        assert (fresh.step, fresh.num_generated_tokens, fresh.num_finished) == (0, 0, {})
        assert fresh.memory["measured_weights"] <= fresh.memory["planned_weights"]
        assert fresh.memory["measured_kv"] == fresh.memory["planned_kv"]
        tokens: dict[str, list[int]] = {}
        finished = set()
        for request in requests(SAMPLING["seeded"]):
            engine.submit(request)
        async with asyncio.timeout(60):
            async for frame in engine.frames():
                for delta in frame.deltas:
                    tokens.setdefault(delta.sequence_id, []).extend(delta.token_ids)
                    if delta.finish is not None:
                        assert delta.finish is FinishReason.LENGTH
                        finished.add(delta.sequence_id)
                if len(finished) == len(PROMPTS):
                    break
        assert [tokens[f"s/{i}"] for i in range(len(PROMPTS))] == alone["seeded"]
    finally:
        await engine.close()


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:x"])
def test_an_unknown_device_is_refused(directory: Path, device: str):
    with pytest.raises(ConfigError, match=r"engine\.device is"):
        build_core(directory, EngineConfig(device=device))
