"""An exponential race among the tokens of a row, as a numba kernel: the argmax of ``logit - T × ln(E)`` over tokens.

``E`` is an exponential number that a hash of the token's id gives it (see :mod:`headrace.engine.random`, which also has
the hash and the logarithm in torch). The logarithms are taken of few tokens: a chunk's highest logit says which hashes
could win there at all, and one vectorised pass over the hashes says whether any is among them.
"""
# ruff: noqa: ARG001  # an intrinsic's parameters are its signature inside kernels; its Python body sees only their types

import math
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir

from headrace.nn.ops.kernels import STAMP, carray, compile_kernel
from headrace.nn.ops.team import Kernel
from headrace.nn.ops.vector import (
    Codegen,
    elements_at,
    exp,
    float32_at,
    int32_at,
    intrinsic,
    larger,
    take_items,
    types,
    widen,
)

DTYPES = (torch.float32, torch.bfloat16)
_CHUNK = 64
_ALL_BITS = 2.0**32 - 1
_LOWEST_LOG = -23.0
"""Below the logarithm of the smallest exponential number, that of bits 0."""
_MARGIN = 1 + 1e-5
"""What the fast exponential may be wrong by, many times over."""
_I32 = ir.IntType(32)

# numba types only some of itself.
_numba: Any = numba


@intrinsic
def token_bits(typingctx: Any, token_id: Any, key0: Any, key1: Any) -> tuple[Any, Codegen]:
    """The 32-bit hash of a token's id under its row's two words."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        def const(value: int) -> Any:
            return ir.Constant(_I32, value)

        def mix(x: Any) -> Any:
            x = builder.mul(builder.xor(x, builder.lshr(x, const(16))), const(0x85EBCA6B))
            x = builder.mul(builder.xor(x, builder.lshr(x, const(13))), const(0xC2B2AE35))
            return builder.xor(x, builder.lshr(x, const(16)))

        spread = builder.mul(builder.trunc(args[0], _I32), const(0x9E3779B9))
        return mix(builder.xor(mix(builder.xor(spread, args[1])), args[2]))

    return types.uint32(types.int64, types.uint32, types.uint32), codegen


@intrinsic
def lower(typingctx: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """The lower of two words, in a form that a loop over it becomes vectors."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned("<", args[0], args[1]), args[0], args[1])

    return types.uint32(types.uint32, types.uint32), codegen


@_numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]  # numba is untyped
def _log_exponential(bits: Any) -> Any:
    """ln of the exponential number ``-ln(1 - u)`` at ``u = (bits + ½) / 2^32``."""
    return math.log(-math.log1p(-(np.float64(bits) + 0.5) * 2.0**-32))


@_numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]  # numba is untyped
def _limit(gap: Any, temperature: Any) -> Any:
    """Which bits at most let a token reach the best score, ``gap`` being its logit less that score; -1: none does.

    It takes ``ln E <= gap / T``, and ``u`` is less than ``E``.
    """
    if gap >= 0:
        return np.int64(_ALL_BITS)
    exponent = gap / temperature
    if exponent < _LOWEST_LOG:
        return np.int64(-1)
    return np.int64(min(np.float64(exp(np.float32(exponent))) * _MARGIN * 2.0**32 + 1.0, _ALL_BITS))


@cache
def make_race(num_bits: int, stamp: int = STAMP) -> Kernel:
    """The winner of each row, or -1 where its highest logit is not a finite number. Items are rows.

    Words: logits, temperatures, keys ``[num_rows, 2]``, floors, last ids, winners, vocabulary. A token may win if its
    logit is above its row's floor, or equals it and the id is not above the row's last. Of equal scores the lowest id
    wins, so temperature 0 gives the first arg max.
    """

    def race(words: Any) -> None:
        _ = stamp
        args = carray(words, (9,))
        num_rows, vocab = args[1], args[8]
        logits = carray(elements_at(args[2], num_bits), (num_rows, vocab))
        temperatures, floors = carray(float32_at(args[3]), (num_rows,)), carray(float32_at(args[5]), (num_rows,))
        keys, last_ids = carray(int32_at(args[4]), (num_rows, 2)), carray(int32_at(args[6]), (num_rows,))
        winners = carray(int32_at(args[7]), (num_rows,))
        num_chunks = (vocab + _CHUNK - 1) // _CHUNK
        peaks = np.zeros(num_chunks, np.float32)
        while True:
            i = take_items(words, 1)
            if i >= num_rows:
                break
            row = logits[i]
            num_nan = 0
            top = 0
            for c in range(num_chunks):
                part = row[c * _CHUNK : min((c + 1) * _CHUNK, vocab)]
                peak = np.float32(-np.inf)
                for j in range(len(part)):
                    x = widen(part[j])
                    num_nan += x != x  # true of NaN only, and a loop over it becomes vectors
                    peak = larger(peak, x)
                peaks[c] = peak
                if peak > peaks[top]:
                    top = c
            if num_nan or not np.isfinite(peaks[top]):
                winners[i] = -1
                continue
            temperature, floor, last_id = np.float64(temperatures[i]), floors[i], last_ids[i]
            key0, key1 = np.uint32(keys[i, 0]), np.uint32(keys[i, 1])
            # The likeliest token's score is a bar that few others reach.
            winner = top * _CHUNK
            while widen(row[winner]) != peaks[top]:
                winner += 1
            best = np.float64(peaks[top]) - temperature * _log_exponential(token_bits(winner, key0, key1))
            for c in range(num_chunks):
                if peaks[c] < floor:
                    continue
                limit = _limit(np.float64(peaks[c]) - best, temperature)
                if limit < 0:
                    continue
                start, stop = c * _CHUNK, min((c + 1) * _CHUNK, vocab)
                lowest = np.uint32(0xFFFFFFFF)
                for j in range(start, stop):
                    lowest = lower(lowest, token_bits(j, key0, key1))
                if lowest > limit:
                    continue
                for j in range(start, stop):
                    x = widen(row[j])
                    bits = token_bits(j, key0, key1)
                    if bits > limit or x < floor or (x == floor and j > last_id):
                        continue
                    score = np.float64(x) - temperature * _log_exponential(bits)
                    if score > best or (score == best and j < winner):
                        best, winner = score, j
            winners[i] = winner

    return compile_kernel(race)


def prepare() -> None:
    """Compile the kernel for all of :data:`DTYPES` now rather than in the first step that draws."""
    for dtype in DTYPES:
        make_race(8 * dtype.itemsize)


def race(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, floor: torch.Tensor, last_id: torch.Tensor
) -> torch.Tensor:
    """The winner of each row ``[num_rows] int64``, -1 where a row's highest logit is not a finite number.

    On the CPU: ``logits [num_rows, vocab]`` of :data:`DTYPES`; ``temperature``, ``floor`` ``[num_rows] float32``;
    ``keys [num_rows, 2] int32`` (unsigned words as they lie in memory); ``last_id [num_rows] int32``.
    """
    num_rows, vocab = logits.shape
    tensors = [tensor.contiguous() for tensor in (logits, temperature, keys, floor, last_id)]
    winners = torch.empty(num_rows, dtype=torch.int32)
    pointers = [tensor.data_ptr() for tensor in (*tensors, winners)]
    make_race(8 * logits.dtype.itemsize).run(num_rows, (*pointers, vocab))
    return winners.long()
