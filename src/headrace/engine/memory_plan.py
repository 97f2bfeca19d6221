"""How memory will be divided, from a model's configuration alone, before a byte of weights is read."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.nn.config import ModelConfig
from headrace.nn.ops.linear import layout_for

_GPU_FRACTION = 0.9
_CPU_FRACTION = 0.4
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, and what they hold."""

    free_bytes: int
    """Free when the plan was made."""
    weight_bytes: int
    activation_bytes: int
    """Of the largest step, sampling included."""
    kv_bytes: int
    num_blocks: int
    max_model_len: int

    def compared(self, *, weight_bytes: int, kv_bytes: int) -> dict[str, int]:
        """Planned beside measured, for ``EngineStats.memory``."""
        return {
            "free_at_start": self.free_bytes,
            "planned_weights": self.weight_bytes,
            "measured_weights": weight_bytes,
            "planned_activations": self.activation_bytes,
            "planned_kv": self.kv_bytes,
            "measured_kv": kv_bytes,
        }


def plan_memory(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device, free_bytes: int
) -> MemoryPlan:
    """Divide ``free_bytes`` of the device's memory.

    The KV cache gets ``kv_cache_bytes``, or what is left of the allowed share, but never more than all sequences at
    full length could use. Without ``max_model_len`` sequences may be as long as the model and the cache allow.

    Raises:
        ConfigError: it does not fit; the message names the bytes needed, the bytes there are, and the longest sequence
            that would fit.
    """
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len is {longest}; this model's context ends at {model.max_position_embeddings}"
        )
    if config.block_size % 2 and dtype.itemsize == 2:
        raise ConfigError(f"engine.block_size is {config.block_size}; with {dtype} it must be even")
    layout = layout_for(dtype, device)
    weights = model.weight_bytes(dtype, head_copied=layout.is_copy, row_multiple=layout.row_multiple)
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    # The sampler works on float32 copies of the logits: one as they are, one changed.
    sampling = 2 * num_rows * model.vocab_size * torch.float32.itemsize
    activations = model.activation_bytes(config.max_num_batched_tokens, num_rows, dtype) + sampling
    fixed = weights + activations
    block_bytes = model.kv_bytes_per_token(dtype) * config.block_size
    allowed = _allowed_bytes(config, device, free_bytes)
    num_blocks = max(0, (config.kv_cache_bytes if config.kv_cache_bytes else allowed - fixed) // block_bytes)
    num_blocks = min(num_blocks, config.max_num_seqs * _blocks_for(longest, config.block_size))
    # The last token of a sequence is never fed back, so it takes no room.
    feasible = min(longest, num_blocks * config.block_size + 1 if num_blocks else 0)
    total = fixed + num_blocks * block_bytes
    if total > allowed or feasible < 2 or (config.max_model_len is not None and feasible < longest):
        needed = fixed + _blocks_for(longest, config.block_size) * block_bytes
        raise ConfigError(_refusal(config, needed, fixed, allowed, feasible if total <= allowed else 0))
    return MemoryPlan(
        free_bytes=free_bytes,
        weight_bytes=weights,
        activation_bytes=activations,
        kv_bytes=num_blocks * block_bytes,
        num_blocks=num_blocks,
        max_model_len=feasible,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still allocate: on a CPU what the machine and the container both allow."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        # No control group, or one without a limit ("max").
        return free
    return min(free, max(0, limit - used))


def _allowed_bytes(config: EngineConfig, device: torch.device, free_bytes: int) -> int:
    if config.memory_fraction is not None:
        return int(free_bytes * config.memory_fraction)
    if config.kv_cache_bytes is not None:
        return free_bytes
    return int(free_bytes * (_GPU_FRACTION if device.type == "cuda" else _CPU_FRACTION))


def _blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-(num_tokens - 1) // block_size)


def _refusal(config: EngineConfig, needed: int, fixed: int, allowed: int, feasible: int) -> str:
    advice = (
        f"the longest sequence that fits has {feasible} tokens: set engine.max_model_len to at most that, or raise "
        "engine.memory_fraction or engine.kv_cache_bytes"
        if feasible >= 2
        else "no sequence fits: free memory, choose a smaller model or dtype, or change engine.memory_fraction, "
        "engine.kv_cache_bytes or engine.max_num_batched_tokens"
    )
    cache = "" if config.kv_cache_bytes is None else f", engine.kv_cache_bytes is {config.kv_cache_bytes}"
    return (
        f"one sequence of full length needs {needed} bytes ({fixed} of them weights and activations); "
        f"{allowed} bytes are available{cache}; {advice}"
    )
