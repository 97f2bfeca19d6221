"""The paged cache of keys and values. Its layout is private to this package."""

import torch

from headrace.nn.config import ModelConfig


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
        self.keys = [
            torch.zeros(num_blocks, heads, dim, block_size, dtype=dtype, device=device)
            for _ in range(config.num_layers)
        ]
        self.values = [
            torch.zeros(num_blocks, heads, block_size, dim, dtype=dtype, device=device)
            for _ in range(config.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache as allocated."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
