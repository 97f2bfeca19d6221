"""Time is passed in, never looked up, so that policies run the same under a live clock and a virtual one."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back. For durations and deadlines."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch. For what people and records see."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that stands still until a test or the simulator moves it."""

    def __init__(self, start: float = 0.0, *, epoch: float = 1_700_000_000.0) -> None:
        self._now = start
        self._epoch = epoch

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._epoch + self._now

    def advance(self, seconds: float) -> None:
        """Move time forward.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
