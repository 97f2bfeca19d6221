"""Which implementation serves a dtype and device."""

import torch

from headrace.nn.config import ModelConfig
from headrace.nn.ops.cpu import CpuOps
from headrace.nn.ops.interface import Ops
from headrace.nn.ops.kernels import DTYPES
from headrace.nn.ops.reference import ReferenceOps


def make_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """The fastest operations that run here."""
    if device.type == "cpu" and dtype in DTYPES:
        return CpuOps(config, dtype)
    return ReferenceOps(config)
