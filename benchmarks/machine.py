"""What this machine can do at most: memory bandwidth and matrix products, with the threads an engine would use.

    .venv/bin/python benchmarks/machine.py [--threads N] [--model-dir DIR]

Prints the processor and its flags, read bandwidth, GEMM rates, and the limits that follow for the offline workload:
no engine in that precision can be faster, however well it is written.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.table import Table

import harness
from headrace.bench import machine
from headrace.bench.workload import Rates, Workload
from headrace.nn.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Capability(msgspec.Struct, frozen=True):
    """Measured rates."""

    threads: int
    read_bytes_per_s: float
    gemm_flops: dict[str, dict[str, float]]
    """By dtype and then shape, e.g. ``large``, ``64 rows``, ``512 rows``: floating-point operations per second."""


def measure(threads: int, config: ModelConfig) -> Capability:
    """Measure for about five seconds; ``config`` gives the width of the products."""
    torch.set_num_threads(threads)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"large": (2048, 2048, 2048), "64 rows": (64, hidden, 2 * inner), "512 rows": (512, hidden, 2 * inner)}
    gemm = {
        name: {label: _gemm_rate(dtype, *shape) for label, shape in shapes.items()} for name, dtype in DTYPES.items()
    }
    return Capability(threads, _read_rate(), gemm)


def _gemm_rate(dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    # Eight weights in turn, so that a small product is not timed with its weight in the nearest cache.
    weights = [torch.randn(columns, inner).to(dtype) for _ in range(8)]
    x = torch.randn(rows, inner).to(dtype)

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return len(weights) * 2 * rows * inner * columns / _best_s(products)


def _read_rate() -> float:
    data = torch.ones(64 * 2**20, dtype=torch.float32)
    return data.numel() * data.element_size() / _best_s(lambda: data.sum())


def _best_s(action: Callable[[], object], *, budget_s: float = 0.6) -> float:
    """The best time of several: a limit is what the machine can do when nothing disturbs it."""
    action()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def limits(config: ModelConfig, capability: Capability, workload: Workload, dtype: str) -> Rates:
    """What follows for a model: a step takes at least the time of its products, or of reading weights and cache.

    The two are taken to overlap perfectly (roofline; Williams et al., CACM 2009). The head counts only where a logit is
    needed. Products use the best measured rate of ``dtype``; attention's own products are left out, so real limits are
    a little lower.
    """
    best_flops = max(capability.gemm_flops[dtype].values())
    head = config.vocab_size * config.hidden_size
    # Untied models have the table twice, and the input's copy is only looked up.
    body = config.num_parameters() - head * (1 if config.tie_embeddings else 2)
    weight_bytes = DTYPES[dtype].itemsize * (body + head)
    kv_bytes = config.kv_bytes_per_token(DTYPES[dtype])

    def step_s(tokens: int, logits: int, context: float) -> float:
        """``context`` cached tokens are read in all."""
        flops = 2.0 * (body * tokens + head * logits)
        return max(flops / best_flops, (weight_bytes + kv_bytes * context) / capability.read_bytes_per_s)

    num, middle = workload.num_prompts, workload.prompt_tokens + workload.output_tokens / 2
    prefill_s = step_s(num * workload.prompt_tokens, num, 0)
    decode_s = step_s(num, num, num * middle)
    rest = workload.output_tokens - 1
    return Rates(
        whole_tokens_per_s=num * workload.output_tokens / (prefill_s + rest * decode_s),
        prefill_tokens_per_s=num * workload.prompt_tokens / prefill_s,
        decode_tokens_per_s=num / decode_s,
        one_stream_tokens_per_s=1 / step_s(1, 1, middle),
        ttft_s=step_s(workload.prompt_tokens, 1, 0),
    )


def show(capability: Capability, bounds: dict[str, Rates]) -> None:
    harness.console.print(machine.describe().line())
    harness.console.print(
        f"{capability.threads} threads: reads {capability.read_bytes_per_s / 1e9:.1f} GB/s; products, GFLOP/s: "
        + "; ".join(
            f"{dtype} " + ", ".join(f"{label} {rate / 1e9:.0f}" for label, rate in rates.items())
            for dtype, rates in capability.gemm_flops.items()
        )
    )
    table = Table("limit", "whole job tok/s", "prefill tok/s", "decode tok/s", "one stream tok/s", "TTFT ms")
    for dtype, bound in bounds.items():
        numbers = msgspec.structs.astuple(bound)
        table.add_row(dtype, *(f"{number:.0f}" for number in numbers[:-1]), f"{numbers[-1] * 1000:.1f}")
    harness.console.print(table)


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--threads", type=int, default=machine.describe().num_cpus)
    harness.add_model_dir(arguments)
    chosen = arguments.parse_args()
    config = ModelConfig.from_dir(Path(harness.model_dir(chosen.model_dir)))
    capability = measure(chosen.threads, config)
    bounds = {dtype: limits(config, capability, Workload(), dtype) for dtype in DTYPES}
    show(capability, bounds)
    harness.save("machine", {"capability": capability, "limits": bounds})


if __name__ == "__main__":
    main()
