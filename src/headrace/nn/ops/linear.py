"""Matrix products with weights that never change, laid out once for the kernel that will use them."""

from functools import cache

import torch
import torch.nn.functional as F

_PACKED_FOR_ROWS = 1
"""What the layout is chosen for. Measured on AVX-512 and AMX: one row is best or equal from 1 to 1,024 rows, while the
layouts for more rows fall back to a slow path at other row counts."""


@cache
def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's prepacked product exists here: bfloat16 on a CPU with bfloat16 instructions.

    The operators are private to torch, so they are tried, not assumed.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.eye(32, dtype=dtype)
        x = torch.arange(32, dtype=dtype)[None]
        return torch.equal(_product(x, _prepack(weight), None), x)
    except (AttributeError, RuntimeError):
        return False


class Linear:
    """``x @ weight.T + bias``; ``weight [out_features, in_features]`` is taken over, and repacked where that helps."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, prepack: bool | None = None) -> None:
        """``prepack`` None repacks where :func:`can_prepack`; the result is the same but for rounding."""
        self._bias = bias
        self._is_packed = can_prepack(weight.dtype, weight.device) if prepack is None else prepack
        self._weight = _prepack(weight) if self._is_packed else weight

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias as they are kept."""
        weight = torch.ops.mkldnn._nbytes(self._weight) if self._is_packed else self._weight.nbytes
        return int(weight) + (0 if self._bias is None else self._bias.nbytes)

    def shares_storage_with(self, tensor: torch.Tensor) -> bool:
        """Whether the weight is kept as ``tensor`` itself, not in a copy."""
        return not self._is_packed and self._weight.data_ptr() == tensor.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_features]`` to ``[num_rows, out_features]``; at least one row."""
        if self._is_packed:
            return _product(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _prepack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output
