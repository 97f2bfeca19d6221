"""Configuration of the dispatcher."""

import msgspec


class DispatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds and patience."""

    max_queued_requests: int = 1024
    """Requests that wait for a worker's credit, over all models; more are refused."""
    max_queued_tokens: int = 8_000_000
    """Prompt tokens and tokens to generate of the requests that wait, together."""
    queue_timeout_s: float = 60.0
    """A request that got no worker in this time is refused."""
    connect_timeout_s: float = 10.0
    """For one try to connect to a worker, and for closing a connection."""
    reconnect_min_s: float = 0.05
    """Pause before the first try to reach a lost worker again; it doubles with each failure, with jitter."""
    reconnect_max_s: float = 5.0
    """The longest pause between tries. A connection that lasted longer than this starts again with the shortest."""
    refusal_pause_s: float = 0.05
    """A worker that refused a request despite its credit is asked again after this, or after its next frame."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError(
                f"reconnect_min_s is {self.reconnect_min_s}; it must not exceed reconnect_max_s, {self.reconnect_max_s}"
            )
