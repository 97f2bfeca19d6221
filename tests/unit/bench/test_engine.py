"""The engine benchmark on a model that is tiny and random, but real from the file on disk to the tokens."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from headrace.bench import engine
from headrace.bench.engine import EngineOptions, EngineReport
from headrace.bench.workload import Workload, load
from headrace.core.errors import InvalidRequest
from headrace.engine.config import EngineConfig

HIDDEN, INNER, VOCAB, LAYERS, HEADS = 32, 48, 96, 2, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (HIDDEN,),
            f"{prefix}.post_attention_layernorm": (HIDDEN,),
            f"{prefix}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj": (head, HIDDEN),
            f"{prefix}.self_attn.v_proj": (head, HIDDEN),
            f"{prefix}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj": (HIDDEN, INNER),
        }
    save_file({f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    return directory


def options(model_dir: Path, **changes: object) -> EngineOptions:
    values: dict[str, object] = {
        "model_dir": model_dir,
        "workload": Workload(num_prompts=5, prompt_tokens=9, output_tokens=6, vocab_size=VOCAB),
        "num_rounds": 2,
        "dtype": "float32",
        "engine": EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, kv_cache_bytes=2**20),
    }
    return EngineOptions(**(values | changes))  # type: ignore[arg-type] # a table of settings


def test_a_run_reports_rates_of_every_round_and_writes_its_files(model_dir: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    json_path, workload_path = tmp_path / "r" / "report.json", tmp_path / "workload.json"
    report = engine.run(
        options(model_dir, json_path=json_path, workload_path=workload_path),
        lambda stage, done, total: seen.append((stage, done, total)),
    )
    assert len(report.times.rounds) == 2
    assert report.times.dtype == "float32"
    assert all(rate > 0 for rate in (report.rates.whole_tokens_per_s, report.rates.prefill_tokens_per_s))
    assert [entry for entry in seen if entry[0] == "measure"][-1] == ("measure", 12, 12)
    assert msgspec.json.decode(json_path.read_bytes(), type=EngineReport) == report
    assert len(load(workload_path).rounds) == 3
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(engine.render(report))
    assert "whole job" in capture.get()
    assert "5 prompts × 9 tokens in, 6 out" in capture.get()


@pytest.mark.parametrize(
    ("change", "match"),
    [({"num_rounds": 0}, "num_rounds is 0"), ({"workload": Workload(output_tokens=1)}, "needs at least")],
)
def test_a_run_without_a_figure_is_refused_before_the_model_is_loaded(
    tmp_path: Path, change: dict[str, object], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        engine.run(options(tmp_path / "no model here", **change))
