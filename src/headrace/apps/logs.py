"""Structured logs: one JSON object per line on standard output, or coloured lines for a person at a terminal.

No part of Headrace logs prompt or completion text.
"""

import contextlib
import io
import logging
import sys
from collections.abc import Callable
from typing import Literal, TextIO, cast

import msgspec
import structlog

PROGRESS_EVENT = "progress"
"""The event whose lines a supervisor shows to the person who waits, rather than filing them away."""

Progress = Callable[[str, int, int], None]
"""``(stage, done, total)``; ``total`` is 0 where it is not known."""


class LogConfig(msgspec.Struct, frozen=True):
    """What is written to the log, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least urgent lines that are written."""
    format: Literal["auto", "json", "text"] = "auto"
    """``auto``: text at a terminal, JSON elsewhere."""


class _Tolerant(io.TextIOBase):
    """Standard output that may vanish: nothing a process does may fail because nobody reads its log any more."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()


def configure(config: LogConfig, *, process: str) -> None:
    """Set up structlog and route the standard library's warnings through it. Call once, first thing in a process."""
    output = cast("TextIO", _Tolerant())  # it writes text, which is all that is asked of it
    text = config.format == "text" or (config.format == "auto" and sys.stdout.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer(serializer=_json)
    )
    level = logging.getLevelNamesMapping()[config.level.upper()]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=output),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)


def log_progress(stage: str, done: int, total: int) -> None:
    """A :data:`Progress` that writes log lines, at most one per percent of a stage."""
    percent = 100 * done // total if total else 0
    if _last.get(stage) != percent:
        _last[stage] = percent
        structlog.get_logger().info(PROGRESS_EVENT, stage=stage, done=done, total=total)


_last: dict[str, int] = {}


def readable(line: str) -> str | None:
    """A line of a JSON log for a person; None for one that only reports progress. Other lines are as they are."""
    try:
        entry = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError:
        return line
    event = entry.pop("event", "")
    if event == PROGRESS_EVENT:
        return None
    time = str(entry.pop("timestamp", ""))[11:19]
    level = str(entry.pop("level", ""))
    entry.pop("process", None)
    details = " ".join(f"{key}={value}" for key, value in entry.items())
    return f"  {time} {level:8} {event} {details}".rstrip()


def _json(value: object, **_: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
