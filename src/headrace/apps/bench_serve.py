"""``headrace bench serve``: load against any OpenAI-compatible URL."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from headrace.apps.client import find_gateway
from headrace.apps.logs import Progress as Report
from headrace.apps.progress import Steps
from headrace.bench.client import ClientOptions
from headrace.bench.report import render
from headrace.bench.serve import ClosedLoad, PoissonLoad, Progress, ServeOptions, TraceLoad, run
from headrace.bench.stats import Targets
from headrace.core.errors import ConfigError


def serve(
    *,
    base_url: Annotated[str | None, Parameter(help="Ends in /v1. Default: the local `headrace up`.")] = None,
    model: Annotated[str | None, Parameter(help="Default: the first that the server lists.")] = None,
    rate: Annotated[
        tuple[float, ...], Parameter(help="Open loop: requests per second, Poisson; repeat for a sweep.")
    ] = (),
    trace: Annotated[Path | None, Parameter(help="Open loop: arrivals of a trace (CSV or JSONL, also .gz).")] = None,
    concurrency: Annotated[
        tuple[int, ...], Parameter(help="Closed loop: users at once; repeat for a sweep. The default load.")
    ] = (),
    num_requests: Annotated[int | None, Parameter(help="Requests of each level.")] = None,
    prompt_tokens: Annotated[int, Parameter(help="Length of prompts (not with --trace).")] = 128,
    output_tokens: Annotated[int, Parameter(help="Length of answers (not with --trace).")] = 64,
    endpoint: Annotated[
        Literal["completions", "chat"], Parameter(help="completions sends token ids, chat sends text.")
    ] = "completions",
    stream: Annotated[bool, Parameter(help="Without streaming there is no TTFT.")] = True,
    vocab_size: Annotated[int, Parameter(help="Prompts draw token ids below this.")] = 32_000,
    ttft: Annotated[
        float | None, Parameter(help="Goodput counts requests whose first token came within this (s).")
    ] = None,
    tpot: Annotated[float | None, Parameter(help="… and whose later tokens came this fast on average (s).")] = None,
    seed: int = 0,
    json: Annotated[Path | None, Parameter(help="Write every figure here.")] = None,
    plot: Annotated[Path | None, Parameter(help="Write a picture (PNG) here.")] = None,
    data: Annotated[Path | None, Parameter(help="Data directory of the local `headrace up`.")] = None,
) -> None:
    """Load any OpenAI-compatible server and report latencies, throughput and goodput.

    In an open loop, latency counts from the moment a request was due, so a server that falls behind cannot hide it.
    The API key is that of the local `headrace up`, or the environment variable `HEADRACE_API_KEY`.
    """
    if sum(map(bool, (rate, trace, concurrency))) > 1:
        raise ConfigError("give one of --rate, --trace and --concurrency")
    load: PoissonLoad | TraceLoad | ClosedLoad
    if trace is not None:
        load = TraceLoad(trace, num_requests or 100, rate)
    elif rate:
        load = PoissonLoad(rate, num_requests or 100)
    else:
        load = ClosedLoad(concurrency or ClosedLoad().concurrencies, num_requests)
    gateway = find_gateway(base_url, data)
    options = ServeOptions(
        client=ClientOptions(
            base_url=gateway.base_url,
            model=model or gateway.models()[0],
            api_key=gateway.api_key,
            endpoint=endpoint,
            stream=stream,
        ),
        load=load,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        vocab_size=vocab_size,
        text=endpoint == "chat",
        seed=seed,
        targets=Targets(ttft, tpot),
        json_path=json,
        plot_path=plot,
    )
    console = Console()
    with Steps(console) as steps, contextlib.ExitStack() as stack:
        reports: dict[str, Report] = {}

        def on_progress(progress: Progress) -> None:
            if progress.level not in reports:
                reports[progress.level] = stack.enter_context(steps.step(progress.level))
            note = f"{progress.num_failed} failed" if progress.num_failed else ""
            reports[progress.level](note, progress.num_done, progress.num_total)

        result = asyncio.run(run(options, on_progress))
    console.print(render(result))
