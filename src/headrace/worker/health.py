"""Is the engine stuck? A policy over its statistics; the clock is passed in."""

from headrace.core.frames import EngineStats


class Health:
    """Progress decides, not the latency of a probe: a long step is healthy until ``stall_timeout_s``."""

    def __init__(self, *, stall_timeout_s: float, exit_when_stuck_s: float, now: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._exit_when_stuck_s = exit_when_stuck_s
        self._answered_at = now
        self._unhealthy_since: float | None = None
        self.reason: str | None = None
        """Why it is unhealthy; None while it is healthy."""

    def observe(self, now: float, stats: EngineStats | None) -> None:
        """Take the engine's latest statistics, or None if it has not answered since the last call."""
        if stats is not None:
            self._answered_at = now
        self.reason = self._complaint(now, stats)
        if self.reason is None:
            self._unhealthy_since = None
        elif self._unhealthy_since is None:
            self._unhealthy_since = now

    @property
    def healthy(self) -> bool:
        return self.reason is None

    def stuck_for_good(self, now: float) -> bool:
        """True once it has been unhealthy for ``exit_when_stuck_s``: time to let a supervisor start afresh."""
        return self._unhealthy_since is not None and now - self._unhealthy_since >= self._exit_when_stuck_s

    def _complaint(self, now: float, stats: EngineStats | None) -> str | None:
        if stats is None:
            silent_s = now - self._answered_at
            if silent_s < self._stall_timeout_s:
                return self.reason
            return f"the engine has not answered for {silent_s:.1f} s"
        if stats.last_progress_age_s >= self._stall_timeout_s or not stats.healthy:
            return f"work waits and no step has finished for {stats.last_progress_age_s:.1f} s"
        return None
