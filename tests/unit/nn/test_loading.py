"""A checkpoint that is not the model its configuration describes is refused by the tensor's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.core.errors import ModelFormatError
from headrace.nn.config import ModelConfig
from headrace.nn.loading import expected_tensors, load_model
from headrace.nn.ops.linear import Layout, layout_for

CPU = torch.device("cpu")
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
Tensors = dict[str, torch.Tensor]


def write_model(directory: Path, change: Callable[[Tensors], object] = lambda _: None) -> Path:
    (directory / "config.json").write_text(json.dumps(RAW))
    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(ModelConfig.from_dict(RAW)).items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(write_model(tmp_path), torch.float32, CPU, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_as_computed(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_model(write_model(tmp_path), dtype, CPU)
    layout = layout_for(dtype, CPU)
    computed = model.config.weight_bytes(dtype, head_copied=layout.is_copy, row_multiple=layout.row_multiple)
    # oneDNN may round a matrix up to whole tiles, and does not say how.
    assert computed <= model.weight_bytes() <= computed * (1.2 if layout is Layout.ONEDNN else 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is not part"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            r"model\.norm\.weight has shape \[65\], not \[64\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), r"model\.norm\.weight holds"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, change: Callable[[Tensors], object], named: str) -> None:
    with pytest.raises(ModelFormatError, match=named):
        load_model(write_model(tmp_path, change), torch.float32, CPU)


def test_what_old_converters_wrote_out_needlessly_is_ignored(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.ones(128, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    load_model(write_model(tmp_path, change), torch.float32, CPU)


def test_a_directory_without_weights_is_a_format_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        load_model(tmp_path, torch.float32, CPU)
