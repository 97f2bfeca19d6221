"""What the engine counts and measures about itself."""

from collections import Counter

from headrace.core.requests import FinishReason
from headrace.engine.scheduler import Work

_SMOOTHING = 0.2


class Meter:
    """Counters since the start, and smoothed speeds."""

    def __init__(self, *, prefill_tokens_per_s: float = 0.0, step_s: float = 0.0) -> None:
        self.step = 0
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_prefix_queries = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.step_s = step_s

    def measured(self, work: list[Work], duration_s: float) -> None:
        """A step took ``duration_s``: steps of single tokens tell its duration, mostly-prompt steps prefill's speed."""
        num_tokens = sum(item.num_tokens for item in work)
        if num_tokens == len(work):
            self.step_s = _smoothed(self.step_s, duration_s)
        elif num_tokens >= 4 * len(work) and duration_s > 0.0:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, num_tokens / duration_s)


def _smoothed(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
