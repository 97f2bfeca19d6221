"""What importers hand to the registry."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked model directory, ready to be stored."""

    files: dict[str, Path]
    """Where each file lies, by its path in the model directory."""
    source: str
    licence: str
    name: str
    """What to call the model if the user does not say."""
