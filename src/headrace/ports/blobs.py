"""Immutable bytes by name: an object store, or a directory that behaves like one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol


class Blobs(Protocol):
    """Named, immutable-by-convention byte strings. Keys are ``/``-separated paths of ``[A-Za-z0-9._-]``.

    All methods raise ``InvalidRequest`` for a malformed key (empty, absolute, ``..``, other characters) and
    ``StoreUnavailable`` when the store cannot be reached. Readers never see a half-written object.
    """

    async def put(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        """Write an object at once.

        Raises:
            Conflict: it exists and ``overwrite`` is false. Of many racing writers exactly one succeeds.
        """
        ...

    async def put_file(self, key: str, path: Path, *, overwrite: bool = False) -> None:
        """Write an object from a file, streaming; otherwise as :meth:`put`."""
        ...

    async def get(self, key: str) -> bytes:
        """The whole object.

        Raises:
            NotFound: there is no such object.
        """
        ...

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; fewer at the object's end.

        Raises:
            NotFound: there is no such object.
        """
        ...

    async def size(self, key: str) -> int | None:
        """The object's size in bytes, or None if it does not exist."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[str]:
        """Keys that start with ``prefix``, in no particular order."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object; one that does not exist is not an error."""
        ...

    async def fetch(self, key: str, path: Path) -> None:
        """Copy an object to a local file atomically, sharing storage with the store where it can (hard link).

        Raises:
            NotFound: there is no such object.
        """
        ...
