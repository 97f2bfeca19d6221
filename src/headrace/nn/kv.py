"""The paged cache of keys and values. Its layout is private to this package."""

import torch

from headrace.nn.config import ModelConfig
from headrace.nn.memory import zeros


class KVCache:
    """Keys and values of all layers in blocks of ``block_size`` tokens; who owns which block is the engine's affair.

    ::

        keys[layer]    [num_blocks, num_kv_heads, head_dim / pair, block_size, pair]
        values[layer]  [num_blocks, num_kv_heads, block_size / pair, head_dim, pair]

    Keys are transposed so that the scores of one block's tokens are a sum of whole vectors, one for each dimension. A
    sum takes its terms by 32-bit words, so the ``pair`` of 16-bit elements that follow each other in a sum (dimensions
    of a key, tokens of a value) are neighbours; ``pair`` is 1 for float32.
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
        pair = max(1, 4 // dtype.itemsize)
        if dim % pair or block_size % pair:
            raise ValueError(f"head dimension {dim} and block size {block_size} must be even for {dtype}")
        memory = zeros((config.num_layers, num_blocks, heads, 2, dim * block_size), dtype, device)
        self.layers = list(memory.unbind())
        heads_shape = (config.num_layers, num_blocks, heads)
        self.keys = list(memory[..., 0, :].view(*heads_shape, dim // pair, block_size, pair).unbind())
        self.values = list(memory[..., 1, :].view(*heads_shape, block_size // pair, dim, pair).unbind())

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store one token's key and value at each of ``blocks`` and ``offsets`` inside them, both int64 ``[n]``.

        ``keys`` and ``values`` are ``[n, num_kv_heads, head_dim]``.
        """
        pair = self.keys[layer].shape[-1]
        self.keys[layer][blocks, :, :, offsets] = keys.view(*keys.shape[:2], -1, pair)
        self.values[layer][blocks, :, offsets // pair, :, offsets % pair] = values

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks one after another, ``[num_kv_heads, num_tokens, head_dim]`` each."""
        keys = self.keys[layer][blocks].permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
        values = self.values[layer][blocks].permute(1, 0, 2, 4, 3).flatten(1, 3)
        return keys, values

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache as allocated."""
        return sum(layer.nbytes for layer in self.layers)
