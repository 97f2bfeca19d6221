"""The store against a database that is restarted, frozen, or gone; its migrations; the plans of its hot queries."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from headrace.adapters.store.embedded import EmbeddedPostgres
from headrace.adapters.store.migrate import Migration, available, migrate
from headrace.adapters.store.postgres import PostgresStore, statement
from headrace.core.errors import ConfigError, HeadraceError, StoreUnavailable
from headrace.core.ids import KeyId, TenantId

LIMIT_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server of this file's own: its tests stop and freeze it."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("server") / "postgres") as running:
        asyncio.run(migrate(running.url))
        yield running


@pytest.fixture
async def own_store(server: EmbeddedPostgres) -> AsyncIterator[PostgresStore]:
    server.start()
    async with PostgresStore(server.url, timeout_s=LIMIT_S) as opened:
        yield opened


async def until_it_answers(store: PostgresStore) -> None:
    """Call until the database is back; each call is bounded by itself."""
    deadline = time.monotonic() + 30
    while True:
        try:
            await store.find_key(KeyId("k"))
            return
        except StoreUnavailable:
            assert time.monotonic() < deadline, "the store does not recover by itself"
            await asyncio.sleep(0.02)


async def test_a_restart_between_two_calls_is_not_noticed(server: EmbeddedPostgres, own_store: PostgresStore) -> None:
    await asyncio.gather(*(own_store.find_key(KeyId("k")) for _ in range(20)))
    server.stop()
    server.start()
    assert await own_store.find_key(KeyId("k")) is None
    server.stop()
    server.start()
    await own_store.add_tenant(TenantId("t"), "T")


async def test_a_database_that_is_gone_costs_a_bounded_wait_and_its_return_is_found(
    server: EmbeddedPostgres, own_store: PostgresStore
) -> None:
    server.stop()
    for _ in range(2):
        started = time.monotonic()
        outcomes = await asyncio.gather(
            *(own_store.find_key(KeyId("k")) for _ in range(30)),
            own_store.add_tenant(TenantId("t"), "T"),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
        assert time.monotonic() - started < LIMIT_S + 1.5
    server.start()
    await until_it_answers(own_store)


async def test_a_frozen_database_costs_a_bounded_wait_and_thawing_it_is_enough(
    server: EmbeddedPostgres, own_store: PostgresStore
) -> None:
    with psycopg.connect(server.url, autocommit=True) as admin:
        rows = admin.execute("SELECT pid FROM pg_stat_activity WHERE pid IS NOT NULL AND pid <> pg_backend_pid()")
        pids = [server.pid, *(pid for (pid,) in rows.fetchall())]
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await own_store.find_key(KeyId("k"))
        assert time.monotonic() - started < LIMIT_S + 1.5
    finally:
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGCONT)
    await until_it_answers(own_store)


async def test_opening_without_a_database_says_so_and_goes_on_trying(server: EmbeddedPostgres) -> None:
    server.stop()
    store = PostgresStore(server.url, timeout_s=1.0)
    try:
        with pytest.raises(StoreUnavailable):
            await store.open()
        server.start()
        await until_it_answers(store)
    finally:
        await store.close()


async def test_a_refused_connection_says_what_the_database_said(server: EmbeddedPostgres) -> None:
    server.start()
    with pytest.raises(StoreUnavailable, match="password authentication failed"):
        await migrate(server.url.replace("headrace:", "headrace:wrong", 1))


async def test_a_database_without_our_schema_is_a_configuration_error(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        with pytest.raises(ConfigError, match="migrate it"):
            await store.find_key(KeyId("k"))


async def test_no_prepared_statement_and_no_session_state_is_left(shared_database_url: str) -> None:
    async with PostgresStore(shared_database_url, max_connections=1) as store:
        for _ in range(20):
            await store.find_key(KeyId("k"))
        async with store._pool.connection() as connection:
            cursor = await connection.execute("SELECT count(*) AS n FROM pg_prepared_statements")
            assert await cursor.fetchall() == [{"n": 0}]


@pytest.mark.parametrize(
    ("name", "values", "index"),
    [
        ("find_key", {"key_id": "key-77"}, "api_keys_pkey"),
        ("find_version", {"model": "model-7", "version": "v-77"}, "model_versions_pkey"),
        ("find_newest_version", {"model": "model-7"}, "model_versions_by_arrival"),
    ],
)
async def test_hot_queries_read_an_index_and_neither_scan_nor_sort(
    database_url: str, name: str, values: dict[str, str], index: str
) -> None:
    await migrate(database_url)
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("INSERT INTO tenants VALUES ('t', 'T')")
        admin.execute("INSERT INTO api_keys SELECT 'key-' || n, 't', 'tenant', '', 0 FROM generate_series(1, 5000) n")
        admin.execute(
            "INSERT INTO model_versions SELECT 'model-' || n % 20, 'v-' || n, 'sha256:', 0, '', 0"
            " FROM generate_series(1, 5000) n"
        )
        admin.execute("ANALYZE")
        plan = "\n".join(row[0] for row in admin.execute(b"EXPLAIN " + statement(name), values).fetchall())
    assert index in plan
    assert "Seq Scan" not in plan
    assert "Sort" not in plan


async def test_migrating_again_does_nothing(database_url: str) -> None:
    assert await migrate(database_url) == [migration.name for migration in available()]
    assert await migrate(database_url) == []


async def test_many_processes_that_start_at_once_migrate_once(database_url: str) -> None:
    outcomes = await asyncio.gather(*(migrate(database_url) for _ in range(8)))
    assert sorted(map(len, outcomes)) == [0] * 7 + [len(available())]


async def test_an_edited_migration_is_refused(database_url: str) -> None:
    await migrate(database_url, [Migration(1, "0001_a.sql", "CREATE TABLE a (x int)")])
    with pytest.raises(ConfigError, match=r"0001_a\.sql was applied to the database and edited afterwards"):
        await migrate(database_url, [Migration(1, "0001_a.sql", "CREATE TABLE a (y int)")])


async def test_a_database_of_a_later_program_is_refused(database_url: str) -> None:
    first, second = Migration(1, "0001_a.sql", "SELECT 1"), Migration(2, "0002_b.sql", "SELECT 2")
    await migrate(database_url, [first, second])
    with pytest.raises(ConfigError, match=r"0002_b\.sql, which this program does not know"):
        await migrate(database_url, [first])


async def test_a_migration_that_fails_leaves_nothing_behind(database_url: str) -> None:
    good = Migration(1, "0001_a.sql", "CREATE TABLE a (x int); CREATE TABLE b (x int)")
    with pytest.raises(HeadraceError, match="division by zero"):
        await migrate(database_url, [good, Migration(2, "0002_b.sql", "SELECT 1 / 0")])
    assert await migrate(database_url, [good]) == ["0001_a.sql"]


def test_the_migrations_are_numbered_without_gaps() -> None:
    assert [migration.number for migration in available()] == list(range(1, len(available()) + 1))
