"""What numba lacks for these kernels: bfloat16, an accurate fast exponential, and register-blocked inner loops.

bfloat16 arrays appear as their bits in ``uint16``. Every intrinsic here works for those and for ``float32``. The inner
loops are written as LLVM vectors of 16 lanes; LLVM splits them where the machine's registers are narrower.
"""
# ruff: noqa: ARG001  # an intrinsic's parameters are its signature inside kernels; its Python body sees only their types

import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import binding as llvm_binding
from llvmlite import ir
from numba import types as numba_types
from numba.core import cgutils as numba_cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic as numba_intrinsic

LANES = 16
_MAX_ACCUMULATORS = 24  # of 32 vector registers, the rest hold operands
_MIN_CHAINS = 12


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite is not typed
    """LLVM's bfloat16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)
_VF32 = ir.VectorType(_F32, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_BF16 = _BFloat()
_VBF16 = ir.VectorType(_BF16, 2 * LANES)
# A product and a sum may fuse, which only makes them more accurate.
_FUSE = ("contract",)

# numba types only some of itself.
types: Any = numba_types
cgutils: Any = numba_cgutils
config: Any = numba_config
binding: Any = llvm_binding

Codegen = Callable[[Any, ir.IRBuilder, Any, Any], Any]


def intrinsic(function: Callable[..., tuple[Any, Codegen]]) -> Any:
    """Make ``function`` callable inside kernels, there without its first parameter; literals stay literals."""
    return numba_intrinsic(prefer_literal=True)(function)


@intrinsic
def take_items(typingctx: Any, words: Any, num_items: Any) -> tuple[Any, Codegen]:
    """Add ``num_items`` to the first of ``words``, atomically among threads, and return what it was."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], args[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def elements_at(typingctx: Any, address: Any, num_bits: Any) -> tuple[Any, Codegen]:
    """A pointer to stored elements of a model's dtype: ``num_bits`` is 16 for bfloat16, 32 for float32 (a literal)."""
    element = types.uint16 if num_bits.literal_value == 16 else types.float32
    return _pointer_from(element, num_bits)


@intrinsic
def float32_at(typingctx: Any, address: Any) -> tuple[Any, Codegen]:
    """A pointer to float32."""
    return _pointer_from(types.float32)


@intrinsic
def int32_at(typingctx: Any, address: Any) -> tuple[Any, Codegen]:
    """A pointer to int32."""
    return _pointer_from(types.int32)


def _pointer_from(element: Any, *rest: Any) -> tuple[Any, Codegen]:
    pointer = types.CPointer(element)

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, *rest), codegen


@intrinsic
def widen(typingctx: Any, value: Any) -> tuple[Any, Codegen]:
    """A stored element as float32."""
    if value == types.float32:
        return types.float32(value), lambda _context, _builder, _signature, args: args[0]

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(types.uint16), codegen


@intrinsic
def narrow(typingctx: Any, like: Any, value: Any) -> tuple[Any, Codegen]:
    """A float32 as an element of the array ``like``, rounded to the nearest even where that is bfloat16."""
    if like.dtype == types.float32:
        return types.float32(like, types.float32), lambda _context, _builder, _signature, args: args[1]

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        if has_bfloat16_dot():
            return builder.bitcast(builder.fptrunc(args[1], _BF16), _I16)
        bits = builder.bitcast(args[1], _I32)
        lowest_kept = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(lowest_kept, ir.Constant(_I32, 0x7FFF)))
        # Adding to a NaN's bits can carry it to infinity or a number: keep it, made quiet.
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        rounded = builder.select(is_nan, builder.or_(bits, ir.Constant(_I32, 0x400000)), rounded)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)

    return types.uint16(like, types.float32), codegen


@intrinsic
def exp(typingctx: Any, x: Any) -> tuple[Any, Codegen]:
    """e to the ``x`` in float32, relative error below 1e-7 × 2; arguments are clipped to ±87.

    Reduction to ``[-ln 2 / 2, ln 2 / 2]`` with ln 2 in two parts, then the polynomial of Cephes' ``expf``.
    """

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        def const(value: float) -> Any:
            return ir.Constant(_F32, value)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)

        x = args[0]
        x = builder.select(builder.fcmp_ordered("<", x, const(87.0)), x, const(87.0))
        x = builder.select(builder.fcmp_ordered(">", x, const(-87.0)), x, const(-87.0))
        # Adding 1.5 × 2^23 rounds to a whole number and leaves it in the low bits.
        shifted = fma(x, const(_f32(1.4426950408889634)), const(12582912.0))
        whole = builder.fsub(shifted, const(12582912.0))
        rest = fma(whole, const(-0.693359375), x)
        rest = fma(whole, const(_f32(2.12194440e-4)), rest)
        poly = const(_f32(1.9875691500e-4))
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            poly = fma(poly, rest, const(_f32(coefficient)))
        poly = fma(poly, builder.fmul(rest, rest), rest)
        poly = builder.fadd(poly, const(1.0))
        exponent = builder.shl(builder.bitcast(shifted, _I32), ir.Constant(_I32, 23))
        return builder.bitcast(builder.add(builder.bitcast(poly, _I32), exponent), _F32)

    return types.float32(types.float32), codegen


