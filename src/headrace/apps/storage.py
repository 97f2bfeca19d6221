"""Opening what survives, the database and the blobs: as a configuration names them, or as a data directory has them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import structlog

from headrace.adapters.blobs.files import FileBlobs
from headrace.adapters.store.embedded import EmbeddedPostgres
from headrace.adapters.store.migrate import migrate
from headrace.adapters.store.postgres import PostgresStore
from headrace.apps.local import DataDir, default_data_dir
from headrace.core.config import load
from headrace.core.errors import ConfigError, StoreUnavailable
from headrace.registry.registry import Registry

STORE_RETRY_S = 1.0
"""Between two looks at a database that is away."""

log = structlog.get_logger(__name__)


class StorageConfig(msgspec.Struct, frozen=True):
    """Where the platform's state lies."""

    database_url: str
    """``postgresql://…``; also behind a transaction-mode pooler."""
    blobs: str
    """A directory for model files."""
    cache: str
    """A directory on this machine's disk for unpacked models."""


class StorageFile(msgspec.Struct, frozen=True):
    """A configuration file of which only the storage matters."""

    storage: StorageConfig


@contextlib.asynccontextmanager
async def open_storage(config: StorageConfig) -> AsyncIterator[tuple[PostgresStore, Registry]]:
    """The database and the registry over it, closed on the way out.

    Raises:
        StoreUnavailable: the database does not answer.
    """
    store = PostgresStore(config.database_url)
    try:
        await store.open()
        yield store, Registry(store, FileBlobs(Path(config.blobs)))
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def wait_for_storage(config: StorageConfig) -> AsyncIterator[tuple[PostgresStore, Registry]]:
    """As :func:`open_storage`, for a process that stays: while the database is away it says so and tries again."""
    store = PostgresStore(config.database_url)
    try:
        while True:
            try:
                await store.open()
                break
            except StoreUnavailable as error:
                log.warning("waiting for the database", reason=str(error))
                await asyncio.sleep(STORE_RETRY_S)
        yield store, Registry(store, FileBlobs(Path(config.blobs)))
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def open_for_command(
    config: Path | None, data: Path | None, *, create: bool = False
) -> AsyncIterator[tuple[PostgresStore, Registry, Path]]:
    """Storage for a command that ends soon.

    Gives the store, the registry, and the directory for unpacked models. With ``config``, those that its ``[storage]``
    table names. Else those of a local data directory: the database of the ``headrace up`` that runs there, or one
    started for as long as the command takes. ``create`` makes a data directory that is not there: for commands that put
    something in; one that only looks leaves no trace.

    Raises:
        ConfigError: both were given, the configuration is wrong, or there is no data directory and ``create`` is false.
        StoreUnavailable: the database does not answer.
    """
    if config is not None:
        if data is not None:
            raise ConfigError("give --config or --data, not both")
        async with _open_all(load(config, StorageFile).storage) as opened:
            yield opened
        return
    directory = DataDir(data or default_data_dir())
    if create:
        directory.create()
    elif not directory.postgres.exists():
        raise ConfigError(
            f"there is no Headrace data in {directory.root}; name its directory with --data, start one with "
            "`headrace up`, or give --config"
        )
    if directory.in_use():
        async with _open_all(load(directory.storage, StorageFile).storage) as opened:
            yield opened
        return
    with directory.lock():
        postgres = EmbeddedPostgres(directory.postgres)
        url = await asyncio.to_thread(postgres.start)
        try:
            await migrate(url)
            async with _open_all(StorageConfig(url, str(directory.blobs), str(directory.cache))) as opened:
                yield opened
        finally:
            await asyncio.to_thread(postgres.stop)


@contextlib.asynccontextmanager
async def _open_all(config: StorageConfig) -> AsyncIterator[tuple[PostgresStore, Registry, Path]]:
    async with open_storage(config) as (store, registry):
        yield store, registry, Path(config.cache)
