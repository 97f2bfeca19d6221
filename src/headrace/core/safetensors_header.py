"""The header of a safetensors file, read within our own bounds before anything believes it.

A file is an 8-byte little-endian header length, a JSON header, then the tensors' bytes::

    | length: u64 | {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {…}} | data … |
                                                                                                    ^ data_start

Offsets in the header count from ``data_start``. The reference is the format's own description
(huggingface/safetensors, README, "Format"); the limits here are tighter.
"""

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelFormatError

MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_TENSORS = 100_000
MAX_RANK = 8

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. ``start`` and ``end`` are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a file says about itself, checked."""

    tensors: dict[str, TensorEntry]
    """By name, in the order of the file's header."""
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of the safetensors file at ``path``; tensor data is not read.

    Checked are: the header's length (at most ``MAX_HEADER_BYTES``), the number of tensors, duplicate names, dtypes,
    shapes against byte counts, and that the tensors cover the data exactly, without overlap or holes.

    Raises:
        ModelFormatError: naming the file and what is wrong with it.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelFormatError(f"{path.name}: {file_bytes} bytes are too few for a safetensors file")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelFormatError(
                f"{path.name}: the safetensors header claims {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        if 8 + header_bytes > file_bytes:
            raise ModelFormatError(
                f"{path.name}: truncated: the header needs {8 + header_bytes} bytes, the file has {file_bytes}"
            )
        raw = file.read(header_bytes)
    try:
        return parse_header(raw, data_bytes=file_bytes - 8 - header_bytes)
    except ModelFormatError as error:
        raise ModelFormatError(f"{path.name}: {error.message}") from error


def parse_header(raw: bytes, *, data_bytes: int) -> SafetensorsHeader:
    """Check the JSON header ``raw`` of a file with ``data_bytes`` bytes of tensor data behind it.

    Raises:
        ModelFormatError: as for :func:`read_header`.
    """
    table = _parse_json(raw)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFormatError("__metadata__ must map strings to strings")
    if len(table) > MAX_TENSORS:
        raise ModelFormatError(f"{len(table)} tensors; at most {MAX_TENSORS} are read")
    data_start = 8 + len(raw)
    tensors = {name: _entry(name, value, data_start) for name, value in table.items()}
    _check_cover(tensors, data_start, data_start + data_bytes)
    return SafetensorsHeader(tensors, metadata, data_start)


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        table = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"the safetensors header is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ModelFormatError("the safetensors header must be a JSON object")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ModelFormatError(f"the safetensors header names {name!r} twice")
        table[name] = value
    return table


def _refuse_constant(name: str) -> float:
    raise ModelFormatError(f"the safetensors header contains {name}")


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFormatError(f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelFormatError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise ModelFormatError(f"tensor {name!r} has the shape {shape!r}; at most {MAX_RANK} sizes of 0 or more")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFormatError(f"tensor {name!r} has the data_offsets {offsets!r}; [begin, end] was expected")
    num_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelFormatError(
            f"tensor {name!r} takes {offsets[1] - offsets[0]} bytes; {dtype} of shape {shape} needs {num_bytes}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _counts(values: object) -> bool:
    # bool is an int to Python, but not a size.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_cover(tensors: dict[str, TensorEntry], start: int, end: int) -> None:
    ordered = sorted(tensors.values(), key=lambda entry: (entry.start, entry.end))
    for before, after in itertools.pairwise(ordered):
        if after.start != before.end:
            what = "overlaps" if after.start < before.end else "leaves a hole after"
            raise ModelFormatError(f"tensor {after.name!r} {what} {before.name!r}")
    first, last = (ordered[0].start, ordered[-1].end) if ordered else (start, start)
    if first != start:
        raise ModelFormatError(f"the first tensor starts {first - start} bytes into the data")
    if last != end:
        raise ModelFormatError(f"the tensors end at byte {last}; the file ends at byte {end}")
