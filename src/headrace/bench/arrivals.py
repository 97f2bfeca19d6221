"""When requests come and how long they are: Poisson processes, and recorded traces."""

import csv
import gzip
import io
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from headrace.core.errors import InvalidRequest

MAX_TRACE_BYTES = 2**30
"""Decompressed. A trace is read into memory; a longer one is refused instead of filling it."""


class Arrival(msgspec.Struct, frozen=True):
    """One request to come."""

    at_s: float
    """Seconds after the start of the load."""
    prompt_tokens: int
    output_tokens: int


def poisson(rate: float, num_requests: int, *, prompt_tokens: int, output_tokens: int, seed: int) -> list[Arrival]:
    """A Poisson process of ``rate`` requests per second: independent exponential gaps, the first request after one gap.

    Equal arguments give equal arrivals.

    Raises:
        InvalidRequest: ``rate`` is not a positive finite number.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise InvalidRequest(f"the arrival rate is {rate}; it must be a positive number of requests per second")
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=num_requests)
    return [Arrival(float(at), prompt_tokens, output_tokens) for at in np.cumsum(gaps)]


def offered_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests per second over the span from the load's start to the last arrival; 0 if that span is empty."""
    return len(arrivals) / arrivals[-1].at_s if arrivals and arrivals[-1].at_s > 0 else 0.0


def rescale(arrivals: Sequence[Arrival], *, rate: float) -> list[Arrival]:
    """The same arrivals with time stretched or pressed so that :func:`offered_rate` becomes ``rate``; lengths stay.

    Raises:
        InvalidRequest: ``rate`` is not a positive finite number, or all arrivals are at once and cannot be stretched.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise InvalidRequest(f"the arrival rate is {rate}; it must be a positive number of requests per second")
    present = offered_rate(arrivals)
    if present == 0.0:
        raise InvalidRequest("the trace spans no time, so its rate cannot be changed")
    return [msgspec.structs.replace(arrival, at_s=arrival.at_s * present / rate) for arrival in arrivals]


def read_trace(path: Path, *, limit: int | None = None) -> list[Arrival]:
    """A recorded trace, sorted by time, the first arrival at 0; at most the first ``limit`` of them.

    The format follows from the name, which may end in ``.gz``:

    * ``.csv`` with a header; columns ``TIMESTAMP, ContextTokens, GeneratedTokens`` (Azure LLM inference trace, times
      as ISO dates) or ``time, prompt_tokens, output_tokens`` (times in seconds or as ISO dates)
    * ``.jsonl``; keys ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (Mooncake; further keys are
      ignored) or ``time`` (seconds), ``prompt_tokens``, ``output_tokens``

    Requests of no prompt or no output tokens get one, since a server refuses them.

    Raises:
        InvalidRequest: the file cannot be read, or a line is not of its format; the message names file and line.
    """
    suffix = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
    if suffix not in ("csv", "jsonl"):
        raise InvalidRequest(f"{path}: a trace's name ends in .csv, .jsonl, .csv.gz or .jsonl.gz")
    lines = io.StringIO(_read_text(path))
    rows = _csv_rows(path, lines) if suffix == "csv" else _jsonl_rows(path, lines)
    arrivals = sorted(rows, key=lambda arrival: arrival.at_s)[:limit]
    if not arrivals:
        raise InvalidRequest(f"{path}: the trace holds no requests")
    start = arrivals[0].at_s
    return [msgspec.structs.replace(arrival, at_s=arrival.at_s - start) for arrival in arrivals]


def _read_text(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data: bytes = file.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError) as error:
        raise InvalidRequest(f"{path}: cannot read the trace: {error}") from error
    if len(data) > MAX_TRACE_BYTES:
        raise InvalidRequest(f"{path}: the trace is larger than {MAX_TRACE_BYTES} bytes; cut it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: a trace is UTF-8 text; byte {error.start} is not") from error


_CSV_COLUMNS = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("time", "prompt_tokens", "output_tokens"))


def _csv_rows(path: Path, lines: io.StringIO) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    try:
        header = reader.fieldnames or []
        columns = next((names for names in _CSV_COLUMNS if set(names) <= set(header)), None)
        if columns is None:
            wanted = " or ".join(", ".join(names) for names in _CSV_COLUMNS)
            raise InvalidRequest(f"{path}: the first line is {', '.join(header)!r}; columns must be {wanted}")
        time, prompt, output = columns
        for row in reader:
            try:
                yield _arrival(_seconds(row[time]), int(row[prompt]), int(row[output]))
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{path}: line {reader.line_num}: {error}") from error
    except csv.Error as error:
        raise InvalidRequest(f"{path}: line {reader.line_num}: {error}") from error


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int


class _PlainLine(msgspec.Struct):
    time: float
    prompt_tokens: int
    output_tokens: int


def _jsonl_rows(path: Path, lines: io.StringIO) -> Iterator[Arrival]:
    kind: type[_MooncakeLine] | type[_PlainLine] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if kind is None:
            kind = _MooncakeLine if '"input_length"' in line else _PlainLine
        try:
            row = msgspec.json.decode(line, type=kind)
            if isinstance(row, _MooncakeLine):
                yield _arrival(row.timestamp / 1000, row.input_length, row.output_length)
            else:
                yield _arrival(row.time, row.prompt_tokens, row.output_tokens)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"{path}: line {number}: {error}") from error


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # The Azure trace has seven decimals of a second; fromisoformat reads six and drops the rest.
        moment = datetime.fromisoformat(text)
        # A date without a zone is taken as UTC: local time would repeat or skip an hour where the clocks change.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _arrival(at_s: float, prompt_tokens: int, output_tokens: int) -> Arrival:
    if not math.isfinite(at_s):
        raise ValueError(f"the time {at_s} is not a finite number")
    if prompt_tokens < 0 or output_tokens < 0:
        raise ValueError(f"token counts are {prompt_tokens} and {output_tokens}; they cannot be negative")
    return Arrival(at_s, max(prompt_tokens, 1), max(output_tokens, 1))
