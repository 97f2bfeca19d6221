"""What a local installation needs before its processes start: a tenant with keys, and a model to serve."""

import asyncio
import secrets
import time
from pathlib import Path

import msgspec

from headrace.apps.local import Credentials, DataDir, write_private
from headrace.apps.logs import Progress
from headrace.core.errors import ConfigError
from headrace.core.ids import TenantId
from headrace.gateway.auth import new_key, split_key
from headrace.ports.store import Keys, ModelVersion, Role
from headrace.registry import demo
from headrace.registry.registry import Registry

LOCAL_TENANT = TenantId("local")
"""The tenant that owns the keys of a local installation."""

_MIN_SALT_SECRET_CHARS = 16
"""Of ``GatewayConfig.salt_secret``."""


async def ensure_keys(keys: Keys, directory: DataDir) -> Credentials:
    """The local keys: those in the credentials file if the database knows them, else new ones.

    Raises:
        ConfigError: the credentials file is damaged.
    """
    await keys.add_tenant(LOCAL_TENANT, "local")
    found = _read(directory.credentials)
    if found is not None and await _known(keys, found.api_key) and await _known(keys, found.admin_key):
        return found
    now = time.time()
    api_key, api_row = new_key(LOCAL_TENANT, Role.TENANT, created_at=now)
    admin_key, admin_row = new_key(LOCAL_TENANT, Role.ADMIN, created_at=now)
    await keys.add_key(api_row)
    await keys.add_key(admin_row)
    credentials = Credentials(api_key=api_key, admin_key=admin_key)
    write_private(directory.credentials, msgspec.json.format(msgspec.json.encode(credentials)))
    return credentials


async def ensure_model(registry: Registry, wanted: str | None, progress: Progress) -> ModelVersion:
    """The version to serve: an imported name, or something to import first; without a wish, the demo model.

    Raises:
        ModelNotFound: ``wanted`` is neither imported nor anything that can be.
        ModelFormatError: it is damaged or not supported.
        ConfigError: the demo model is wanted and its package is not installed.
    """
    if wanted is None:
        versions = await registry.list()
        if (found := next((version for version in versions if version.model == demo.NAME), None)) is not None:
            return found
        return (await registry.import_model("demo", progress=progress)).version
    if wanted.startswith("hf:") or await asyncio.to_thread(Path(wanted).exists):
        return (await registry.import_model(wanted, progress=progress)).version
    return await registry.resolve(wanted)


def ensure_salt_secret(directory: DataDir) -> str:
    """The secret from which tenants' cache scopes are derived: made once, the same for all gateways and starts.

    Raises:
        ConfigError: the file is damaged.
    """
    path = directory.root / "salt_secret"
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    secret = path.read_bytes().strip()
    if len(secret) < _MIN_SALT_SECRET_CHARS or not secret.isascii():
        raise ConfigError(
            f"{path}: damaged, {len(secret)} characters of the secret are left; remove it to have a new one made"
        )
    return secret.decode()


async def _known(keys: Keys, plaintext: str) -> bool:
    if (parsed := split_key(plaintext)) is None:
        return False
    key_id, digest = parsed
    row = await keys.find_key(key_id)
    return row is not None and not row.revoked and row.secret_sha256 == digest


def _read(path: Path) -> Credentials | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: damaged ({error}); remove it to have new keys made") from error
