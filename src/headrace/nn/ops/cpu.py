"""The operations as numba kernels, for float32 and bfloat16 on the CPU."""

import torch

from headrace.nn.config import ModelConfig
from headrace.nn.kv import KVCache
from headrace.nn.ops import kernels
from headrace.nn.ops.interface import HeadNorms, scale_of
from headrace.nn.ops.reference import ReferenceOps
from headrace.nn.ops.vector import LANES
from headrace.nn.step import TILE_TOKENS, Step

_MAX_ROWS = 6
"""Query rows per register block: 6 × 4 accumulators fit beside their operands in 32 registers."""


class CpuOps:
    """The interface in :mod:`headrace.nn.ops.interface`; head or block sizes that do not fill vectors go to torch."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._num_bits = 8 * dtype.itemsize
        self._eps = config.rms_norm_eps
        self._reference = ReferenceOps(config)
        self._both_norms: dict[int, tuple[HeadNorms, torch.Tensor]] = {}
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self._scratch_rows = 0
        self._norm = kernels.make_norm(self._num_bits, self._eps)

    def prepare(self, block_size: int) -> None:
        if self._fits(block_size):
            heads = self._heads(block_size)
            kernels.make_rotate_and_store(*heads, self._eps)
            for longest_query in (1, TILE_TOKENS):
                kernels.make_attend(*heads, scale_of(self._config), TILE_TOKENS, self._rows(longest_query))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_rows, size = x.shape
        output = self._buffer("normed", num_rows, size)
        turn, alone = kernels.turn(num_rows, size)
        words = (x.data_ptr(), weight.data_ptr(), output.data_ptr(), size, turn)
        self._norm.run(num_rows, words, alone=alone)
        return output

    def attention(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        step: Step,
        kv: KVCache,
        layer: int,
        window: int | None,
    ) -> torch.Tensor:
        config = self._config
        if not self._fits(kv.block_size):
            return self._reference.attention(qkv, norms, step, kv, layer, window)
        heads = self._heads(kv.block_size)
        batch, num_tokens = step.batch, qkv.shape[0]
        cache = kv.layers[layer].data_ptr()
        both = None if norms is None else self._stacked(norms)
        turn, alone = kernels.turn(num_tokens, qkv.shape[1])
        kernels.make_rotate_and_store(*heads, self._eps).run(
            num_tokens,
            (
                qkv.data_ptr(),
                0 if both is None else both.data_ptr(),
                0 if both is None else 2,
                step.cos.data_ptr(),
                step.sin.data_ptr(),
                batch.slot_mapping.ctypes.data,
                cache,
                kv.num_blocks,
                turn,
            ),
            alone=alone,
        )
        output = self._buffer("attended", num_tokens, config.num_heads * config.head_dim)
        tiles = step.tiles
        kernels.make_attend(*heads, scale_of(config), TILE_TOKENS, self._rows(step.longest_query)).run(
            len(tiles) * config.num_kv_heads,
            (
                qkv.data_ptr(),
                cache,
                batch.block_table.ctypes.data,
                tiles.ctypes.data,
                output.data_ptr(),
                num_tokens,
                kv.num_blocks,
                *batch.block_table.shape,
                window or 0,
            ),
        )
        return output

    def _fits(self, block_size: int) -> bool:
        return not (self._config.head_dim % LANES or block_size % LANES or kernels.CHUNK_TOKENS % block_size)

    def _heads(self, block_size: int) -> tuple[int, int, int, int, int]:
        config = self._config
        return self._num_bits, config.num_heads, config.num_kv_heads, config.head_dim, block_size

    def _rows(self, longest_query: int) -> int:
        """Rows of a register block: a decode tile has only its group's, a prefill tile has plenty."""
        group = self._config.num_heads // self._config.num_kv_heads
        return _MAX_ROWS if longest_query > 1 else min(_MAX_ROWS, group)

    def _stacked(self, norms: HeadNorms) -> torch.Tensor:
        """Both weights one below the other, made once: the model keeps its weights, so identity is enough."""
        held = self._both_norms.get(id(norms))
        if held is None:
            held = self._both_norms[id(norms)] = (norms, torch.stack([norms.query, norms.key]))
        return held[1]

    def _buffer(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        """Memory for one operation's result, the same in every layer of a step and in every step of this size."""
        if num_rows != self._scratch_rows:
            self._scratch.clear()
            self._scratch_rows = num_rows
        buffer = self._scratch.get((name, num_columns))
        if buffer is None:
            buffer = self._scratch[name, num_columns] = torch.empty(num_rows, num_columns, dtype=self._dtype)
        return buffer
