"""``headrace key``: create and revoke API keys."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.apps.storage import open_for_command
from headrace.core.ids import KeyId, TenantId
from headrace.gateway.auth import new_key
from headrace.ports.store import Role

app = App(name="key", help="Create and revoke API keys.")

Config = Annotated[Path | None, Parameter(help="A configuration file with a [storage] table (a fleet).")]
Data = Annotated[Path | None, Parameter(help="Data directory of a local installation.")]


@app.command
def create(
    tenant: Annotated[str, Parameter(help="Whose key it is; a new tenant is made.")],
    *,
    role: Annotated[Role, Parameter(help="admin keys manage the platform.")] = Role.TENANT,
    config: Config = None,
    data: Data = None,
) -> None:
    """Create an API key and print it. It is shown this once: the database keeps only its hash."""

    async def run() -> str:
        plaintext, row = new_key(TenantId(tenant), role, created_at=time.time())
        async with open_for_command(config, data, create=True) as (store, _, _):
            await store.add_tenant(row.tenant_id, tenant)
            await store.add_key(row)
        return plaintext

    print(asyncio.run(run()))


@app.command
def revoke(
    key_id: Annotated[str, Parameter(help="The middle part of the key: hr-THIS-….")],
    *,
    config: Config = None,
    data: Data = None,
) -> None:
    """Revoke a key. Gateways refuse it once their cached copy is stale, after `key_ttl_s` (30 s) at most."""

    async def run() -> None:
        async with open_for_command(config, data) as (store, _, _):
            await store.revoke_key(KeyId(key_id))

    asyncio.run(run())
    print(f"revoked {key_id}")
