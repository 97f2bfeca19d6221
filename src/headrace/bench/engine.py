"""`headrace bench engine`: our engine on the offline workload, without a server."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

import headrace
from headrace.bench import machine
from headrace.bench.machine import Machine
from headrace.bench.offline import time_round
from headrace.bench.workload import (
    JOB_NAMES,
    RATE_NAMES,
    Job,
    PeerTimes,
    Rates,
    Workload,
    export,
    median_rates,
    rates,
)
from headrace.core.errors import InvalidRequest
from headrace.engine.build import build_core
from headrace.engine.config import EngineConfig


class EngineOptions(msgspec.Struct, frozen=True):
    """A whole run."""

    model_dir: Path
    workload: Workload = Workload()
    num_rounds: int = 3
    """Timed rounds, after one warm-up round."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    engine: EngineConfig = EngineConfig()
    """``dtype`` above replaces the one in here."""
    json_path: Path | None = None
    workload_path: Path | None = None
    """Also write the workload here, for engines in other environments."""


class EngineReport(msgspec.Struct, frozen=True):
    """What the engine did, ready to be written as JSON."""

    started_at: float
    """Unix seconds."""
    model_dir: str
    machine: Machine
    workload: Workload
    times: PeerTimes
    rates: Rates
    """Medians over the rounds."""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


OnProgress = Callable[[str, int, int], None]
"""``(stage, done, total)``."""


def run(options: EngineOptions, progress: OnProgress | None = None) -> EngineReport:
    """Load the model, warm up with a whole round, time ``num_rounds`` more, audit.

    Raises:
        InvalidRequest: the workload or the number of rounds is out of range.
        ConfigError, ModelFormatError: the engine cannot be built.
        AuditFailed: the engine did not release all it held.
    """
    if options.num_rounds < 1:
        raise InvalidRequest(f"num_rounds is {options.num_rounds}; it must be at least 1", param="num_rounds")
    options.workload.check()
    report = progress or _silent
    started_at = time.time()
    if options.workload_path is not None:
        export(options.workload, options.num_rounds, options.workload_path)
    start = time.perf_counter()
    config = msgspec.structs.replace(options.engine, dtype=options.dtype)
    built = build_core(options.model_dir, config, progress=lambda stage, share: report(stage, round(100 * share), 100))
    load_s = time.perf_counter() - start
    num_jobs = (options.num_rounds + 1) * len(JOB_NAMES)
    num_done = 0

    def on_job(_job: Job, _seconds: float) -> None:
        nonlocal num_done
        num_done += 1
        report("measure", num_done, num_jobs)

    rounds = [time_round(built.core, options.workload, number, on_job) for number in range(options.num_rounds + 1)][1:]
    built.core.audit()
    found = EngineReport(
        started_at=started_at,
        model_dir=options.model_dir.name,
        machine=machine.describe(),
        workload=options.workload,
        times=PeerTimes("headrace", headrace.__version__, built.dtype, rounds, load_s),
        rates=median_rates([rates(options.workload, one) for one in rounds]),
    )
    if options.json_path is not None:
        options.json_path.parent.mkdir(parents=True, exist_ok=True)
        options.json_path.write_bytes(found.to_json())
    return found


_TITLES = {
    "whole_tokens_per_s": "whole job, tokens out/s",
    "prefill_tokens_per_s": "prefill, tokens/s",
    "decode_tokens_per_s": "decode, tokens/s",
    "one_stream_tokens_per_s": "one stream, tokens/s",
    "ttft_s": "first token of one stream, ms",
}


def render(report: EngineReport) -> Table:
    """A table for a terminal: the median of each rate, and the smallest and largest round."""
    workload = report.workload
    title = (
        f"{report.model_dir}, {report.times.dtype}: {workload.num_prompts} prompts × {workload.prompt_tokens} tokens "
        f"in, {workload.output_tokens} out\n{report.machine.line()}"
    )
    table = Table("", "median", "smallest", "largest", title=title, title_justify="left")
    samples = [rates(workload, one) for one in report.times.rounds]
    for name in RATE_NAMES:
        scale = 1000 if name == "ttft_s" else 1
        values = [getattr(sample, name) * scale for sample in samples]
        median = getattr(report.rates, name) * scale
        table.add_row(_TITLES[name], f"{median:.1f}", f"{min(values):.1f}", f"{max(values):.1f}")
    return table


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
