"""Keys and the catalog in PostgreSQL, through a small pool.

Every operation is one statement in its own transaction, without prepared statements or session state, so a
transaction-mode pooler may stand between. Every operation ends within the time limit: a database that is gone, or
hangs, costs the caller no more than that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from headrace.adapters.store.errors import translated
from headrace.core.errors import ConfigError, Conflict, NotFound, StoreUnavailable
from headrace.core.ids import KeyId, ModelName, TenantId, VersionId
from headrace.ports.store import ApiKey, ModelVersion

T = TypeVar("T")
_Row = dict[str, Any]
_Connection = psycopg.AsyncConnection[_Row]

_RECONNECT_S = 2.0
"""How long the pool retries one lost connection by itself; then the next caller's need starts a new attempt at once.

Short, because the pool's pauses between attempts double.
"""


class PostgresStore:
    """``ports.store.Keys`` and ``ports.store.Catalog`` on PostgreSQL 14 or later."""

    def __init__(self, url: str, *, max_connections: int = 8, timeout_s: float = 2.0) -> None:
        """``timeout_s`` bounds every operation, waiting for a connection included.

        Raises:
            ConfigError: ``url`` is not a connection string.
        """
        _check_url(url)
        self._timeout_s = timeout_s
        self._late: set[asyncio.Task[Any]] = set()
        self._pool: AsyncConnectionPool[_Connection] = AsyncConnectionPool(
            url,
            kwargs={
                "autocommit": True,
                "prepare_threshold": None,
                "row_factory": dict_row,
                "connect_timeout": max(2, round(timeout_s)),
                "application_name": "headrace",
            },
            connection_class=psycopg.AsyncConnection[_Row],
            min_size=1,
            max_size=max_connections,
            timeout=timeout_s,
            max_waiting=1024,
            reconnect_timeout=_RECONNECT_S,
            open=False,
            name="store",
        )

    async def open(self) -> None:
        """Connect.

        Raises:
            StoreUnavailable: the database cannot be reached now. The store is open all the same, and goes on trying.
        """
        await self._pool.open()
        await self._read("ping", {})

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._pool.close(timeout=self._timeout_s)

    async def __aenter__(self) -> "PostgresStore":
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Keys

    async def add_tenant(self, tenant_id: TenantId, name: str) -> None:
        await self._write("add_tenant", {"tenant_id": tenant_id, "name": name})

    async def add_key(self, key: ApiKey) -> None:
        try:
            await self._write("add_key", {**msgspec.structs.asdict(key), "role": key.role.value})
        except psycopg.errors.UniqueViolation as error:
            raise Conflict(f"there is a key {key.key_id!r} already") from error
        except psycopg.errors.ForeignKeyViolation as error:
            raise NotFound(f"there is no tenant {key.tenant_id!r}") from error

    async def find_key(self, key_id: KeyId) -> ApiKey | None:
        if not _storable(key_id):
            return None
        rows = await self._read("find_key", {"key_id": key_id})
        return msgspec.convert(rows[0], ApiKey) if rows else None

    async def revoke_key(self, key_id: KeyId) -> None:
        if not _storable(key_id) or not await self._write("revoke_key", {"key_id": key_id}):
            raise NotFound(f"there is no key {key_id!r}")

    # Catalog

    async def add_version(self, version: ModelVersion) -> bool:
        if await self._write("add_version", msgspec.structs.asdict(version)):
            return True
        known = await self.find_version(version.model, version.version)
        if known is not None and known.manifest != version.manifest:
            raise Conflict(
                f"{version.model}@{version.version} names another manifest ({known.manifest}), not {version.manifest}"
            )
        return False

    async def find_version(self, model: ModelName, version: VersionId | None = None) -> ModelVersion | None:
        if not _storable(model) or not _storable(version or ""):
            return None
        if version is None:
            rows = await self._read("find_newest_version", {"model": model})
        else:
            rows = await self._read("find_version", {"model": model, "version": version})
        return msgspec.convert(rows[0], ModelVersion) if rows else None

    async def list_versions(self) -> list[ModelVersion]:
        return msgspec.convert(await self._read("list_versions", {}), list[ModelVersion])

    # How statements run

    async def _read(self, name: str, values: Mapping[str, object]) -> list[_Row]:
        """Run a statement that changes nothing; connections that turn out to be dead are passed over.

        After a restart of the database every pooled connection is dead, and only use tells.
        """
        return await self._bounded(lambda: self._run(name, values, again=True))

    async def _write(self, name: str, values: Mapping[str, object]) -> list[_Row]:
        """Run a statement once: whether one whose connection broke took effect is not known.

        So that a pooled connection that died long ago does not count as that, each is tried before it is used.
        """
        return await self._bounded(lambda: self._run(name, values, again=False))

    async def _run(self, name: str, values: Mapping[str, object], *, again: bool) -> list[_Row]:
        for _ in range(self._pool.max_size):
            sent = False
            try:
                async with self._pool.connection() as connection:
                    if not again:
                        await self._pool.check_connection(connection)
                    sent = True
                    return await self._execute(connection, name, values)
            except PoolTimeout:
                raise
            except (psycopg.OperationalError, psycopg.InterfaceError):
                if sent and not again:
                    raise
        # Every connection that the pool had was dead; one that it makes now is not.
        async with self._pool.connection() as connection:
            return await self._execute(connection, name, values)

    async def _execute(self, connection: _Connection, name: str, values: Mapping[str, object]) -> list[_Row]:
        cursor = await connection.execute(statement(name), values)
        return await cursor.fetchall() if cursor.description else []

    async def _bounded(self, operation: Callable[[], Awaitable[T]]) -> T:
        # A task of its own: cancelling a statement asks the server, and a server that hangs does not answer that
        # either. The caller goes on its way; the task keeps its connection, one of a bounded number, until it learns.
        task = asyncio.ensure_future(operation())
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._leave(task)
            raise
        if not done:
            self._leave(task)
            raise StoreUnavailable(f"the database did not answer within {self._timeout_s} s", retry_after_s=1.0)
        with translated():
            return task.result()

    def _leave(self, task: "asyncio.Future[Any]") -> None:
        assert isinstance(task, asyncio.Task)
        task.cancel()
        self._late.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller was told long ago


def _check_url(url: str) -> None:
    # Else the pool would take it for a database that is away. Nothing of it is repeated: it may hold a password.
    try:
        ports = str(conninfo_to_dict(url).get("port", "")).split(",")
        if not all(port.isdecimal() for port in ports if port):
            raise ValueError
    except (psycopg.ProgrammingError, ValueError):
        raise ConfigError(
            "database_url is not a PostgreSQL connection string; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from None


def _storable(text: str) -> bool:
    """Whether PostgreSQL's text type can hold ``text``; what it cannot hold is in no row."""
    return "\0" not in text and text.encode(errors="replace").decode() == text


@cache
def statement(name: str) -> bytes:
    """The SQL in ``sql/<name>.sql``."""
    return files("headrace.adapters.store").joinpath(f"sql/{name}.sql").read_bytes().strip()
