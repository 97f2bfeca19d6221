"""Processes that stay wait for their database; commands that end soon say that it is away."""

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
import structlog

from headrace.apps import storage
from headrace.apps.storage import StorageConfig, open_for_command, open_storage, wait_for_storage
from headrace.core.errors import ConfigError, StoreUnavailable
from headrace.core.ids import KeyId, TenantId


@pytest.fixture
def nowhere(tmp_path: Path) -> StorageConfig:
    """A database at a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return StorageConfig(f"postgresql://u@127.0.0.1:{port}/d", str(tmp_path), str(tmp_path))


async def test_a_command_is_told_that_the_database_is_away(nowhere: StorageConfig) -> None:
    with pytest.raises(StoreUnavailable):
        async with open_storage(nowhere):
            pytest.fail("there is no database")


@pytest.mark.parametrize(
    "url", ["db.internal/headrace", "postgresql://u:p@h:no/d", "postgresql://u:s3cret@h/d?nonsense=1"]
)
async def test_a_url_that_names_no_database_is_not_waited_for(nowhere: StorageConfig, url: str) -> None:
    with pytest.raises(ConfigError, match="database_url") as refusal:
        async with wait_for_storage(msgspec.structs.replace(nowhere, database_url=url)):
            pytest.fail("there is no database")
    assert "s3cret" not in str(refusal.value)


async def test_a_process_says_that_it_waits_and_goes_on_waiting(
    nowhere: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "STORE_RETRY_S", 0.01)

    async def enter() -> None:
        async with wait_for_storage(nowhere):
            pytest.fail("there is no database")

    with structlog.testing.capture_logs() as lines:
        waiting = asyncio.create_task(enter())
        async with asyncio.timeout(20):
            while len(lines) < 2:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert {(line["event"], line["log_level"]) for line in lines} == {("waiting for the database", "warning")}


async def test_a_process_goes_on_when_the_database_answers(
    nowhere: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [StoreUnavailable("away"), StoreUnavailable("away"), None]
    monkeypatch.setattr(storage, "STORE_RETRY_S", 0.0)

    async def open_(self: object) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(storage.PostgresStore, "open", open_)
    async with wait_for_storage(nowhere):
        assert answers == []


async def test_a_command_that_only_looks_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Headrace data"):
        async with open_for_command(None, tmp_path / "data"):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_command_that_puts_something_in_makes_the_place_for_it(tmp_path: Path) -> None:
    async with open_for_command(None, tmp_path / "data", create=True) as (store, _, _):
        await store.add_tenant(TenantId("t"), "t")
    async with open_for_command(None, tmp_path / "data") as (store, registry, _):
        assert await store.find_key(KeyId("none")) is None
        assert await registry.list() == []
