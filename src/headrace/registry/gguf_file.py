"""A GGUF file's metadata and tensor table, read within bounds.

Every count and length in the file is checked against the bytes that are left before anything is allocated for it. The
layout (little-endian, versions 2 and 3; ggml, docs/gguf.md)::

    | "GGUF" | version u32 | num_tensors u64 | num_keys u64 | keys … | tensor table … | padding | data … |
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.core.errors import ModelFormatError

MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 64 * 1024

Scalar = int | float | bool | str
Array = list[str] | npt.NDArray[np.generic]
Value = Scalar | Array

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as everywhere else in Headrace; the file lists the innermost first."""
    quantization: int
    """ggml's type number."""
    offset: int
    """Bytes from the start of the data."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a GGUF file contains. ``data`` is a read-only map of the tensors' bytes."""

    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data: npt.NDArray[np.uint8]

    def text(self, key: str, default: str = "") -> str:
        """A string.

        Raises:
            ModelFormatError: the value is of another type.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelFormatError(f"GGUF metadata {key} is not a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer.

        Raises:
            ModelFormatError: there is none and no default, or the value is of another type.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFormatError(f"GGUF metadata {key} is {'missing' if value is None else 'not an integer'}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            ModelFormatError: there is none and no default, or the value is of another type.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFormatError(f"GGUF metadata {key} is {'missing' if value is None else 'not a finite number'}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean.

        Raises:
            ModelFormatError: the value is of another type.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"GGUF metadata {key} is not a boolean")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings, empty if there is none.

        Raises:
            ModelFormatError: the value is of another type.
        """
        value = self.metadata.get(key, [])
        if isinstance(value, np.ndarray) and value.size == 0:
            return []
        if not isinstance(value, list):
            raise ModelFormatError(f"GGUF metadata {key} is not an array of strings")
        return value

    def numbers(self, key: str) -> npt.NDArray[np.generic] | None:
        """An array of numbers, None if there is none.

        Raises:
            ModelFormatError: the value is of another type.
        """
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise ModelFormatError(f"GGUF metadata {key} is not an array of numbers")
        return value


def read(path: Path) -> GgufFile:
    """Parse the file at ``path``; tensor data is mapped, not read.

    Raises:
        ModelFormatError: naming the file and what is wrong with it.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise ModelFormatError(f"{path.name}: too short for a GGUF file")
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(_Cursor(view))
    except ModelFormatError as error:
        raise ModelFormatError(f"{path.name}: {error.message}") from error


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view = view
        self.position = 0

    def need(self, num_bytes: int, what: str) -> int:
        """Move over ``num_bytes`` and return where they start."""
        start = self.position
        if num_bytes > len(self.view) - start:
            raise ModelFormatError(f"truncated: {what} needs {num_bytes} bytes, {len(self.view) - start} are left")
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        (value,) = struct.unpack_from("<I", self.view, self.need(4, what))
        return int(value)

    def u64(self, what: str) -> int:
        (value,) = struct.unpack_from("<Q", self.view, self.need(8, what))
        return int(value)

    def text(self, what: str, limit: int | None = None) -> str:
        num_bytes = self.u64(what)
        if limit is not None and num_bytes > limit:
            raise ModelFormatError(f"{what} claims {num_bytes} bytes; at most {limit} are read")
        start = self.need(num_bytes, what)
        try:
            return self.view[start : start + num_bytes].decode()
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{what} is not UTF-8") from error


def _parse(cursor: _Cursor) -> GgufFile:
    if cursor.view[:4] != b"GGUF":
        raise ModelFormatError("not a GGUF file: it does not start with 'GGUF'")
    cursor.need(4, "the magic")
    version = cursor.u32("the version")
    if version not in (2, 3):
        raise ModelFormatError(f"GGUF version {version}; versions 2 and 3, little-endian, are read")
    num_tensors, num_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise ModelFormatError(
            f"{num_tensors} tensors and {num_keys} keys; at most {MAX_TENSORS} and {MAX_KEYS} are read"
        )
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise ModelFormatError(f"metadata {key} occurs twice")
        metadata[key] = _value(cursor, cursor.u32(key), key)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        tensor = _tensor(cursor)
        if tensor.name in tensors:
            raise ModelFormatError(f"tensor {tensor.name} occurs twice")
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
        raise ModelFormatError(f"general.alignment is {alignment!r}; 1 to {MAX_ALIGNMENT} was expected")
    start = min(-(-cursor.position // alignment) * alignment, len(cursor.view))
    return GgufFile(metadata, tensors, np.frombuffer(cursor.view, np.uint8)[start:])


def _value(cursor: _Cursor, kind: int, key: str) -> Value:
    if kind == _STRING:
        return cursor.text(key)
    if kind == _ARRAY:
        return _array(cursor, key)
    dtype = _dtype(kind, key)
    value = np.frombuffer(cursor.view, dtype, 1, cursor.need(dtype.itemsize, key))[0].item()
    return value if isinstance(value, int | float | bool) else str(value)


def _array(cursor: _Cursor, key: str) -> Array:
    kind, count = cursor.u32(key), cursor.u64(key)
    if kind == _ARRAY:
        raise ModelFormatError(f"metadata {key} is an array of arrays, which is not read")
    if kind == _STRING:
        # A string takes at least the 8 bytes of its length.
        if count > (len(cursor.view) - cursor.position) // 8:
            raise ModelFormatError(f"truncated: metadata {key} claims {count} strings")
        return [cursor.text(key) for _ in range(count)]
    dtype = _dtype(kind, key)
    start = cursor.need(count * dtype.itemsize, key)
    return np.frombuffer(cursor.view, dtype, count, start)


def _dtype(kind: int, key: str) -> np.dtype[np.generic]:
    if kind not in _SCALARS:
        raise ModelFormatError(f"metadata {key} has the unknown type {kind}")
    return np.dtype(_SCALARS[kind])


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.text("a tensor's name", MAX_NAME_BYTES)
    num_dimensions = cursor.u32(name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ModelFormatError(f"tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} were expected")
    shape = tuple(cursor.u64(name) for _ in range(num_dimensions))[::-1]
    if math.prod(shape) > 2**48 or 0 in shape:
        raise ModelFormatError(f"tensor {name} has the impossible shape {list(shape)}")
    return GgufTensor(name, shape, cursor.u32(name), cursor.u64(name))
