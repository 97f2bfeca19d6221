"""Keys, their cache, and what happens while the store is away."""

import asyncio

import pytest

from headrace.core.clock import ManualClock
from headrace.core.errors import Conflict, StoreUnavailable, Unauthenticated
from headrace.core.ids import KeyId, TenantId
from headrace.gateway.auth import Authenticator, cache_salt, new_key
from headrace.gateway.config import GatewayConfig
from headrace.ports.store import ApiKey, Role


class Store:
    """Keys in memory; ``gate`` holds look-ups back."""

    def __init__(self, *rows: ApiKey) -> None:
        self.rows = {row.key_id: row for row in rows}
        self.down = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_lookups = 0

    async def find_key(self, key_id: KeyId) -> ApiKey | None:
        self.num_lookups += 1
        await self.gate.wait()
        if self.down:
            raise StoreUnavailable("down")
        return self.rows.get(key_id)

    async def add_tenant(self, tenant_id, name):
        raise Conflict("not here")

    add_key = revoke_key = add_tenant


def setup(**limits):
    key, row = new_key(TenantId("t"), Role.TENANT, created_at=0.0)
    store, clock = Store(row), ManualClock()
    config = GatewayConfig(salt_secret="x" * 16, **limits)
    return f"Bearer {key}", row, store, clock, Authenticator(store, config, clock)


async def test_a_key_is_found_once_and_then_cached():
    header, row, store, clock, auth = setup(key_ttl_s=10)
    for _ in range(3):
        assert await auth.authenticate(header) == row
    assert store.num_lookups == 1
    clock.advance(10)
    await auth.authenticate(header)
    assert store.num_lookups == 2


async def test_many_callers_make_one_lookup():
    header, row, store, _, auth = setup()
    store.gate.clear()
    callers = [asyncio.create_task(auth.authenticate(header)) for _ in range(50)]
    await asyncio.sleep(0)
    callers[0].cancel()
    store.gate.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [row] * 49
    assert store.num_lookups == 1


async def test_an_unknown_key_is_remembered_for_a_while():
    header, row, store, clock, auth = setup(key_missing_ttl_s=5)
    store.rows.clear()
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await auth.authenticate(header)
    assert store.num_lookups == 1
    store.rows[row.key_id] = row
    clock.advance(5)
    assert await auth.authenticate(header) == row


async def test_made_up_keys_do_not_push_out_real_ones():
    header, row, store, _, auth = setup(key_cache_size=4)
    await auth.authenticate(header)
    for _ in range(20):
        other, _ = new_key(TenantId("t"), Role.TENANT, created_at=0.0)
        with pytest.raises(Unauthenticated):
            await auth.authenticate(f"Bearer {other}")
    num_lookups = store.num_lookups
    assert await auth.authenticate(header) == row
    assert store.num_lookups == num_lookups


async def test_an_outage_is_bridged_for_a_bounded_time():
    header, row, store, clock, auth = setup(key_ttl_s=10, key_stale_s=100)
    await auth.authenticate(header)
    store.down = True
    clock.advance(99)
    assert await auth.authenticate(header) == row
    assert auth.usable
    clock.advance(2)
    with pytest.raises(StoreUnavailable):
        await auth.authenticate(header)
    assert not auth.usable
    store.down = False
    assert await auth.authenticate(header) == row
    assert auth.usable


async def test_during_an_outage_the_store_is_not_asked_for_every_request():
    header, _, store, clock, auth = setup(key_ttl_s=10)
    await auth.authenticate(header)
    store.down = True
    clock.advance(11)
    for _ in range(10):
        await auth.authenticate(header)
    assert store.num_lookups == 2


async def test_a_wrong_secret_is_refused_during_an_outage_too():
    header, _, store, clock, auth = setup(key_ttl_s=10)
    await auth.authenticate(header)
    store.down = True
    clock.advance(11)
    with pytest.raises(Unauthenticated):
        await auth.authenticate(header[:-4] + "AAAA")


async def test_an_unknown_key_in_an_outage_is_not_called_wrong():
    header, _, store, _, auth = setup()
    store.down = True
    with pytest.raises(StoreUnavailable) as raised:
        await auth.authenticate(header)
    assert raised.value.retry_after_s is not None


async def test_a_store_that_hangs_counts_as_away():
    header, _, store, _, auth = setup(key_lookup_timeout_s=0.01)
    store.gate.clear()
    with pytest.raises(StoreUnavailable):
        await auth.authenticate(header)
    assert not await auth.probe()
    store.gate.set()
    assert await auth.probe()


async def test_a_revoked_key_is_refused():
    header, row, store, _, auth = setup()
    store.rows[row.key_id] = ApiKey(row.key_id, row.tenant_id, row.role, row.secret_sha256, 0.0, revoked=True)
    with pytest.raises(Unauthenticated, match="revoked"):
        await auth.authenticate(header)


def test_keys_are_unlike_each_other_and_the_secret_is_not_stored():
    (a, row_a), (b, row_b) = (new_key(TenantId("t"), Role.TENANT, created_at=1.0) for _ in range(2))
    assert a != b
    assert row_a.key_id != row_b.key_id
    assert row_a.key_id in a
    assert a.rpartition("-")[2].encode() not in row_a.secret_sha256
    assert len(row_a.secret_sha256) == 32


def test_the_salt_depends_on_tenant_and_secret_alone():
    a = cache_salt("s" * 16, TenantId("a"))
    assert a == cache_salt("s" * 16, TenantId("a"))
    assert len({a, cache_salt("s" * 16, TenantId("b")), cache_salt("z" * 16, TenantId("a"))}) == 3
