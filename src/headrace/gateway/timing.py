"""Where the time of one request went: the stages of ``Server-Timing`` and of the metrics."""

from collections.abc import Sequence

import msgspec

STAGES = (
    "auth",
    "template",
    "tokenize",
    "queue",
    "dispatch",
    "worker_wait",
    "prefill",
    "decode",
    "detokenize",
    "write",
)

FIRST_STAGES = ("auth", "template", "tokenize")
"""What is over when a stream's headers are sent."""


class Breakdown(msgspec.Struct):
    """Seconds by stage; one that was not reached stays 0. A request with many choices reports the slowest of each."""

    auth: float = 0.0
    """Finding and comparing the key."""
    template: float = 0.0
    tokenize: float = 0.0
    queue: float = 0.0
    """In the dispatcher's queue, until a worker had room."""
    dispatch: float = 0.0
    """Choosing the worker and handing the request over."""
    worker_wait: float = 0.0
    """In the engine, before its first step."""
    prefill: float = 0.0
    decode: float = 0.0
    detokenize: float = 0.0
    write: float = 0.0
    """Encoding and sending, with waiting for a client that reads slowly."""

    def server_timing(self, stages: Sequence[str] = STAGES) -> str:
        """The value of a ``Server-Timing`` header, in milliseconds."""
        return ", ".join([f"{stage};dur={getattr(self, stage) * 1000:.3f}" for stage in stages])

    def milliseconds(self) -> dict[str, float]:
        """Every stage under ``<stage>_ms``, for the log."""
        return {f"{stage}_ms": round(getattr(self, stage) * 1000, 3) for stage in STAGES}
