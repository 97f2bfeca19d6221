"""Weights files are read as the format says, and damaged ones are refused before anything is used."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from headrace.core.errors import ModelFormatError
from headrace.nn.safetensors import MAX_HEADER_BYTES, Checkpoint, SafetensorsFile

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def write(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_come_back_as_they_were_saved(tmp_path: Path) -> None:
    tensors = {
        "one": torch.randn(3, 5),
        "two": torch.randn(7).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "half": torch.randn(2, 2).half(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.infos) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.infos[name].shape == tuple(tensor.shape)


def test_data_need_not_be_aligned(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for padding in range(4):
        path = write(tmp_path / "x.safetensors", header + b" " * padding, b"\0\0\x80\x3f")
        assert SafetensorsFile(path).read("a").item() == 1.0


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "m-2.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("a"), torch.ones(2))
    assert torch.equal(checkpoint.read("b"), torch.zeros(3))


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "../m-1.safetensors"}, "not the name"),
        ({"a": "/m-1.safetensors"}, "not the name"),
        ({"a": "m-1.bin"}, "not the name"),
        ({"a": "m-3.safetensors"}, "cannot read"),
        ({"b": "m-1.safetensors"}, "do not agree"),
        ({}, "weight_map"),
        ({"a": 1}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: Any, named: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFormatError, match=named):
        Checkpoint(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {**GOOD["a"], **changes}}


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ([], "object"),
        (b"{", "not valid"),
        (b"\xff", "not valid"),
        (b"[" * 100_000, "not valid"),
        (b'{"a":1,"a":2}', "twice"),
        ({"a": 1}, "dtype, shape"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "dtype, shape"),
        (entry(extra=1), "nothing else"),
        (entry(dtype="F8"), "F8"),
        (entry(dtype=["F32"]), "dtype"),
        (entry(shape="2"), "shape"),
        (entry(shape=[-2]), "shape"),
        (entry(shape=[2.0]), "shape"),
        (entry(shape=[True, 2]), "shape"),
        (entry(shape=[1] * 9), "shape"),
        (entry(shape=[3]), "does not fill"),
        (entry(shape=[2**62, 2**62]), "does not fill"),
        (entry(data_offsets=[0]), "pair"),
        (entry(data_offsets=[8, 0]), "outside"),
        (entry(data_offsets=[0, 2**70]), "outside"),
        (entry(data_offsets=[4, 12]), "outside"),
        ({**GOOD, "b": GOOD["a"]}, "overlaps"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "gap"),
        ({}, "belong to none"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: Any, named: str) -> None:
    with pytest.raises(ModelFormatError, match=named):
        SafetensorsFile(write(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize("length", [2**64 - 1, MAX_HEADER_BYTES + 1, 100])
def test_a_header_longer_than_the_file_or_the_limit_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelFormatError, match="claims"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match="too few"):
        SafetensorsFile(path)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_any_damage_is_a_format_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    data = bytearray(save({"a": torch.ones(2, 3), "b": torch.zeros(4).half()}))
    data[at % len(data)] = value
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    path.write_bytes(data[: len(data) - cut % len(data)] if cut % 2 else data)
    try:
        file = SafetensorsFile(path)
    except ModelFormatError:
        return
    for name, info in file.tensors.items():
        assert tuple(file.read(name).shape) == info.shape
