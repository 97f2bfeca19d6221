"""Matrix products with packed weights, for CPUs with AVX-512 BF16: near the peak at any number of rows.

Weights are cut into panels of :data:`PANEL` output features; inside one, the pairs of inputs that one instruction
multiplies and adds lie beside each other, feature by feature::

    weights [num_panels, in_features / pair, PANEL, pair]

A micro-kernel keeps ``8 rows × 48 features`` of sums in 24 of the 32 vector registers while it walks down one panel: a
load feeds eight instructions, and each panel streams from memory once, in order, however few the rows. What follows
the product (bias, residual, the gated activation) happens on the tile before it leaves the core. A row's result does
not depend on the other rows, so neither do tokens on the batch.
"""

from functools import cache
from typing import Any

import numpy as np
import torch

from headrace.nn import memory
from headrace.nn.ops.kernels import STAMP, carray, compile_kernel
from headrace.nn.ops.team import Kernel
from headrace.nn.ops.vector import LANES, elements_at, exp, multiply_panel, narrow, take_items, widen

VECTORS = 3
"""Vectors of features in a panel."""

PANEL = VECTORS * LANES
"""Features in a panel."""

_ROWS = 8
"""Rows of a tile: with 3 vectors 24 sums, which leaves room for a row of weights."""

_CHUNK_ROWS = 256
"""Rows that share a walk over the weights: their activations stay in a core's L2 cache beside a panel."""

_PLAIN, _ADD, _GATE = range(3)


class PanelLinear:
    """``x @ weight.T + bias`` with ``weight [out_features, in_features]``; an even number of inputs for bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weights = _pack(weight)
        self._bias = bias
        self._shape = weight.shape
        self._plain, self._add = (make_product(8 * weight.dtype.itemsize, after) for after in (_PLAIN, _ADD))

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self._weights, self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape[0], self._shape[0], dtype=x.dtype)
        _run(self._plain, x, self._weights, self._bias, output)
        return output

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        _run(self._add, x, self._weights, self._bias, residual)


class GatedPanels:
    """``SiLU(x @ gate.T) × (x @ up.T)`` of ``weight``, gate above up; each panel holds half of either."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        half = PANEL // 2
        halves = [_padded(part, half).view(-1, half, part.shape[1]) for part in weight.chunk(2)]
        self._weights = _pack(torch.cat(halves, dim=1).flatten(0, 1))
        self._bias = bias
        self._size = weight.shape[0] // 2
        self._kernel = make_product(8 * weight.dtype.itemsize, _GATE)

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self._weights, self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape[0], self._size, dtype=x.dtype)
        _run(self._kernel, x, self._weights, self._bias, output)
        return output


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    rows = -weight.shape[0] % multiple
    return torch.nn.functional.pad(weight, (0, 0, 0, rows)) if rows else weight


def _pack(weight: torch.Tensor) -> torch.Tensor:
    pair = 4 // weight.dtype.itemsize
    panels = _padded(weight, PANEL).view(-1, PANEL, weight.shape[1] // pair, pair).transpose(1, 2)
    packed = memory.zeros(panels.shape, weight.dtype, weight.device)
    packed.copy_(panels)
    return packed


def _num_bytes(weights: torch.Tensor, bias: torch.Tensor | None) -> int:
    return weights.nbytes + (0 if bias is None else bias.nbytes)


def _run(
    kernel: Kernel, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor
) -> None:
    num_rows, num_inputs = x.shape
    bias_words = (0, 0) if bias is None else (bias.data_ptr(), bias.shape[0])
    kernel.run(
        weights.shape[0] * -(-num_rows // _CHUNK_ROWS),
        (
            x.data_ptr(),
            weights.data_ptr(),
            *bias_words,
            output.data_ptr(),
            num_rows,
            num_inputs,
            output.shape[1],
            weights.shape[0],
        ),
    )


@cache
def make_product(num_bits: int, after: int, stamp: int = STAMP) -> Kernel:
    """output = x × weights + bias, then what ``after`` says. Items are panels × chunks of rows.

    Words: x, weights, bias, its length (0: none), output, rows, inputs, output's row size, panels.
    """
    pair = 32 // num_bits
    rows, vectors, panel, chunk_rows = _ROWS, VECTORS, PANEL, _CHUNK_ROWS
    half, quarter, eighth = rows // 2, rows // 4, rows // 8
    # Outputs of a panel: a gate and its other factor become one.
    width = panel // 2 if after == _GATE else panel

    def product(words: Any) -> None:
        _ = stamp
        args = carray(words, (11,))
        num_items, num_rows, num_inputs, size, num_panels = args[1], args[7], args[8], args[9], args[10]
        x = carray(elements_at(args[2], num_bits), (num_rows * num_inputs,))
        weights = carray(elements_at(args[3], num_bits), (num_panels * panel * num_inputs,))
        bias = carray(elements_at(args[4], num_bits), (args[5],))
        output = carray(elements_at(args[6], num_bits), (num_rows, size))
        # Tiles start at whole cache lines.
        memory = np.zeros(rows * panel + LANES, np.float32)
        tile = memory[-(memory.ctypes.data // 4) % LANES :]
        while True:
            item = take_items(words, 1)
            if item >= num_items:
                break
            index, i = item % num_panels, item // num_panels * chunk_rows
            end = min(i + chunk_rows, num_rows)
            at, steps, first = index * panel * num_inputs, num_inputs // pair, index * width
            count = min(width, size - first)
            while i < end:
                x_at, left = i * num_inputs, end - i
                if left >= rows:
                    multiply_panel(x, x_at, num_inputs, weights, at, steps, tile, rows, vectors)
                    here = rows
                elif left >= half:
                    multiply_panel(x, x_at, num_inputs, weights, at, steps, tile, half, vectors)
                    here = half
                elif left >= quarter:
                    multiply_panel(x, x_at, num_inputs, weights, at, steps, tile, quarter, vectors)
                    here = quarter
                else:
                    multiply_panel(x, x_at, num_inputs, weights, at, steps, tile, eighth, vectors)
                    here = eighth
                for r in range(here):
                    out = output[i + r, first : first + count]
                    sums = tile[r * panel : (r + 1) * panel]
                    if len(bias):
                        for j in range(count):
                            sums[j] += widen(bias[first + j])
                        if after == _GATE:
                            for j in range(count):
                                sums[width + j] += widen(bias[size + first + j])
                    if after == _PLAIN:
                        for j in range(count):
                            out[j] = narrow(out, sums[j])
                    elif after == _ADD:
                        for j in range(count):
                            out[j] = narrow(out, widen(out[j]) + sums[j])
                    else:
                        for j in range(count):
                            gate = sums[j]
                            out[j] = narrow(out, gate / (np.float32(1) + exp(-gate)) * sums[width + j])
                i += here

    return compile_kernel(product)
