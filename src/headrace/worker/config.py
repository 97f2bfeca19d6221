"""What a worker's operator may set."""

import msgspec


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker listens, when it gives up on a client, and when it gives up on its engine."""

    listen: str = "127.0.0.1:7700"
    """Where clients connect: ``HOST:PORT`` (with TLS; port 0 takes a free one) or ``unix:PATH``."""
    http_listen: str = "127.0.0.1:7701"
    """Where ``/healthz``, ``/readyz`` and ``/metrics`` answer: ``HOST:PORT``, without TLS and without secrets."""
    max_connections: int = 128
    """Clients at once; one more is told so and let go."""
    heartbeat_s: float = 0.5
    """A client hears something at least this often, and the engine's health is looked at as often."""
    handshake_timeout_s: float = 5.0
    """From the connection's start to ``Hello``; the same again for TLS before it."""
    max_outgoing_bytes: int = 8 * 1024 * 1024
    """A client that leaves more than this unread is dropped and its sequences are aborted."""
    max_held: int = 64
    """Sequences that arrive on credit that was given elsewhere meanwhile; they wait here, further ones are refused."""
    stall_timeout_s: float = 30.0
    """The worker is unhealthy when work waits and no step has finished for so long."""
    exit_when_stuck_s: float = 60.0
    """How long it may stay unhealthy before the process gives up."""
    drain_timeout_s: float = 600.0
    """After this a drain stops to wait, and what still runs is lost."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "handshake_timeout_s", "stall_timeout_s", "exit_when_stuck_s", "drain_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        for name in ("max_connections", "max_outgoing_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_held < 0:
            raise ValueError(f"max_held is {self.max_held}; it must not be negative")
