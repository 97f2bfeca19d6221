"""Matrix products with weights that never change, laid out once for the kernel that will use them."""

from enum import Enum
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.nn.ops import kernels, panels, vector

_PACKED_FOR_ROWS = 1
"""What oneDNN's layout is chosen for. Measured on AVX-512 and AMX: one row is best or equal from 1 to 1,024 rows, while
the layouts for more rows fall back to a slow path at other row counts."""


class Linear(Protocol):
    """``x @ weight.T + bias`` for ``weight [out_features, in_features]`` and any ``x [num_rows > 0, in_features]``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias as they are kept."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, ``[num_rows, out_features]``."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product to ``residual`` in place."""
        ...


class Gated(Protocol):
    """The first half of a gated MLP: ``SiLU(x @ gate.T) × (x @ up.T)``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and biases as they are kept."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_features]`` to ``[num_rows, intermediate]``."""
        ...


class Layout(Enum):
    """How weights of products are kept."""

    PLAIN = "plain"
    """As in the checkpoint; torch's product."""
    PANELS = "panels"
    """For our own kernels (:mod:`headrace.nn.ops.panels`)."""
    ONEDNN = "onednn"
    """For oneDNN's prepacked product, which uses AMX."""

    @property
    def is_copy(self) -> bool:
        """Whether nothing but the product can use weights in this layout."""
        return self is not Layout.PLAIN

    @property
    def row_multiple(self) -> int:
        """Output features are padded to a multiple of this."""
        return panels.PANEL if self is Layout.PANELS else 1


@cache
def layout_for(dtype: torch.dtype, device: torch.device) -> Layout:
    """The fastest layout that works here: bfloat16 on CPUs with instructions for it has one of its own."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return Layout.PLAIN
    if vector.has_amx():
        return Layout.ONEDNN if _has_onednn() else Layout.PLAIN
    return Layout.PANELS if vector.has_bfloat16_dot() else Layout.PLAIN


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, layout: Layout | None = None) -> Linear:
    """``weight`` is taken over, and repacked for ``layout``, by default what :func:`layout_for` says."""
    layout = layout or layout_for(weight.dtype, weight.device)
    if layout is Layout.PANELS and weight.shape[1] % 2 == 0:
        return panels.PanelLinear(weight, bias)
    return _TorchLinear(weight, bias, is_packed=layout is Layout.ONEDNN)


def make_gated(weight: torch.Tensor, bias: torch.Tensor | None = None, layout: Layout | None = None) -> Gated:
    """As :func:`make_linear`, for ``weight [2 × intermediate, in_features]`` with the gate's rows first."""
    layout = layout or layout_for(weight.dtype, weight.device)
    if layout is Layout.PANELS and weight.shape[1] % 2 == 0:
        return panels.GatedPanels(weight, bias)
    return _Gated(make_linear(weight, bias, layout))


class _TorchLinear:
    """torch's product, or with ``is_packed`` oneDNN's, which are the same but for rounding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_packed: bool) -> None:
        self._bias = bias
        self._is_packed = is_packed
        self._weight = _prepack(weight) if is_packed else weight

    @property
    def num_bytes(self) -> int:
        weight = torch.ops.mkldnn._nbytes(self._weight) if self._is_packed else self._weight.nbytes
        return int(weight) + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            return _prepacked_product(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual += self(x)


class _Gated:
    def __init__(self, gate_up: Linear) -> None:
        self._gate_up = gate_up

    @property
    def num_bytes(self) -> int:
        return self._gate_up.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return silu_mul(self._gate_up(x))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the left half times the right half: ``[num_rows, 2 × n]`` to ``[num_rows, n]``."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.device.type != "cpu" or gate_up.dtype not in kernels.DTYPES:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    output = gate_up.new_empty(num_rows, size)
    turn, alone = kernels.turn(num_rows, 4 * size)
    kernel = kernels.make_silu_mul(8 * gate_up.dtype.itemsize)
    kernel.run(num_rows, (gate_up.data_ptr(), output.data_ptr(), size, turn), alone=alone)
    return output


@cache
def _has_onednn() -> bool:
    """Whether oneDNN's prepacked product works here; its operators are private to torch, so they are tried."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.eye(32, dtype=torch.bfloat16)
        x = torch.arange(32, dtype=torch.bfloat16)[None]
        return torch.equal(_prepacked_product(x, _prepack(weight), None), x)
    except (AttributeError, RuntimeError):
        return False


def _prepack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _prepacked_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output
