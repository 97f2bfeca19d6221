"""What an operator may set for an engine, and what follows from it."""

from typing import Literal

import msgspec

from headrace.core.errors import ConfigError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine runs one model. The defaults suit a CPU; every size can be set."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto`` is what the checkpoint was published in, float16 turned into bfloat16 on a CPU."""
    device: str = "auto"
    """``auto`` is ``cuda`` if there is a GPU, else ``cpu``."""
    block_size: int = 16
    """Tokens that share a block of the KV cache."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens computed in one step at most, over all sequences. More gives faster prefill, fewer smoother decoding."""
    max_model_len: int | None = None
    """Prompt and output tokens of a sequence together; None is what model and memory allow."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache; None is what ``memory_fraction`` leaves."""
    memory_fraction: float | None = None
    """Share of the memory free at start that weights, activations and KV cache may take together; None is 0.9 on a
    GPU and 0.4 on a CPU, which other processes need as well."""
    prefix_cache: bool = True
    """Keep the blocks of finished sequences for later prompts that begin alike."""
    num_threads: int | None = None
    """CPU threads of the model's kernels; None leaves the libraries' own choice."""
    stall_timeout_s: float = 60.0
    """With work waiting and no step finished for so long, the engine reports itself unhealthy."""
    max_waiting: int = 8
    """Sequences accepted beyond the running ones: a step or two of work. Others wait at the gateways, where they can
    still go elsewhere."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence gets its token in each step"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"engine.max_model_len is {self.max_model_len}; it must be at least 2")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ConfigError(f"engine.kv_cache_bytes is {self.kv_cache_bytes}; it must be positive")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"engine.memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"engine.num_threads is {self.num_threads}; it must be at least 1")
        if self.stall_timeout_s <= 0:
            raise ConfigError(f"engine.stall_timeout_s is {self.stall_timeout_s}; it must be positive")
        if self.max_waiting < 0:
            raise ConfigError(f"engine.max_waiting is {self.max_waiting}; it must not be negative")
