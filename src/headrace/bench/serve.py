"""`headrace bench serve`: load against any OpenAI-compatible URL."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from headrace.bench import machine
from headrace.bench.arrivals import Arrival, offered_rate, poisson, read_trace, rescale
from headrace.bench.client import ClientOptions, RequestPlan, RequestRecord
from headrace.bench.load import LoadResult, closed_loop, open_loop
from headrace.bench.plot import require_matplotlib
from headrace.bench.plot import save as save_plot
from headrace.bench.prompts import Encoder, TextMaker, random_token_ids
from headrace.bench.report import LevelReport, ServeReport, summarize_level
from headrace.bench.stats import Targets
from headrace.core.errors import InvalidRequest, Unavailable


class PoissonLoad(msgspec.Struct, frozen=True, tag="poisson"):
    """Open loop: one level for each rate."""

    rates: tuple[float, ...]
    """Requests per second."""
    num_requests: int = 100


class TraceLoad(msgspec.Struct, frozen=True, tag="trace"):
    """Open loop: the arrivals and lengths of a recorded trace (:func:`headrace.bench.arrivals.read_trace`)."""

    path: Path
    num_requests: int | None = 100
    """The first so many of the trace; None for all."""
    rates: tuple[float, ...] = ()
    """One level for each: time is rescaled to so many requests per second. Empty: one level, as recorded."""
    max_prompt_tokens: int = 4096
    max_output_tokens: int = 1024
    """Longer requests of the trace are cut to this."""


class ClosedLoad(msgspec.Struct, frozen=True, tag="closed"):
    """Closed loop: one level for each number of users, each of whom sends a request when the last has ended."""

    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    num_requests: int | None = None
    """Per level; None for four times the concurrency."""


class ServeOptions(msgspec.Struct, frozen=True):
    """A whole run."""

    client: ClientOptions
    load: PoissonLoad | TraceLoad | ClosedLoad
    prompt_tokens: int = 128
    output_tokens: int = 64
    """Lengths of Poisson and closed loads; a trace has its own."""
    vocab_size: int = 32_000
    """Token-id prompts draw ids below this; it must not exceed the model's vocabulary."""
    text: bool = False
    """Send text instead of token ids. Chat always sends text."""
    tokenizer: Encoder | None = None
    """Makes text of an exact token count."""
    seed: int = 0
    targets: Targets = Targets()
    num_warmup: int = 2
    """Requests before the first level, one after another, that are not counted."""
    max_in_flight: int = 1024
    """Requests, and so connections, at once."""
    max_duration_s: float = 3600.0
    """Of one level."""
    json_path: Path | None = None
    plot_path: Path | None = None


class Progress(msgspec.Struct, frozen=True):
    """How far a run is; sent after every request."""

    level: str
    num_done: int
    num_total: int
    num_failed: int


OnProgress = Callable[[Progress], None]


class _Level(msgspec.Struct, frozen=True):
    label: str
    arrivals: list[Arrival]
    concurrency: int | None = None
    """None for an open loop."""


async def run(options: ServeOptions, progress: OnProgress | None = None) -> ServeReport:
    """Apply every level of load in turn and write the files that ``options`` ask for.

    Raises:
        InvalidRequest: an option is out of its range, or a trace cannot be read.
        ConfigError: a plot is wanted and matplotlib is missing.
        Unavailable: a warm-up request failed, so the run would measure errors; says which kind.
    """
    _check(options)
    levels = _levels(options)
    text = TextMaker(options.tokenizer) if options.text or options.client.endpoint == "chat" else None
    started_at = time.time()
    connector = aiohttp.TCPConnector(limit=options.max_in_flight, force_close=False)
    # The client's own deadlines rule; aiohttp's default total of five minutes would cut long answers.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await _warm_up(session, options, text)
        reports = [
            await _run_level(session, options, level, text, number, progress) for number, level in enumerate(levels)
        ]
    report = ServeReport(
        started_at=started_at,
        base_url=options.client.base_url,
        model=options.client.model,
        endpoint=options.client.endpoint,
        stream=options.client.stream,
        seed=options.seed,
        targets=options.targets,
        machine=machine.describe(),
        levels=reports,
    )
    if options.json_path is not None:
        options.json_path.parent.mkdir(parents=True, exist_ok=True)
        options.json_path.write_bytes(report.to_json())
    if options.plot_path is not None:
        await asyncio.to_thread(save_plot, report, options.plot_path)
    return report


