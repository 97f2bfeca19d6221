import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from headrace.core.errors import ModelFormatError
from headrace.core.safetensors_header import MAX_HEADER_BYTES, parse_header, read_header

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWO = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def raw(table: object) -> bytes:
    return json.dumps(table).encode()


def test_a_file_that_the_reference_writes_is_read(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.int64), "empty": np.zeros((0, 4), np.float32)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(tensors, {"format": "np"}))
    header = read_header(path)
    assert header.metadata == {"format": "np"}
    assert {name: (entry.dtype, entry.shape, entry.num_bytes) for name, entry in header.tensors.items()} == {
        "a": ("F16", (2, 3), 12),
        "b": ("I64", (), 8),
        "empty": ("F32", (0, 4), 0),
    }
    assert max(entry.end for entry in header.tensors.values()) == path.stat().st_size


HOSTILE = {
    "not JSON": (b"{", 0, "not valid JSON"),
    "not UTF-8": (b"\xff", 0, "not valid JSON"),
    "nested": (b"[" * 100_000, 0, "not valid JSON"),
    "a list": (b"[]", 0, "must be a JSON object"),
    "NaN": (b'{"a": NaN}', 0, "contains NaN"),
    "a name twice": (b'{"a": 1, "a": 2}', 0, "names 'a' twice"),
    "a key twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', 0, "names 'dtype' twice"),
    "metadata that is no text": (raw({"__metadata__": {"a": 1}}), 0, "__metadata__"),
    "a missing field": (raw({"a": {"dtype": "F32", "shape": [2]}}), 8, "exactly dtype, shape and data_offsets"),
    "an unknown field": (raw({"a": {**ONE, "x": 1}}), 8, "exactly"),
    "an unknown dtype": (raw({"a": {**ONE, "dtype": "F3"}}), 8, "unknown dtype 'F3'"),
    "a negative size": (raw({"a": {**ONE, "shape": [-2]}}), 8, r"shape \[-2\]"),
    "a size that is no integer": (raw({"a": {**ONE, "shape": [2.0]}}), 8, "shape"),
    "a size that is a boolean": (raw({"a": {**ONE, "shape": [True, 2]}}), 8, "shape"),
    "too many dimensions": (raw({"a": {**ONE, "shape": [1] * 9}}), 8, "at most 8 sizes"),
    "offsets backwards": (raw({"a": {**ONE, "data_offsets": [8, 0]}}), 8, "data_offsets"),
    "bytes that do not fit the shape": (raw({"a": {**ONE, "shape": [3]}}), 8, "needs 12"),
    "an overlap": (raw({"a": ONE, "b": {**TWO, "data_offsets": [4, 12]}}), 12, "overlaps"),
    "a hole": (raw({"a": ONE, "b": {**TWO, "data_offsets": [12, 20]}}), 20, "leaves a hole"),
    "a late start": (raw({"a": TWO}), 16, "8 bytes into the data"),
    "data beyond the end": (raw({"a": ONE, "b": TWO}), 8, "the file ends"),
    "data left over": (raw({"a": ONE}), 16, "the file ends"),
    "too many tensors": (raw({str(number): 0 for number in range(100_001)}), 0, "at most 100000"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_with_the_reason(case: str) -> None:
    data, data_bytes, reason = HOSTILE[case]
    with pytest.raises(ModelFormatError, match=reason):
        parse_header(data, data_bytes=data_bytes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        ((2**63).to_bytes(8, "little"), f"at most {MAX_HEADER_BYTES}"),
        ((100).to_bytes(8, "little") + b"{}", "truncated"),
    ],
)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=rf"bad\.safetensors: .*{reason}"):
        read_header(path)


@given(position=st.integers(0, 150), patch=st.binary(min_size=1, max_size=6))
def test_a_damaged_header_is_read_whole_or_refused(position: int, patch: bytes) -> None:
    good = raw({"__metadata__": {"k": "v"}, "a": ONE, "b": TWO})
    damaged = good[:position] + patch + good[position + len(patch) :]
    try:
        header = parse_header(damaged, data_bytes=16)
    except ModelFormatError:
        return
    assert sum(entry.num_bytes for entry in header.tensors.values()) == 16
