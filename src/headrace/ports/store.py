"""What must survive: small facts with one arbiter each, in narrow Protocols over one database.

All methods raise ``StoreUnavailable`` when the database cannot be reached.
"""

import enum
from typing import Protocol

import msgspec

from headrace.core.ids import Digest, KeyId, ModelName, TenantId, VersionId


class Role(enum.StrEnum):
    """What a key may do."""

    ADMIN = "admin"
    """Manage the platform."""
    TENANT = "tenant"
    """Use it on a tenant's behalf."""


class ApiKey(msgspec.Struct, frozen=True):
    """A credential as it is stored: never the secret, only its hash."""

    key_id: KeyId
    tenant_id: TenantId
    role: Role
    secret_sha256: bytes
    created_at: float
    """Unix seconds."""
    revoked: bool = False


class ModelVersion(msgspec.Struct, frozen=True):
    """An immutable version of a model: a name for the manifest that says what it consists of."""

    model: ModelName
    version: VersionId
    manifest: Digest
    """The blob that holds the manifest is ``manifests/<hex>``."""
    num_bytes: int
    source: str
    """Where it was imported from, for people."""
    created_at: float


class Keys(Protocol):
    """API keys and the tenants they belong to."""

    async def add_tenant(self, tenant_id: TenantId, name: str) -> None:
        """Create a tenant; one that exists is left as it is."""
        ...

    async def add_key(self, key: ApiKey) -> None:
        """Create a key.

        Raises:
            Conflict: the key id exists.
            NotFound: the tenant does not exist.
        """
        ...

    async def find_key(self, key_id: KeyId) -> ApiKey | None:
        """The key, revoked or not; None if there is none."""
        ...

    async def revoke_key(self, key_id: KeyId) -> None:
        """Mark a key revoked.

        Raises:
            NotFound: there is no such key.
        """
        ...


class Catalog(Protocol):
    """Models and their versions."""

    async def add_version(self, version: ModelVersion) -> bool:
        """Record a version. False if this very version exists already: versions are immutable, nothing changes."""
        ...

    async def find_version(self, model: ModelName, version: VersionId | None = None) -> ModelVersion | None:
        """That version, or the newest of the model; None if there is none."""
        ...

    async def list_versions(self) -> list[ModelVersion]:
        """All versions, by model name and then newest first."""
        ...
