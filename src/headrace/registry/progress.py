"""How slow steps of the registry say how far they are."""

from typing import Protocol


class Progress(Protocol):
    """Called often, from any thread, with what is being done and how far it is, in bytes; it must be cheap."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int, /) -> None: ...


def silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Nobody listens."""