@intrinsic
def add(typingctx: Any, total: Any, term: Any) -> tuple[Any, Codegen]:
    """A float32 sum that may be taken in any order, so that a loop over it becomes vectors."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=("reassoc", "contract", "nsz"))

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def larger(typingctx: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """The larger of two float32 that are not NaN, in a form that a loop over it becomes vectors."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        is_larger = builder.fcmp_ordered(">", args[0], args[1], flags=("nnan", "nsz"))
        return builder.select(is_larger, args[0], args[1], flags=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def score_block(
    typingctx: Any,
    query: Any,
    query_at: Any,
    keys: Any,
    keys_at: Any,
    scores: Any,
    scores_at: Any,
    scores_stride: Any,
    num_rows: Any,
    head_dim: Any,
    block_size: Any,
) -> tuple[Any, Codegen]:
    """``scores[r, t] = Σ_d query[r, d] × keys[d, t]`` for one block of the cache.

    ``query`` and ``keys`` have the model's dtype, ``keys`` the cache's layout, ``scores`` is float32. Each ``…_at`` is
    a flat element offset into its array. The last three arguments are literals.
    """
    rows, dim, size = num_rows.literal_value, head_dim.literal_value, block_size.literal_value
    words = _Words(keys.dtype)
    num_steps, vectors = dim // words.count, size // LANES
    # Independent partial sums hide the latency of the fused multiply-add when there are few rows.
    unroll = max(1, _MIN_CHAINS // (rows * vectors))
    while num_steps % unroll:
        unroll -= 1

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        q = words.at(builder, _pointer(context, builder, signature, args, 0))
        k = words.at(builder, _pointer(context, builder, signature, args, 2))
        s = _pointer(context, builder, signature, args, 4)
        sums = [[[_accumulator(builder) for _ in range(vectors)] for _ in range(rows)] for _ in range(unroll)]
        with cgutils.for_range(builder, _intp(context, num_steps // unroll)) as loop:
            first = builder.mul(loop.index, _intp(context, unroll))
            for part in range(unroll):
                d = builder.add(first, _intp(context, part))
                row_start = builder.mul(d, _intp(context, size))
                tile = [
                    words.load(builder, k, builder.add(row_start, _intp(context, v * LANES))) for v in range(vectors)
                ]
                for row in range(rows):
                    factor = words.splat(builder, q, builder.add(d, _intp(context, row * num_steps)))
                    for v in range(vectors):
                        words.multiply_add(builder, sums[part][row][v], factor, tile[v])
        for row in range(rows):
            start = builder.mul(args[6], _intp(context, row))
            for v in range(vectors):
                total = builder.load(sums[0][row][v])
                for part in range(1, unroll):
                    total = builder.fadd(total, builder.load(sums[part][row][v]))
                _store(builder, total, s, builder.add(start, _intp(context, v * LANES)))
        return context.get_dummy_value()

    return _void(query, keys, scores, types.intp, num_rows, head_dim, block_size), codegen


@intrinsic
def weigh_blocks(
    typingctx: Any,
    weights: Any,
    weights_at: Any,
    values: Any,
    block_starts: Any,
    output: Any,
    output_at: Any,
    weights_stride: Any,
    num_tokens: Any,
    num_rows: Any,
    head_dim: Any,
    block_size: Any,
) -> tuple[Any, Codegen]:
    """``output[r, d] += Σ_t weights[r, t] × values[t, d]`` over ``num_tokens`` in blocks of the cache.

    ``weights`` and ``values`` have the model's dtype, ``values`` the cache's layout, ``output`` is float32. Each
    ``…_at`` is a flat element offset into its array, and so are the int64 ``block_starts`` into ``values``. The last
    three arguments are literals. What lies in ``values`` beyond the tokens is not looked at, but ``weights`` must be 0
    there up to a whole word.
    """
    rows, dim, size = num_rows.literal_value, head_dim.literal_value, block_size.literal_value
    words = _Words(values.dtype)
    columns = max(1, min(dim // LANES, _MAX_ACCUMULATORS // rows))

    def load_tile(builder: ir.IRBuilder, context: Any, v: Any, step: Any, offsets: list[int]) -> list[Any]:
        start = builder.mul(step, _intp(context, dim))
        return [words.load(builder, v, builder.add(start, _intp(context, offset))) for offset in offsets]

    def add_tile(
        builder: ir.IRBuilder, context: Any, w: Any, row_words: Any, step: Any, tile: list[Any], sums: list[list[Any]]
    ) -> None:
        for row, totals in enumerate(sums):
            factor = words.splat(builder, w, builder.add(step, builder.mul(row_words, _intp(context, row))))
            for total, value in zip(totals, tile, strict=True):
                words.multiply_add(builder, total, factor, value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        w = words.at(builder, _pointer(context, builder, signature, args, 0))
        v_data, starts = (_data(context, builder, signature, args, index) for index in (2, 3))
        out = _pointer(context, builder, signature, args, 4)
        row_words = builder.udiv(args[6], _intp(context, words.count))
        num_blocks = builder.udiv(builder.add(args[7], _intp(context, size - 1)), _intp(context, size))
        for first in range(0, dim // LANES, columns):
            offsets = [c * LANES for c in range(first, min(first + columns, dim // LANES))]
            sums = [[_accumulator(builder) for _ in offsets] for _ in range(rows)]
            for row in range(rows):
                for total, offset in zip(sums[row], offsets, strict=True):
                    builder.store(_load_float32(builder, out, _intp(context, row * dim + offset)), total)

            with cgutils.for_range(builder, num_blocks) as blocks:
                block = blocks.index
                start = builder.load(builder.gep(starts, [block]))
                v = words.at(builder, builder.gep(v_data, [start]))
                left = builder.sub(args[7], builder.mul(block, _intp(context, size)))
                whole = builder.icmp_signed(">=", left, _intp(context, size))
                here = builder.select(whole, _intp(context, size), left)
                full = builder.udiv(here, _intp(context, words.count))
                first_word = builder.mul(block, _intp(context, size // words.count))
                with cgutils.for_range(builder, full) as steps:
                    tile = load_tile(builder, context, v, steps.index, offsets)
                    add_tile(builder, context, w, row_words, builder.add(first_word, steps.index), tile, sums)
                if words.count > 1:
                    rest = builder.urem(here, _intp(context, words.count))
                    with builder.if_then(builder.icmp_signed("!=", rest, _intp(context, 0)), likely=False):
                        tile = load_tile(builder, context, v, full, offsets)
                        tile = [words.keep_first(builder, value) for value in tile]
                        add_tile(builder, context, w, row_words, builder.add(first_word, full), tile, sums)
            for row in range(rows):
                for total, offset in zip(sums[row], offsets, strict=True):
                    _store(builder, builder.load(total), out, _intp(context, row * dim + offset))
        return context.get_dummy_value()

    signature = types.void(
        weights, types.intp, values, block_starts, output, types.intp, types.intp, types.intp,
        num_rows, head_dim, block_size,
    )  # fmt: skip
    return signature, codegen


@intrinsic
def multiply_panel(
    typingctx: Any,
    x: Any,
    x_at: Any,
    x_stride: Any,
    weights: Any,
    weights_at: Any,
    num_steps: Any,
    tile: Any,
    num_rows: Any,
    num_vectors: Any,
) -> tuple[Any, Codegen]:
    """``tile[r, f] = Σ_k x[r, k] × weights[k, f]`` for one panel of weights, all of ``num_steps`` words of inputs.

    ``x`` and ``weights`` have the model's dtype, ``weights`` in the layout of :mod:`headrace.nn.ops.panels`; ``tile``
    is float32 ``[num_rows, num_vectors × LANES]``. Each ``…_at`` is a flat element offset into its array. The last two
    arguments are literals.
    """
    rows, vectors = num_rows.literal_value, num_vectors.literal_value
    words = _Words(weights.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        xs = words.at(builder, _pointer(context, builder, signature, args, 0))
        ws = words.at(builder, builder.gep(_data(context, builder, signature, args, 3), [args[4]]))
        out = _data(context, builder, signature, args, 6)
        row_words = builder.udiv(args[2], _intp(context, words.count))
        sums = [[_accumulator(builder) for _ in range(vectors)] for _ in range(rows)]
        with cgutils.for_range(builder, args[5]) as loop:
            start = builder.mul(loop.index, _intp(context, vectors * LANES))
            tile = [words.load(builder, ws, builder.add(start, _intp(context, v * LANES))) for v in range(vectors)]
            for row in range(rows):
                at = builder.add(loop.index, builder.mul(row_words, _intp(context, row)))
                factor = words.splat(builder, xs, at)
                for total, value in zip(sums[row], tile, strict=True):
                    words.multiply_add(builder, total, factor, value)
        for row in range(rows):
            for v, total in enumerate(sums[row]):
                _store(builder, builder.load(total), out, _intp(context, (row * vectors + v) * LANES))
        return context.get_dummy_value()

    signature = types.void(
        x, types.intp, types.intp, weights, types.intp, types.intp, tile, num_rows, num_vectors
    )  # fmt: skip
    return signature, codegen


class _Words:
    """Arithmetic on 32-bit words of stored elements: one float32, or a pair of bfloat16 that are neighbours in a sum.

    A sum over pairs takes half the instructions: AVX-512 BF16 multiplies and adds both at once, and where that is
    missing each half becomes a float32 in one shift or mask.
    """

    def __init__(self, dtype: Any) -> None:
        self._is_pair = dtype == types.uint16
        self._type = _VI32 if self._is_pair else _VF32
        self.count = 2 if self._is_pair else 1
        """Elements in a word."""

    def at(self, builder: ir.IRBuilder, pointer: Any) -> Any:
        return builder.bitcast(pointer, self._type.element.as_pointer())

    def load(self, builder: ir.IRBuilder, pointer: Any, at: Any) -> Any:
        address = builder.bitcast(builder.gep(pointer, [at]), self._type.as_pointer())
        return builder.load(address, align=4, typ=self._type)

    def splat(self, builder: ir.IRBuilder, pointer: Any, at: Any) -> Any:
        undefined = ir.Constant(self._type, ir.Undefined)
        scalar = builder.load(builder.gep(pointer, [at]), align=4)
        one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return builder.shuffle_vector(one, undefined, ir.Constant(_VI32, [0] * LANES))

    def keep_first(self, builder: ir.IRBuilder, words: Any) -> Any:
        """The words with all but the first of their elements zero."""
        return builder.and_(words, ir.Constant(_VI32, [0xFFFF] * LANES)) if self._is_pair else words

    def multiply_add(self, builder: ir.IRBuilder, total: Any, a: Any, b: Any) -> None:
        if not self._is_pair:
            _multiply_add(builder, total, a, b)
        elif has_bfloat16_dot():
            kind = ir.FunctionType(_VF32, [_VF32, _VBF16, _VBF16])
            dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
            pairs = [builder.bitcast(words, _VBF16) for words in (a, b)]
            builder.store(builder.call(dot, [builder.load(total), *pairs]), total)
        else:
            for half in (_first_half, _second_half):
                _multiply_add(builder, total, half(builder, a), half(builder, b))


@cache
def has_bfloat16_dot() -> bool:
    """Whether kernels are compiled for AVX-512 BF16: this machine has it, and numba was not told to spare it."""
    told = config.CPU_NAME or config.CPU_FEATURES is not None
    return not told and bool(binding.get_host_cpu_features().get("avx512bf16"))


@cache
def has_amx() -> bool:
    """Whether this machine multiplies bfloat16 tiles (AMX), several times faster than vectors."""
    return bool(binding.get_host_cpu_features().get("amx-bf16"))


def _first_half(builder: ir.IRBuilder, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, ir.Constant(_VI32, [16] * LANES)), _VF32)


def _second_half(builder: ir.IRBuilder, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, ir.Constant(_VI32, [0xFFFF0000] * LANES)), _VF32)


def _void(first: Any, second: Any, third: Any, *rest: Any) -> Any:
    return types.void(first, types.intp, second, types.intp, third, types.intp, *rest)


def _f32(value: float) -> float:
    """The nearest float32, which is what an LLVM float constant must be."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _intp(context: Any, value: int) -> Any:
    return context.get_constant(types.intp, value)


def _data(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, index: int) -> Any:
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def _pointer(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, index: int) -> Any:
    return builder.gep(_data(context, builder, signature, args, index), [args[index + 1]])


def _accumulator(builder: ir.IRBuilder) -> Any:
    """A zeroed vector on the stack, which LLVM promotes to a register."""
    slot = cgutils.alloca_once(builder, _VF32)
    builder.store(ir.Constant(_VF32, [0.0] * LANES), slot)
    return slot


def _load_float32(builder: ir.IRBuilder, pointer: Any, at: Any) -> Any:
    address = builder.bitcast(builder.gep(pointer, [at]), _VF32.as_pointer())
    return builder.load(address, align=4, typ=_VF32)


def _store(builder: ir.IRBuilder, vector: Any, pointer: Any, at: Any) -> None:
    address = builder.bitcast(builder.gep(pointer, [at]), _VF32.as_pointer())
    builder.store(vector, address, align=4)


def _multiply_add(builder: ir.IRBuilder, total: Any, a: Any, b: Any) -> None:
    builder.store(builder.fadd(builder.fmul(a, b, flags=_FUSE), builder.load(total), flags=_FUSE), total)
