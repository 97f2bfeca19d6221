"""Plain PyTorch, for every dtype and device: what the faster implementations must agree with."""

import torch
import torch.nn.functional as F

from headrace.nn.config import ModelConfig
from headrace.nn.kv import KVCache
from headrace.nn.ops.interface import HeadNorms, scale_of
from headrace.nn.step import SequenceSpan, Step


class ReferenceOps:
    """The interface in :mod:`headrace.nn.ops.interface`, written to be read."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def prepare(self, block_size: int) -> None:
        """Nothing is compiled here."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps)

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
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(qkv.view(-1, sum(sizes), config.head_dim), sizes, dim=1)
        if norms is not None:
            query = rms_norm(query, norms.query, config.rms_norm_eps)
            key = rms_norm(key, norms.key, config.rms_norm_eps)
        query, key = rotate(query, step.cos, step.sin), rotate(key, step.cos, step.sin)
        kv.write(layer, step.write_blocks, step.write_offsets, key, value)
        outputs = [
            self._attend(query[span.start : span.end], *kv.read(layer, span.blocks), span, window)
            for span in step.sequences
        ]
        return torch.cat(outputs).flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: SequenceSpan, window: int | None
    ) -> torch.Tensor:
        """``query [query_len, num_heads, head_dim]``; returns the same shape."""
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None, :, : span.kv_len],
            value[None, :, : span.kv_len],
            attn_mask=span.mask(0, window, query.device),
            scale=scale_of(self._config),
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467), the mean in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs ``(i, i + head_dim / 2)`` of ``x [num_tokens, num_heads, head_dim]`` by the tokens' angles."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
