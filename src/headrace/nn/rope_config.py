"""Which rotary embedding a checkpoint asks for, read from either of the two spellings in use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.core.errors import ModelFormatError

DEFAULT_THETA = 10_000.0


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and how frequencies are scaled beyond the trained context.

    Fields after ``factor`` matter only to the kinds that name them.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """LLAMA3 and YARN: the context length the model was pretrained with."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """LLAMA3: the band, in wavelengths per trained context, in which frequencies are blended."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """YARN (arXiv 2309.00071, section 3.2): rotations between which frequencies are blended."""
    attention_factor: float = 1.0
    """YARN: multiplies cosine and sine (section 3.4)."""
    truncate: bool = True
    """YARN: round the blended band outward to whole dimensions."""


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int, source: str) -> RopeConfig:
    """Read a ``config.json``'s rotary settings: ``rope_parameters``, or ``rope_scaling`` beside ``rope_theta``.

    Raises:
        ModelFormatError: the kind is not supported, or a value is missing or not a usable number.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelFormatError(f"{source}: rotary settings must be an object, not {scaling!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelFormatError(f"{source}: rotary settings per kind of layer are not supported")
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    if name not in list(RopeKind):
        known = ", ".join(RopeKind)
        raise ModelFormatError(f"{source}: rotary embedding {name!r} is not supported; supported are {known}")
    kind = RopeKind(name)
    read = _Reader(scaling, source)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelFormatError(f"{source}: partial_rotary_factor {partial!r} is not supported, only 1.0")
    theta = read.positive("rope_theta", _Reader(raw, source).positive("rope_theta", DEFAULT_THETA))
    if kind is RopeKind.DEFAULT:
        return RopeConfig(kind=kind, theta=theta)
    original = int(
        _Reader(raw, source).positive(
            "original_max_position_embeddings",
            read.positive("original_max_position_embeddings", float(max_position_embeddings)),
        )
    )
    implied = max_position_embeddings / original if kind is RopeKind.YARN and scaling.get("factor") is None else None
    factor = read.positive("factor", implied)
    if kind is RopeKind.LINEAR:
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    if kind is RopeKind.LLAMA3:
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=read.positive("low_freq_factor"),
            high_freq_factor=read.positive("high_freq_factor"),
        )
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=read.positive("beta_fast", 32.0),
        beta_slow=read.positive("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(read, factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(read: "_Reader", factor: float) -> float:
    def temper(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if read.table.get("mscale") and read.table.get("mscale_all_dim"):
        inferred = temper(read.positive("mscale")) / temper(read.positive("mscale_all_dim"))
    else:
        inferred = temper(1.0)
    return read.positive("attention_factor", inferred)


@dataclass(frozen=True, slots=True)
class _Reader:
    table: Mapping[str, Any]
    source: str

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.table.get(key)
        if value is None:
            if default is None:
                raise ModelFormatError(f"{self.source}: the rotary settings lack {key!r}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelFormatError(f"{self.source}: {key} is {value!r}; it must be a positive number")
        return float(value)
