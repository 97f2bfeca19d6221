"""From a model directory to an engine that is ready to serve: plan, load, warm up."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import ConfigError
from headrace.core.frames import EngineDescription
from headrace.core.ids import SequenceId, TenantId, VersionId
from headrace.core.requests import GenerationRequest, SamplingParams, StopConditions
from headrace.engine.admission import Admission
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.memory_plan import free_memory, plan_memory
from headrace.engine.native import NativeEngine
from headrace.engine.runner import ModelRunner
from headrace.engine.scheduler import Limits
from headrace.nn.config import ModelConfig
from headrace.nn.kv import KVCache
from headrace.nn.loading import load_model
from headrace.nn.threads import set_num_threads

_log = structlog.get_logger(__name__)

Progress = Callable[[str, float], None]
"""Called with a stage (``load``, ``warm up``) and how much of it is done, 0 to 1."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_MAX_WARM_UP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BuiltCore:
    """A warm core and what is known about it."""

    core: EngineCore
    dtype: str
    device: torch.device
    memory: dict[str, int]
    """Planned and measured bytes."""


def build(
    directory: Path,
    model: str,
    version: VersionId,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> NativeEngine:
    """An engine for the model in ``directory``, loaded and warm. Takes seconds to minutes: call it off the event loop.

    Raises:
        ConfigError: the memory does not suffice, or a setting does not fit the model or the machine.
        ModelFormatError: the checkpoint is damaged or not supported.
    """
    clock = clock or SystemClock()
    capacity = config.max_num_seqs + config.max_waiting
    built = build_core(directory, config, progress=progress, clock=clock, capacity=capacity)
    admission = built.core.admission
    description = EngineDescription(
        model=model,
        version=version,
        max_model_len=admission.max_model_len,
        vocab_size=admission.vocab_size,
        block_size=admission.block_size,
        num_blocks=admission.num_blocks,
        max_num_seqs=config.max_num_seqs,
        dtype=built.dtype,
        device=str(built.device),
    )
    num_threads = config.num_threads
    return NativeEngine(
        built.core,
        description,
        clock,
        capacity=capacity,
        stall_timeout_s=config.stall_timeout_s,
        memory=built.memory,
        # Thread counts belong to the thread that asks for the work.
        on_thread_start=None if num_threads is None else lambda: set_num_threads(num_threads),
    )


def build_core(
    directory: Path,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
    capacity: int | None = None,
) -> BuiltCore:
    """As :func:`build`, without a thread; ``capacity`` None takes any number of sequences."""
    clock = clock or SystemClock()
    report = progress or _silent
    device = _device(config)
    if config.num_threads is not None:
        set_num_threads(config.num_threads)
    model_config = ModelConfig.from_dir(directory)
    dtype_name = _dtype_name(config, model_config, device)
    dtype = _DTYPES[dtype_name]
    plan = plan_memory(model_config, config, dtype, device, free_memory(device))
    report("load", 0.0)
    model = load_model(directory, dtype, device, progress=lambda done, total: report("load", done / max(total, 1)))
    kv = KVCache(model_config, plan.num_blocks, config.block_size, dtype, device)
    memory = plan.compared(weight_bytes=model.weight_bytes(), kv_bytes=kv.num_bytes)
    _log.info("model loaded", dtype=dtype_name, device=str(device), max_model_len=plan.max_model_len, **memory)
    limits = Limits(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
    )
    runner = ModelRunner(lambda batch: model.forward(batch, kv), limits, plan.max_model_len, device)
    admission = Admission(model_config.vocab_size, plan.max_model_len, config.block_size, plan.num_blocks)
    core = (
        EngineCore(runner, limits, admission, clock)
        if capacity is None
        else EngineCore(runner, limits, admission, clock, capacity=capacity)
    )
    warm_up(core, limits, report)
    return BuiltCore(core, dtype_name, device, memory)


def warm_up(core: EngineCore, limits: Limits, report: Progress) -> None:
    """Run every kind of step twice: the first time compiles kernels, the second gives the first measured speeds."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, top_p=0.9, logprobs=1),
        SamplingParams(seed=1, frequency_penalty=0.1),
    )
    longest = min(limits.max_num_batched_tokens, core.admission.max_model_len - 1, _MAX_WARM_UP_TOKENS)
    for round_number, prompt_len in enumerate((min(8, longest), longest)):
        report("warm up", round_number / 2)
        core.meter.step_s = core.meter.prefill_tokens_per_s = 0.0
        num_tokens = min(4, core.admission.max_model_len - prompt_len)
        for index, sampling in enumerate(kinds):
            sequence_id = SequenceId(f"warm-up/{index}")
            # One long prompt measures prefill; the others only join in, so that steps of every mixture occur.
            prompt = [index % core.admission.vocab_size] * (prompt_len if index == 0 else min(8, prompt_len))
            core.add(GenerationRequest(sequence_id, TenantId("warm-up"), prompt, StopConditions(num_tokens), sampling))
            core.step()
        while core.has_work:
            core.step()
    core.audit()
    core.forget_history()
    report("warm up", 1.0)


def _device(config: EngineConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device is {name!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {name!r}; torch finds no GPU here")
    return device


def _dtype_name(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    if config.dtype != "auto":
        return config.dtype
    published = model.dtype if model.dtype in _DTYPES else "float32"
    # CPUs have no fast float16 arithmetic.
    return "bfloat16" if published == "float16" and device.type == "cpu" else published


def _silent(_stage: str, _done: float) -> None:
    pass
