"""Arithmetic of measurements: percentiles, and goodput under targets."""

from collections.abc import Iterable

import msgspec
import numpy as np


class Summary(msgspec.Struct, frozen=True):
    """A sample of durations in seconds. Percentiles interpolate linearly between order statistics."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize(seconds: Iterable[float]) -> Summary | None:
    """The sample in a few numbers; None for an empty one, because no number would be true."""
    sample = np.fromiter(seconds, dtype=np.float64)
    if sample.size == 0:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(sample, [50, 90, 99]))
    return Summary(num=int(sample.size), mean=float(sample.mean()), p50=p50, p90=p90, p99=p99, max=float(sample.max()))


class Targets(msgspec.Struct, frozen=True):
    """What a request must meet to count as good; None leaves a dimension free."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether a request that succeeded met the targets.

        A request without a first-token time (not streamed) cannot show that it met a TTFT target, so it did not.
        One output token has no time per output token, and meets any TPOT target.
        """
        if self.ttft_s is not None and (ttft_s is None or ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s
