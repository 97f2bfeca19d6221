"""Opening what survives: the database and the blobs, as every process's configuration names them."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from headrace.adapters.blobs.files import FileBlobs
from headrace.adapters.store.postgres import PostgresStore
from headrace.registry.registry import Registry


class StorageConfig(msgspec.Struct, frozen=True):
    """Where the platform's state lies."""

    database_url: str
    """``postgresql://…``; any PostgreSQL from 15 on, also behind a transaction-mode pooler."""
    blobs: str
    """A directory for model files."""
    cache: str
    """A directory on this machine's disk for unpacked models."""


@contextlib.asynccontextmanager
async def open_storage(config: StorageConfig) -> AsyncIterator[tuple[PostgresStore, Registry]]:
    """The database and the registry over it, closed on the way out."""
    store = PostgresStore(config.database_url)
    await store.open()
    try:
        yield store, Registry(store, FileBlobs(Path(config.blobs)))
    finally:
        await store.close()
