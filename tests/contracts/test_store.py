"""What every store does. There is one today, PostgreSQL; the suite runs against a real server."""

import asyncio

import pytest

from headrace.adapters.store.postgres import PostgresStore
from headrace.core.errors import Conflict, NotFound
from headrace.core.ids import Digest, KeyId, ModelName, TenantId, VersionId
from headrace.ports.store import ApiKey, Catalog, Keys, ModelVersion, Role

ACME = TenantId("acme")


@pytest.fixture
def keys(store: PostgresStore) -> Keys:
    return store


@pytest.fixture
def catalog(store: PostgresStore) -> Catalog:
    return store


def key(key_id: str, **changes: object) -> ApiKey:
    fields: dict[str, object] = {
        "tenant_id": ACME,
        "role": Role.TENANT,
        "secret_sha256": bytes(range(32)),
        "created_at": 1_700_000_000.123456,
    }
    return ApiKey(key_id=KeyId(key_id), **{**fields, **changes})  # type: ignore[arg-type]  # fields come by name


def version(model: str, digits: str, **changes: object) -> ModelVersion:
    fields: dict[str, object] = {
        "manifest": Digest("sha256:" + digits.ljust(64, "0")),
        "num_bytes": 2**40 + 1,
        "source": "a test, with an umlaut ü",
        "created_at": 1_700_000_000.5,
    }
    return ModelVersion(model=ModelName(model), version=VersionId(digits.ljust(12, "0")), **{**fields, **changes})  # type: ignore[arg-type]  # fields come by name


async def test_a_key_comes_back_as_it_was_written(keys: Keys) -> None:
    await keys.add_tenant(ACME, "Acme")
    written = key("k1", role=Role.ADMIN)
    await keys.add_key(written)
    assert await keys.find_key(KeyId("k1")) == written


async def test_an_unknown_key_is_none(keys: Keys) -> None:
    assert await keys.find_key(KeyId("nobody")) is None


@pytest.mark.parametrize("key_id", ["", "a\0b", "\ud800", "'; DROP TABLE api_keys; --", "x" * 10_000])
async def test_a_key_id_of_any_text_is_only_looked_up(keys: Keys, key_id: str) -> None:
    assert await keys.find_key(KeyId(key_id)) is None


async def test_a_tenant_that_exists_is_left_as_it_is(keys: Keys) -> None:
    await keys.add_tenant(ACME, "Acme")
    await keys.add_tenant(ACME, "Other")
    await keys.add_key(key("k1"))


async def test_a_second_key_with_the_same_id_conflicts_and_changes_nothing(keys: Keys) -> None:
    await keys.add_tenant(ACME, "Acme")
    await keys.add_key(key("k1"))
    with pytest.raises(Conflict, match="k1"):
        await keys.add_key(key("k1", role=Role.ADMIN))
    assert await keys.find_key(KeyId("k1")) == key("k1")


async def test_of_racing_writers_of_a_key_one_wins(keys: Keys) -> None:
    await keys.add_tenant(ACME, "Acme")
    outcomes = await asyncio.gather(*(keys.add_key(key("k1")) for _ in range(12)), return_exceptions=True)
    assert outcomes.count(None) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 11


async def test_a_key_needs_its_tenant(keys: Keys) -> None:
    with pytest.raises(NotFound, match="acme"):
        await keys.add_key(key("k1"))


async def test_a_revoked_key_is_found_and_says_so(keys: Keys) -> None:
    await keys.add_tenant(ACME, "Acme")
    await keys.add_key(key("k1"))
    await keys.revoke_key(KeyId("k1"))
    await keys.revoke_key(KeyId("k1"))
    assert await keys.find_key(KeyId("k1")) == key("k1", revoked=True)


@pytest.mark.parametrize("key_id", ["nobody", "a\0b"])
async def test_revoking_an_unknown_key_is_an_error(keys: Keys, key_id: str) -> None:
    with pytest.raises(NotFound):
        await keys.revoke_key(KeyId(key_id))


async def test_a_version_comes_back_as_it_was_written(catalog: Catalog) -> None:
    assert await catalog.add_version(version("m", "aa"))
    assert await catalog.find_version(ModelName("m"), VersionId("aa".ljust(12, "0"))) == version("m", "aa")


async def test_recording_a_version_again_says_so_and_changes_nothing(catalog: Catalog) -> None:
    assert await catalog.add_version(version("m", "aa"))
    assert not await catalog.add_version(version("m", "aa", source="elsewhere", created_at=1.0))
    assert await catalog.find_version(ModelName("m")) == version("m", "aa")


async def test_a_version_cannot_come_to_mean_another_manifest(catalog: Catalog) -> None:
    await catalog.add_version(version("m", "aa"))
    with pytest.raises(Conflict, match="another manifest"):
        await catalog.add_version(version("m", "aa", manifest=Digest("sha256:" + "f" * 64)))
    assert await catalog.find_version(ModelName("m")) == version("m", "aa")


async def test_of_racing_writers_of_a_version_one_creates_it(catalog: Catalog) -> None:
    outcomes = await asyncio.gather(*(catalog.add_version(version("m", "aa")) for _ in range(12)))
    assert sorted(outcomes) == [False] * 11 + [True]


async def test_the_newest_version_is_the_last_that_arrived_whatever_the_clocks_say(catalog: Catalog) -> None:
    await catalog.add_version(version("m", "aa", created_at=2_000_000_000.0))
    await catalog.add_version(version("m", "bb", created_at=1_000_000_000.0))
    await catalog.add_version(version("m", "aa"))
    found = await catalog.find_version(ModelName("m"))
    assert found is not None
    assert found.version.startswith("bb")


@pytest.mark.parametrize(("model", "digits"), [("x", None), ("m", "bb"), ("m", "a\0"), ("\0", None)])
async def test_an_unknown_version_is_none(catalog: Catalog, model: str, digits: str | None) -> None:
    await catalog.add_version(version("m", "aa"))
    assert await catalog.find_version(ModelName(model), None if digits is None else VersionId(digits)) is None


async def test_versions_are_listed_by_model_and_newest_first(catalog: Catalog) -> None:
    for model, digits in (("b", "01"), ("a-1", "02"), ("B", "03"), ("a", "04"), ("b", "05")):
        await catalog.add_version(version(model, digits))
    listed = [(found.model, found.version[:2]) for found in await catalog.list_versions()]
    assert listed == [("B", "03"), ("a", "04"), ("a-1", "02"), ("b", "05"), ("b", "01")]
