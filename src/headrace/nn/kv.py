"""The paged cache of keys and values. Its layout is private to this package."""

import torch

from headrace.nn.config import ModelConfig
from headrace.nn.memory import zeros


class KVCache:
    """Keys and values of all layers in blocks of ``block_size`` tokens; who owns which block is the engine's affair.

    ::

        keys[layer]    [num_blocks, num_kv_heads, head_dim, block_size]
        values[layer]  [num_blocks, num_kv_heads, block_size, head_dim]

    Keys are transposed so that the scores of one block's tokens are a sum of whole vectors, one for each dimension.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        heads, dim = config.num_kv_heads, config.head_dim
        # Zeros, so that slots that were never written hold finite numbers: masked attention multiplies them by 0.
        # One allocation for all layers, because only whole huge pages inside an allocation can be huge.
        shape = (config.num_layers, num_blocks, heads)
        self.keys = list(zeros((*shape, dim, block_size), dtype, device).unbind())
        self.values = list(zeros((*shape, block_size, dim), dtype, device).unbind())

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache as allocated."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
