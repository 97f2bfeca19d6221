"""The operations between products as kernels that numba compiles, for float32 and bfloat16 (as bits in ``uint16``).

A kernel is a C function over one array of 64-bit words (see :mod:`headrace.nn.ops.team`): a counter of items, their
number, and then what its docstring lists: addresses of contiguous tensors, and sizes. Factories fix what should be
constants in the machine code. Kernels compile on first use, in seconds, and are cached on disk: beside this file, or in
numba's per-user cache where that is not writable (``NUMBA_CACHE_DIR`` overrides).
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from headrace.nn.ops import vector
from headrace.nn.ops.team import Kernel
from headrace.nn.ops.vector import (
    add,
    elements_at,
    exp,
    float32_at,
    int32_at,
    larger,
    narrow,
    score_block,
    take_items,
    weigh_blocks,
    widen,
)

CHUNK_TOKENS = 256
"""Keys whose scores are held at once; a multiple of every block size that is served."""

DTYPES = (torch.float32, torch.bfloat16)
"""What kernels compute on."""

_TURN_ELEMENTS = 8192
"""Elements a thread takes at a time: a few microseconds of work, above what taking a turn and waking a thread cost."""

# numba's disk cache notices a change of this file only. The kernels close over the digest of the other one, which
# makes it part of the cache's key.
STAMP = int.from_bytes(hashlib.sha256(Path(vector.__file__).read_bytes()).digest()[:4], "little")

# Only fusing is allowed: numba would spread freedom to reorder into `exp`, whose accuracy hangs on its order.
_FAST = {"contract"}


# numba types only some of itself.
_numba: Any = numba
_types: Any = types
carray = _numba.carray


def turn(num_rows: int, row_work: int) -> tuple[int, bool]:
    """How many rows a thread takes at a time, and whether all of them are too little to wake other threads for."""
    return max(1, _TURN_ELEMENTS // row_work), num_rows * row_work <= _TURN_ELEMENTS


def compile_kernel(function: Callable[[Any], None]) -> Kernel:
    """Machine code for ``function`` of a kernel's words, from the disk cache where that has it."""
    signature = _types.void(_types.CPointer(_types.int64))
    options = {"fastmath": _FAST, "error_model": "numpy"}
    try:
        compiled = _numba.cfunc(signature, cache=True, **options)(function)
    except RuntimeError:
        # Nowhere to cache: neither the package's directory nor a home directory is writable.
        compiled = _numba.cfunc(signature, **options)(function)
    return Kernel(compiled.address)


@cache
def make_norm(num_bits: int, eps: float, stamp: int = STAMP) -> Kernel:
    """output = RMSNorm(x) × weight. Items are rows.

    Words: x, weight, output, row size, rows per turn.
    """

    def norm(words: Any) -> None:
        _ = stamp
        args = carray(words, (7,))
        num_rows, size, turn = args[1], args[5], args[6]
        x = carray(elements_at(args[2], num_bits), (num_rows, size))
        weight = carray(elements_at(args[3], num_bits), (size,))
        output = carray(elements_at(args[4], num_bits), (num_rows, size))
        while True:
            first = take_items(words, turn)
            if first >= num_rows:
                break
            for i in range(first, min(first + turn, num_rows)):
                row, out = x[i], output[i]
                total = np.float32(0)
                for j in range(size):
                    total = add(total, widen(row[j]) * widen(row[j]))
                scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(eps))
                for j in range(size):
                    normed = widen(narrow(out, widen(row[j]) * scale))
                    out[j] = narrow(out, normed * widen(weight[j]))

    return compile_kernel(norm)


@cache
def make_silu_mul(num_bits: int, stamp: int = STAMP) -> Kernel:
    """output = SiLU(left half) × right half. Items are rows.

    Words: gate and up, output, output's row size, rows per turn.
    """

    def silu_mul(words: Any) -> None:
        _ = stamp
        args = carray(words, (6,))
        num_rows, size, turn = args[1], args[4], args[5]
        gate_up = carray(elements_at(args[2], num_bits), (num_rows, 2 * size))
        output = carray(elements_at(args[3], num_bits), (num_rows, size))
        while True:
            first = take_items(words, turn)
            if first >= num_rows:
                break
            for i in range(first, min(first + turn, num_rows)):
                gate, up, out = gate_up[i, :size], gate_up[i, size:], output[i]
                for j in range(size):
                    x = widen(gate[j])
                    silu = widen(narrow(out, x / (np.float32(1) + exp(-x))))
                    out[j] = narrow(out, silu * widen(up[j]))

    return compile_kernel(silu_mul)


