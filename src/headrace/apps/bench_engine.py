"""``headrace bench engine``: our engine alone, on the workload that peers are measured with."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from headrace.apps.logs import Progress as Report
from headrace.apps.progress import Steps
from headrace.apps.storage import open_for_command
from headrace.bench.engine import EngineOptions, render, run
from headrace.bench.workload import Workload
from headrace.engine.config import EngineConfig
from headrace.registry import demo


def engine(
    model: Annotated[str, Parameter(help="A model directory, or the name of an imported model.")] = demo.NAME,
    *,
    num_prompts: Annotated[int, Parameter(help="Distinct prompts, submitted at once.")] = 64,
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    rounds: Annotated[int, Parameter(help="Timed rounds, after one that warms up.")] = 3,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    threads: Annotated[int | None, Parameter(help="CPU threads; default: what the libraries choose.")] = None,
    vocab_size: Annotated[int, Parameter(help="Prompts draw token ids below this.")] = 49_152,
    json: Annotated[Path | None, Parameter(help="Write every figure here.")] = None,
    export: Annotated[
        Path | None, Parameter(help="Write the workload here, for engines in other environments.")
    ] = None,
    data: Annotated[
        Path | None, Parameter(help="Data directory of a local installation, for an imported model.")
    ] = None,
) -> None:
    """Measure our engine alone: greedy, end of sequence ignored, all prompts submitted at once."""
    console = Console()
    with Steps(console) as steps, contextlib.ExitStack() as stack:
        reports: dict[str, Report] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in reports:
                reports[stage] = stack.enter_context(steps.step(stage))
            reports[stage]("", done, total)

        options = EngineOptions(
            model_dir=_find(model, data),
            workload=Workload(num_prompts, prompt_tokens, output_tokens, vocab_size),
            num_rounds=rounds,
            dtype=dtype,
            engine=EngineConfig(num_threads=threads, kv_cache_bytes=2 << 30),
            json_path=json,
            workload_path=export,
        )
        report = run(options, on_progress)
    console.print(render(report))


def _find(model: str, data: Path | None) -> Path:
    if (directory := Path(model)).is_dir():
        return directory

    async def materialize() -> Path:
        async with open_for_command(None, data) as (_, registry, cache):
            return await registry.materialize(await registry.resolve(model), cache)

    return asyncio.run(materialize())
