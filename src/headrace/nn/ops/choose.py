"""Which implementation serves a dtype and device."""

import torch

from headrace.nn.config import ModelConfig
from headrace.nn.ops.interface import Ops
from headrace.nn.ops.linear import Linear
from headrace.nn.ops.reference import ReferenceOps


def make_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """The fastest operations that run here."""
    return ReferenceOps(config)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest product with ``weight [out_features, in_features]`` that runs here."""
    return Linear(weight, bias)
