"""Write bfloat16 tensors as a safetensors file, one at a time, without torch."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bit patterns of ``values`` as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Half of the last kept place, less one if that place is even: the carry does the rounding.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = 0x7FC0
    return result


def write_bfloat16(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, npt.NDArray[np.uint16]]]
) -> None:
    """Write the tensors named and shaped by ``shapes``; ``tensors`` yields their bit patterns in the same order.

    Raises:
        ValueError: ``tensors`` does not match ``shapes``.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        num_bytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for (name, shape), (given, values) in zip(shapes.items(), tensors, strict=True):
            if given != name or values.shape != shape:
                raise ValueError(f"expected {name} {shape}, got {given} {values.shape}")
            file.write(np.ascontiguousarray(values).data)