@cache
def make_rotate_and_store(
    num_bits: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, eps: float, stamp: int = STAMP
) -> Kernel:
    """Rotate queries and keys in place and write the cache. Items are tokens.

    Words: qkv, norms, number of norms, cosines, sines, slots, cache, number of blocks, tokens per turn. Norms
    are ``[2, head_dim]`` (queries, keys) to normalise heads first, or their number is 0.
    """
    half = head_dim // 2
    pair = 32 // num_bits

    def rotate_and_store(words: Any) -> None:
        _ = stamp
        args = carray(words, (11,))
        num_tokens, num_norms, num_blocks, turn = args[1], args[4], args[9], args[10]
        qkv = carray(elements_at(args[2], num_bits), (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim))
        norms = carray(elements_at(args[3], num_bits), (num_norms, head_dim))
        cos, sin = carray(float32_at(args[5]), (num_tokens, half)), carray(float32_at(args[6]), (num_tokens, half))
        slots = carray(int32_at(args[7]), (num_tokens,))
        cache = carray(elements_at(args[8], num_bits), (num_blocks, num_kv_heads, 2, head_dim * block_size))
        while True:
            begin = take_items(words, turn)
            if begin >= num_tokens:
                break
            for i in range(begin, min(begin + turn, num_tokens)):
                block, offset = slots[i] // block_size, slots[i] % block_size
                c, s = cos[i], sin[i]
                for h in range(num_heads + num_kv_heads):
                    first = qkv[i, h * head_dim : h * head_dim + half]
                    second = qkv[i, h * head_dim + half : (h + 1) * head_dim]
                    if norms.shape[0]:
                        total = np.float32(0)
                        for j in range(half):
                            total = add(total, widen(first[j]) * widen(first[j]) + widen(second[j]) * widen(second[j]))
                        scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
                        weight = norms[0 if h < num_heads else 1]
                        for j in range(half):
                            a = widen(narrow(first, widen(first[j]) * scale))
                            b = widen(narrow(first, widen(second[j]) * scale))
                            first[j] = narrow(first, a * widen(weight[j]))
                            second[j] = narrow(first, b * widen(weight[half + j]))
                    for j in range(half):
                        a, b = widen(first[j]), widen(second[j])
                        first[j] = narrow(first, a * c[j] - b * s[j])
                        second[j] = narrow(first, b * c[j] + a * s[j])
                    if h >= num_heads:
                        keys = cache[block, h - num_heads, 0]
                        for j in range(half):
                            at = (j // pair * block_size + offset) * pair + j % pair
                            keys[at] = first[j]
                            keys[half * block_size + at] = second[j]
                for h in range(num_kv_heads):
                    start = (num_heads + num_kv_heads + h) * head_dim
                    source, values = qkv[i, start : start + head_dim], cache[block, h, 1]
                    at = offset // pair * head_dim * pair + offset % pair
                    for j in range(head_dim):
                        values[at + j * pair] = source[j]

    return compile_kernel(rotate_and_store)


@cache
def make_attend(
    num_bits: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    tile_tokens: int,
    rows: int,
    stamp: int = STAMP,
) -> Kernel:
    """Causal attention over the paged cache. Items are tiles × key heads, tiles as in ``Step.tiles``.

    Words: qkv, cache, block table, tiles, output, number of tokens, of blocks, of sequences, of blocks in a row
    of the table, window (0 is none).

    For each tile and key head, ``tile_tokens × group`` rows at most are computed, ``rows`` at a time, with an online
    softmax over chunks of keys (FlashAttention, arXiv 2205.14135).
    """
    group = num_heads // num_kv_heads
    chunk = CHUNK_TOKENS // block_size * block_size
    max_rows = (tile_tokens * group + rows - 1) // rows * rows
    element = np.uint16 if num_bits == 16 else np.float32

    def attend(words: Any) -> None:
        _ = stamp
        args = carray(words, (12,))
        num_items, num_tokens_all, num_blocks, window = args[1], args[7], args[8], args[11]
        qkv = carray(elements_at(args[2], num_bits), (num_tokens_all, (num_heads + 2 * num_kv_heads) * head_dim))
        cache = carray(elements_at(args[3], num_bits), (num_blocks * num_kv_heads * 2 * head_dim * block_size,))
        block_table = carray(int32_at(args[4]), (args[9], args[10]))
        tiles = carray(int32_at(args[5]), (num_items // num_kv_heads, 4))
        output = carray(elements_at(args[6], num_bits), (num_tokens_all, num_heads * head_dim))
        head_size = np.int64(head_dim * block_size)
        query = np.zeros(max_rows * head_dim, element)
        total = np.zeros(max_rows * head_dim, np.float32)
        scores = np.zeros(max_rows * chunk, np.float32)
        weights = np.zeros(max_rows * chunk, element)
        block_starts = np.zeros(chunk // block_size, np.int64)
        highest = np.zeros(max_rows, np.float32)
        norm = np.zeros(max_rows, np.float32)
        while True:
            item = take_items(words, 1)
            if item >= num_items:
                break
            tile, kv_head = item // num_kv_heads, item % num_kv_heads
            sequence, first_token = np.int64(tiles[tile, 0]), np.int64(tiles[tile, 1])
            num_tokens, position = np.int64(tiles[tile, 2]), np.int64(tiles[tile, 3])
            num_rows = num_tokens * group
            padded_rows = (num_rows + rows - 1) // rows * rows
            total[:] = np.float32(0)
            norm[:] = np.float32(0)
            highest[:] = np.float32(-np.inf)
            for r in range(num_rows):
                start = (kv_head * group + r % group) * head_dim
                source = qkv[first_token + r // group, start : start + head_dim]
                target = query[r * head_dim : (r + 1) * head_dim]
                for j in range(head_dim):
                    target[j] = source[j]
            num_keys: Any = position + num_tokens
            first_key = max(0, position - window + 1) if window else 0
            for chunk_start in range(first_key // block_size * block_size, num_keys, chunk):
                chunk_end: Any = min(chunk_start + chunk, num_keys)
                num_blocks_here = (chunk_end - chunk_start + block_size - 1) // block_size
                for b in range(num_blocks_here):
                    at = (block_table[sequence, chunk_start // block_size + b] * num_kv_heads + kv_head) * 2 * head_size
                    block_starts[b] = at + head_size
                    for r in range(0, padded_rows, rows):
                        score_block(
                            query, r * head_dim, cache, at, scores, r * chunk + b * block_size, chunk,
                            rows, head_dim, block_size,
                        )  # fmt: skip
                for r in range(padded_rows):
                    here = slice(r * chunk, r * chunk + num_blocks_here * block_size)
                    weight, score = weights[here], scores[here]
                    query_position: Any = min(position + r // group, num_keys - 1)
                    low = max(query_position - window + 1 - chunk_start, 0) if window else 0
                    high = min(query_position + 1, chunk_end) - chunk_start
                    if high <= low:
                        weight[:] = element(0)
                        continue
                    weight[:low] = element(0)
                    weight[high:] = element(0)
                    seen, given = score[low:high], weight[low:high]
                    peak = highest[r]
                    for t in range(len(seen)):
                        peak = larger(peak, seen[t])
                    shrink = exp((highest[r] - peak) * np.float32(scale)) if norm[r] > 0 else np.float32(0)
                    highest[r] = peak
                    part = np.float32(0)
                    for t in range(len(seen)):
                        e = exp((seen[t] - peak) * np.float32(scale))
                        given[t] = narrow(given, e)
                        part = add(part, e)
                    norm[r] = norm[r] * shrink + part
                    if shrink != np.float32(1):
                        row = total[r * head_dim : (r + 1) * head_dim]
                        for j in range(head_dim):
                            row[j] *= shrink
                for r in range(0, padded_rows, rows):
                    weigh_blocks(
                        weights, r * chunk, cache, block_starts, total, r * head_dim, chunk,
                        chunk_end - chunk_start, rows, head_dim, block_size,
                    )  # fmt: skip
            for r in range(num_rows):
                start = (kv_head * group + r % group) * head_dim
                target = output[first_token + r // group, start : start + head_dim]
                source = total[r * head_dim : (r + 1) * head_dim]
                inverse = np.float32(1) / norm[r]
                for j in range(head_dim):
                    target[j] = narrow(target, source[j] * inverse)

    return compile_kernel(attend)
