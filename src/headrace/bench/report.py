"""What a load run found: typed, as JSON, and as tables for a terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.bench.load import LoadResult
from headrace.bench.machine import Machine
from headrace.bench.stats import Summary, Targets, summarize


class LevelReport(msgspec.Struct, frozen=True):
    """One level of load: one arrival rate, one trace, or one concurrency."""

    label: str
    offered_rate: float | None
    """Requests per second that the schedule asked for; None for a closed loop, which has no schedule."""
    achieved_rate: float
    """Requests per second that were really sent, over the same span: intended start to last send."""
    duration_s: float
    """From the start of the load to the last byte."""
    num_requests: int
    num_ok: int
    errors: dict[str, int]
    """Failed requests by kind."""
    num_short: int
    """Requests that succeeded with fewer output tokens than asked for: a model that ended early, or a server that
    does not know ``ignore_eos``."""
    prompt_tokens: int
    output_tokens: int
    """Over requests that succeeded, like everything below."""
    counted_by_usage: bool
    """Whether all token counts are the server's; else some are chunks with text."""
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    """Requests per second that succeeded and met the targets."""
    good_share: float
    """Those, as a share of all requests."""
    tokens_per_chunk: float | None
    """Output tokens per streamed chunk. Above 1 the server or the network joins tokens, and gaps are between chunks."""
    ttft: Summary | None
    tpot: Summary | None
    gap: Summary | None
    """Between successive chunks with text, over all requests: inter-token latency where a chunk is a token."""
    e2e: Summary | None
    lateness: Summary | None
    """How much later than intended requests were sent: large values mean that the load generator could not keep up
    or that ``max_in_flight`` was reached. TTFT and e2e contain it."""


class ServeReport(msgspec.Struct, frozen=True):
    """A whole run, ready to be written as JSON. Holds no API key."""

    started_at: float
    """Unix seconds."""
    base_url: str
    model: str
    endpoint: str
    stream: bool
    seed: int
    targets: Targets
    machine: Machine
    """The machine of the load generator."""
    levels: list[LevelReport]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def summarize_level(
    label: str, result: LoadResult, targets: Targets, *, offered_rate: float | None = None
) -> LevelReport:
    """Reduce the records of one level, at least one."""
    records, start = result.records, result.start
    ok = [record for record in records if record.error is None]
    sent = [record for record in records if record.error != "not_sent"]
    duration_s = max(record.finished_at for record in records) - start
    send_span_s = max((record.sent_at for record in sent), default=start) - start
    num_good = sum(targets.met_by(record.ttft_s, record.tpot_s) for record in ok)
    num_chunks = sum(len(record.chunk_times) for record in ok)
    output_tokens = sum(record.output_tokens for record in ok)
    return LevelReport(
        label=label,
        offered_rate=offered_rate,
        achieved_rate=_ratio(len(sent), send_span_s),
        duration_s=duration_s,
        num_requests=len(records),
        num_ok=len(ok),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        num_short=sum(record.output_tokens < record.asked_output_tokens for record in ok),
        prompt_tokens=sum(record.prompt_tokens for record in ok),
        output_tokens=output_tokens,
        counted_by_usage=all(record.has_usage for record in ok),
        output_tokens_per_s=_ratio(output_tokens, duration_s),
        requests_per_s=_ratio(len(ok), duration_s),
        goodput_per_s=_ratio(num_good, duration_s),
        good_share=num_good / len(records),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        ttft=summarize(record.ttft_s for record in ok if record.ttft_s is not None),
        tpot=summarize(record.tpot_s for record in ok if record.tpot_s is not None),
        gap=summarize(gap for record in ok for gap in _gaps(record.chunk_times)),
        e2e=summarize(record.e2e_s for record in ok),
        lateness=summarize(record.lateness_s for record in sent),
    )


def _ratio(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _gaps(times: Sequence[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in pairwise(times))


def render(report: ServeReport) -> RenderableType:
    """Tables for a terminal: rates, then latencies, then what went wrong."""
    parts: list[RenderableType] = [Text(report.machine.line(), style="dim"), _rates(report), _latencies(report)]
    parts += [Text(line, style="yellow") for level in report.levels for line in remarks(level)]
    return Group(*parts)


def render_text(report: ServeReport, *, width: int = 120) -> str:
    """The same as plain text."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def _rates(report: ServeReport) -> Table:
    table = Table(title=f"{report.model} at {report.base_url} ({report.endpoint})", title_justify="left")
    table.add_column("load", no_wrap=True)
    for name in ("offered/s", "sent/s", "ok", "failed", "out tok/s", "requests/s", f"good/s {_goal(report.targets)}"):
        table.add_column(name, justify="right")
    for level in report.levels:
        table.add_row(
            level.label,
            "–" if level.offered_rate is None else f"{level.offered_rate:.2f}",
            # Users of a closed loop send when they can; a rate of that says nothing.
            "–" if level.offered_rate is None else f"{level.achieved_rate:.2f}",
            str(level.num_ok),
            str(level.num_requests - level.num_ok),
            f"{level.output_tokens_per_s:.1f}",
            f"{level.requests_per_s:.2f}",
            f"{level.goodput_per_s:.2f} ({level.good_share:.0%})",
        )
    return table


def _goal(targets: Targets) -> str:
    limits = [("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s)]
    return ", ".join(f"{name} ≤ {limit * 1000:g} ms" for name, limit in limits if limit is not None)


def _latencies(report: ServeReport) -> Table:
    table = Table(title="p50 / p90 / p99, milliseconds", title_justify="left")
    table.add_column("load", no_wrap=True)
    for name in ("TTFT", "TPOT", "between tokens", "end to end", "lateness"):
        table.add_column(name, justify="right")
    for level in report.levels:
        cells = (_cell(sample) for sample in (level.ttft, level.tpot, level.gap, level.e2e, level.lateness))
        table.add_row(level.label, *cells)
    return table


def _cell(sample: Summary | None) -> str:
    if sample is None:
        return "–"
    return " / ".join(f"{value * 1000:.4g}" for value in (sample.p50, sample.p90, sample.p99))


LATE_S = 0.05


def remarks(level: LevelReport) -> list[str]:
    """What a reader must know before believing the numbers."""
    lines = [f"{level.label}: {num} × {kind}" for kind, num in level.errors.items()]
    if level.offered_rate and level.achieved_rate < 0.95 * level.offered_rate:
        lines.append(
            f"{level.label}: sent {level.achieved_rate:.2f} requests/s of {level.offered_rate:.2f} offered; "
            "the load was not what was asked for"
        )
    if level.lateness and level.lateness.p99 > LATE_S:
        lines.append(
            f"{level.label}: 1 % of requests left more than {level.lateness.p99 * 1000:.0f} ms late; "
            "latencies include it"
        )
    if level.num_short:
        lines.append(f"{level.label}: {level.num_short} answers were shorter than asked for")
    if level.num_ok and not level.counted_by_usage:
        lines.append(f"{level.label}: the server reports no usage; tokens are counted as chunks with text")
    if level.tokens_per_chunk is not None and level.tokens_per_chunk > 1.1:
        lines.append(
            f"{level.label}: {level.tokens_per_chunk:.1f} tokens per chunk; 'between tokens' is between chunks"
        )
    return lines
