"""Rotary position embedding (arXiv 2104.09864) and its extensions to longer contexts."""

import math

import torch

from headrace.nn.rope_config import RopeConfig, RopeKind


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position for each pair of dimensions: ``[head_dim / 2]``, float32, on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (config.theta**exponent)
    match config.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR:
            return plain / config.factor
        case RopeKind.LLAMA3:
            return _llama3(plain, config)
        case RopeKind.YARN:
            return _yarn(config, head_dim, exponent)


class Rotary:
    """Cosines and sines of the angles at given positions, in float32 whatever the model computes in."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, head_dim).to(device)
        self._scale = config.attention_factor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each ``[num_tokens, head_dim / 2]``, for ``positions [num_tokens]``."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return cos, sin


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, the band between is blended (Llama 3.1)."""
    trained = config.original_max_position_embeddings
    rotations = trained * plain / (2 * math.pi)
    blend = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, head_dim: int, exponent: torch.Tensor) -> torch.Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between them (arXiv 2309.00071, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        trained = config.original_max_position_embeddings
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    wavelength = config.theta**exponent
    return ramp / (config.factor * wavelength) + (1 - ramp) / wavelength