def _check(options: ServeOptions) -> None:
    for name in ("prompt_tokens", "output_tokens", "max_in_flight"):
        if (value := getattr(options, name)) < 1:
            raise InvalidRequest(f"{name} is {value}; it must be at least 1", param=name)
    for name, seconds in (
        ("max_duration_s", options.max_duration_s),
        ("request_timeout_s", options.client.request_timeout_s),
    ):
        if not seconds > 0:
            raise InvalidRequest(f"{name} is {seconds}; it must be greater than 0", param=name)
    if not options.client.base_url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"base_url is {options.client.base_url!r}; it must look like http://localhost:8000/v1", param="base_url"
        )
    if options.plot_path is not None:
        require_matplotlib()


def _levels(options: ServeOptions) -> list[_Level]:
    load = options.load
    lengths = {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    if isinstance(load, PoissonLoad):
        levels = [
            _Level(f"{rate:g}/s", poisson(rate, load.num_requests, seed=options.seed, **lengths)) for rate in load.rates
        ]
    elif isinstance(load, TraceLoad):
        trace = [
            msgspec.structs.replace(
                arrival,
                prompt_tokens=min(arrival.prompt_tokens, load.max_prompt_tokens),
                output_tokens=min(arrival.output_tokens, load.max_output_tokens),
            )
            for arrival in read_trace(load.path, limit=load.num_requests)
        ]
        name = load.path.name.split(".", 1)[0]
        levels = [_Level(f"{name} {rate:g}/s", rescale(trace, rate=rate)) for rate in load.rates]
        levels = levels or [_Level(name, trace)]
    else:
        if any(concurrency < 1 for concurrency in load.concurrencies):
            raise InvalidRequest("a concurrency must be at least 1", param="concurrencies")
        levels = [
            _Level(f"{users} users", [Arrival(0.0, **lengths)] * (load.num_requests or 4 * users), users)
            for users in load.concurrencies
        ]
    if not levels or not all(level.arrivals for level in levels):
        raise InvalidRequest("there is nothing to send: give at least one rate or concurrency, and num_requests ≥ 1")
    return levels


def _plans(options: ServeOptions, arrivals: Sequence[Arrival], text: TextMaker | None, stage: str) -> list[RequestPlan]:
    """Prompts are distinct within a run, so that no prefix cache helps, and equal between runs of one seed."""
    plans = []
    for index, arrival in enumerate(arrivals):
        seed = f"{options.seed}/{stage}/{index}"
        num = arrival.prompt_tokens
        prompt = text.make(num, seed=seed) if text else random_token_ids(num, vocab_size=options.vocab_size, seed=seed)
        plans.append(RequestPlan(arrival.at_s, prompt, num, arrival.output_tokens))
    return plans


async def _warm_up(session: aiohttp.ClientSession, options: ServeOptions, text: TextMaker | None) -> None:
    arrivals = [Arrival(0.0, options.prompt_tokens, options.output_tokens)] * options.num_warmup
    plans = _plans(options, arrivals, text, "warmup")
    result = await closed_loop(
        session,
        options.client,
        plans,
        concurrency=1,
        max_duration_s=options.max_duration_s,
        on_record=lambda _: None,
    )
    if failed := next((record.error for record in result.records if record.error is not None), None):
        raise Unavailable(
            f"a warm-up request to {options.client.base_url} failed: {failed}; check URL, key and model name"
        )


async def _run_level(
    session: aiohttp.ClientSession,
    options: ServeOptions,
    level: _Level,
    text: TextMaker | None,
    number: int,
    progress: OnProgress | None,
) -> LevelReport:
    plans = _plans(options, level.arrivals, text, f"level{number}")
    num_done = num_failed = 0

    def on_record(record: RequestRecord) -> None:
        nonlocal num_done, num_failed
        num_done += 1
        num_failed += record.error is not None
        if progress is not None:
            progress(Progress(level.label, num_done, len(plans), num_failed))

    result: LoadResult
    if level.concurrency is not None:
        result = await closed_loop(
            session,
            options.client,
            plans,
            concurrency=min(level.concurrency, options.max_in_flight),
            max_duration_s=options.max_duration_s,
            on_record=on_record,
        )
        return summarize_level(level.label, result, options.targets)
    result = await open_loop(
        session,
        options.client,
        plans,
        max_in_flight=options.max_in_flight,
        max_duration_s=options.max_duration_s,
        on_record=on_record,
    )
    return summarize_level(level.label, result, options.targets, offered_rate=offered_rate(level.arrivals))
