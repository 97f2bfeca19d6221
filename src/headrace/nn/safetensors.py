"""Reading safetensors files that nobody vouches for: every byte of the header is checked before it is used.

A file is eight bytes of header length (little endian), a JSON header ``{name: {dtype, shape, data_offsets}}``, and the
data that the offsets point into.
"""

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import ModelFormatError

MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``start`` and ``end`` count from the file's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file, mapped into memory; tensors are views of the mapping and must not outlive it."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header.

        Raises:
            ModelFormatError: the file cannot be read, or the header is too large, not valid, names a tensor twice, or
                describes tensors that overlap, leave gaps, or lie outside the file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = path.stat().st_size
                if self._size < 8:
                    raise ModelFormatError(f"{path}: {self._size} bytes are too few for a safetensors file")
                # A private mapping is writable without changing the file, which torch asks of buffers.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFormatError(f"{path}: cannot read: {error.strerror}") from error
        self.tensors = _read_header(self._map, self._size, path)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, without a copy."""
        info = self.tensors[name]
        count = math.prod(info.shape)
        if not count:
            return torch.empty(info.shape, dtype=info.dtype)
        if info.start % info.dtype.itemsize:
            # The format does not promise alignment; torch wants it.
            data = torch.frombuffer(bytearray(self._map[info.start : info.end]), dtype=info.dtype)
        else:
            data = torch.frombuffer(self._map, dtype=info.dtype, count=count, offset=info.start)
        return data.reshape(info.shape)


def _read_header(data: mmap.mmap, size: int, path: Path) -> dict[str, TensorInfo]:
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        limit = min(MAX_HEADER_BYTES, size - 8)
        raise ModelFormatError(f"{path}: the header claims {length} bytes; at most {limit} are possible")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: the header is not valid: {error}") from error
    if not isinstance(header, dict):
        raise ModelFormatError(f"{path}: the header must be a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{path}: {len(header)} tensors; at most {MAX_TENSORS} are allowed")
    tensors = {name: _tensor_info(name, entry, 8 + length, size, path) for name, entry in header.items()}
    end = 8 + length
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start != end:
            what = "overlaps the one before it" if info.start < end else "leaves a gap before it"
            raise ModelFormatError(f"{path}: tensor {info.name!r} {what}")
        end = info.end
    if end != size:
        raise ModelFormatError(f"{path}: {size - end} bytes after the last tensor belong to none")
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # `add` returns None on purpose here
        raise ValueError(f"{twice!r} occurs twice")
    return table


def _tensor_info(name: str, entry: Any, base: int, size: int, path: Path) -> TensorInfo:
    def refuse(reason: str) -> ModelFormatError:
        return ModelFormatError(f"{path}: tensor {name!r}: {reason}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("must have dtype, shape and data_offsets, and nothing else")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise refuse(f"dtype {entry['dtype']!r} is not supported")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise refuse(f"shape {shape!r} is not a list of at most {MAX_DIMENSIONS} whole numbers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise refuse(f"data_offsets {offsets!r} is not a pair of whole numbers")
    start, end = base + offsets[0], base + offsets[1]
    if not start <= end <= size:
        raise refuse(f"data_offsets {offsets!r} lie outside the file's {size - base} bytes of data")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise refuse(f"shape {shape!r} of {entry['dtype']} does not fill its {end - start} bytes")
    return TensorInfo(name, dtype, tuple(shape), start, end)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


class Checkpoint:
    """All tensors of a model directory, in one file or in shards listed by an index."""

    def __init__(self, directory: Path) -> None:
        """Open ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

        Raises:
            ModelFormatError: neither exists, a file is damaged, or index and shards do not agree.
        """
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.exists():
            self._files = [SafetensorsFile(single)]
        elif index.exists():
            self._files = list(_open_shards(index))
        else:
            raise ModelFormatError(f"{directory}: neither {single.name} nor {index.name} is there")
        self._where = {name: file for file in self._files for name in file.tensors}
        if len(self._where) != sum(len(file.tensors) for file in self._files):
            raise ModelFormatError(f"{directory}: a tensor occurs in more than one shard")

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """What there is, by name."""
        return {name: file.tensors[name] for name, file in self._where.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor without a copy; valid while the checkpoint is."""
        return self._where[name].read(name)


def _open_shards(index: Path) -> Iterator[SafetensorsFile]:
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise ModelFormatError(f"{index}: larger than {MAX_HEADER_BYTES} bytes")
        table = json.loads(index.read_bytes(), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ModelFormatError(f"{index}: cannot read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{index}: not valid: {error}") from error
    where = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise ModelFormatError(f"{index}: weight_map must be an object of file names")
    if len(where) > MAX_TENSORS:
        raise ModelFormatError(f"{index}: {len(where)} tensors; at most {MAX_TENSORS} are allowed")
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelFormatError(f"{index}: {shard!r} is not the name of a safetensors file beside the index")
        file = SafetensorsFile(index.parent / shard)
        listed = {name for name, holder in where.items() if holder == shard}
        if listed != set(file.tensors):
            name = min(listed ^ set(file.tensors))
            raise ModelFormatError(f"{index}: index and {shard} do not agree about tensor {name!r}")
        yield file
