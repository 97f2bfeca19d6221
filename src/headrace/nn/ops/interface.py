"""The operations between a layer's matrix products: one small interface, one implementation per kind of machine."""

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.nn.config import ModelConfig
from headrace.nn.kv import KVCache
from headrace.nn.step import Step


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMSNorm over each head of queries and keys, ``[head_dim]`` each."""

    query: torch.Tensor
    key: torch.Tensor


class Ops(Protocol):
    """All tensors are contiguous and of the model's dtype and device; sums inside are in float32 at least.

    A result may live in memory that the next call of the same operation uses again: consume it first.
    """

    def prepare(self, block_size: int) -> None:
        """Compile what serves caches of ``block_size`` now, so that no step waits for it."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The RMSNorm of ``x [num_rows, hidden]`` scaled by ``weight``."""
        ...

    def attention(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        step: Step,
        kv: KVCache,
        layer: int,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of the step's tokens over their sequences' caches.

        Normalises heads where ``norms`` says so, rotates queries and keys, writes keys and values to the cache, and
        attends. ``qkv [num_tokens, (num_heads + 2 × num_kv_heads) × head_dim]`` may be overwritten. Returns
        ``[num_tokens, num_heads × head_dim]``.
        """
        ...


def scale_of(config: ModelConfig) -> float:
    """What scores are multiplied by before the softmax."""
    return float(config.head_dim**-0.5)
