"""Fixtures of real parts: a PostgreSQL server for the whole run, and an empty, migrated database for one test."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from headrace.adapters.store.embedded import EmbeddedPostgres
from headrace.adapters.store.migrate import migrate
from headrace.adapters.store.postgres import PostgresStore


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that tests share; none may stop it."""
    with EmbeddedPostgres(Path(tmp_path_factory.mktemp("postgres"))) as server:
        yield server


@pytest.fixture
def database_url(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database, dropped afterwards."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield postgres_server.url.replace("/postgres", f"/{name}", 1)
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def shared_database_url(postgres_server: EmbeddedPostgres) -> str:
    """The URL of a migrated database that the tests of one run share, one after the other."""
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute("CREATE DATABASE shared")
    url = postgres_server.url.replace("/postgres", "/shared", 1)
    asyncio.run(migrate(url))
    return url


@pytest.fixture
async def store(shared_database_url: str) -> AsyncIterator[PostgresStore]:
    """An open store without a row in it."""
    async with await psycopg.AsyncConnection.connect(shared_database_url, autocommit=True) as admin:
        # Deleting is faster than TRUNCATE, which makes new files and syncs them.
        await admin.execute("DELETE FROM api_keys; DELETE FROM tenants; DELETE FROM model_versions")
    async with PostgresStore(shared_database_url, timeout_s=5.0) as opened:
        yield opened
