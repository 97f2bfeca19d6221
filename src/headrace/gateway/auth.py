"""Who is calling: bearer keys, looked up by id, compared by hash, cached for a bounded time.

A key reads ``hr-<key_id>-<secret>``. The store holds the SHA-256 of the secret; the secret carries 256 random bits,
so a plain hash is enough and nothing slow is needed.
"""

import asyncio
import hashlib
import hmac
import re
import secrets

import msgspec
from cachetools import LRUCache

from headrace.core.clock import Clock
from headrace.core.errors import StoreUnavailable, Unauthenticated
from headrace.core.ids import KeyId, TenantId
from headrace.gateway.config import GatewayConfig
from headrace.ports.store import ApiKey, Keys, Role

_KEY = re.compile(r"hr-([0-9a-f]{8,32})-([A-Za-z0-9_-]{16,128})")
_RETRY_STALE_S = 1.0
"""After a failed refresh a cached key is used for so long before the store is asked again."""

_WRONG = "Incorrect API key provided. Keys look like 'hr-<id>-<secret>'; send one as 'Authorization: Bearer <key>'."


def new_key(tenant_id: TenantId, role: Role, *, created_at: float) -> tuple[str, ApiKey]:
    """Make a credential: the text to show once, and what to store. ``created_at`` is in Unix seconds."""
    key_id = KeyId(secrets.token_hex(8))
    secret = secrets.token_urlsafe(32)
    stored = ApiKey(key_id, tenant_id, role, hashlib.sha256(secret.encode()).digest(), created_at)
    return f"hr-{key_id}-{secret}", stored


def split_key(plaintext: str) -> tuple[KeyId, bytes] | None:
    """The key's id and the SHA-256 of its secret; None if the text is not of the right form."""
    parsed = _KEY.fullmatch(plaintext)
    return None if parsed is None else (KeyId(parsed[1]), hashlib.sha256(parsed[2].encode()).digest())


def cache_salt(secret: str, tenant_id: TenantId) -> str:
    """The tenant's prefix-cache scope: equal in all gateways, and nothing that a caller sends changes it."""
    return hmac.new(secret.encode(), tenant_id.encode(), hashlib.sha256).hexdigest()[:32]


class _Entry(msgspec.Struct):
    key: ApiKey | None
    """None: the store said there is no such key."""
    fetched_at: float
    fresh_until: float


class Authenticator:
    """Checks ``Authorization`` headers against the store through a cache.

    While the store is away, a key that was valid within ``key_stale_s`` goes on working; an unknown key is answered
    503 and not 401, because nobody knows. One look-up at a time is made for each key id.
    """

    def __init__(self, keys: Keys, config: GatewayConfig, clock: Clock) -> None:
        self._keys = keys
        self._config = config
        self._clock = clock
        self._cache: LRUCache[KeyId, _Entry] = LRUCache(config.key_cache_size)
        # Made-up ids must not push real keys out, so misses are kept apart.
        self._missing: LRUCache[KeyId, _Entry] = LRUCache(config.key_cache_size)
        self._lookups: dict[KeyId, asyncio.Task[_Entry]] = {}
        self._permits = asyncio.Semaphore(config.max_key_lookups)
        self._last_failure: float | None = None

    @property
    def usable(self) -> bool:
        """Whether some caller can be let in: the store answered last time, or cached keys are left."""
        if self._last_failure is None:
            return True
        now = self._clock.monotonic()
        return any(now - entry.fetched_at <= self._config.key_stale_s for entry in self._cache.values())

    async def probe(self) -> bool:
        """Ask the store for a key that does not exist, to learn whether it answers; then as :attr:`usable`."""
        try:
            await self._fetch(KeyId("0" * 16))
        except StoreUnavailable:
            return self.usable
        return True

    async def authenticate(self, authorization: str | None) -> ApiKey:
        """The key behind an ``Authorization`` header.

        Raises:
            Unauthenticated: no key, not in the right form, unknown, wrong, or revoked. The answer is the same text
                for an unknown id and a wrong secret.
            StoreUnavailable: the store is away and the key is not cached.
        """
        if authorization is None:
            raise Unauthenticated("You didn't provide an API key. Send one as 'Authorization: Bearer <key>'.")
        scheme, _, credential = authorization.partition(" ")
        parsed = split_key(credential.strip())
        if scheme.lower() != "bearer" or parsed is None:
            raise Unauthenticated(_WRONG)
        key_id, digest = parsed
        key = await self._find(key_id)
        expected = key.secret_sha256 if key is not None else bytes(32)
        if not hmac.compare_digest(digest, expected) or key is None:
            raise Unauthenticated(_WRONG)
        if key.revoked:
            raise Unauthenticated("This API key was revoked; ask your administrator for another.")
        return key

    async def _find(self, key_id: KeyId) -> ApiKey | None:
        now = self._clock.monotonic()
        entry = self._cache.get(key_id) or self._missing.get(key_id)
        if entry is not None and now < entry.fresh_until:
            return entry.key
        lookup = self._lookups.get(key_id)
        if lookup is None:
            lookup = asyncio.create_task(self._fetch(key_id), name=f"key-lookup-{key_id}")
            self._lookups[key_id] = lookup
            lookup.add_done_callback(lambda done: self._forget_lookup(key_id, done))
        try:
            # Shielded: a caller that leaves must not fail the others that wait for the same key.
            return (await asyncio.shield(lookup)).key
        except StoreUnavailable:
            entry = self._cache.get(key_id)
            if entry is None or now - entry.fetched_at > self._config.key_stale_s:
                raise
            entry.fresh_until = self._clock.monotonic() + _RETRY_STALE_S
            return entry.key

    def _forget_lookup(self, key_id: KeyId, done: "asyncio.Task[_Entry]") -> None:
        self._lookups.pop(key_id, None)
        if not done.cancelled():
            done.exception()  # marks it as seen even if every caller has left

    async def _fetch(self, key_id: KeyId) -> _Entry:
        try:
            async with asyncio.timeout(self._config.key_lookup_timeout_s), self._permits:
                key = await self._keys.find_key(key_id)
        except (StoreUnavailable, TimeoutError) as error:
            self._last_failure = self._clock.monotonic()
            raise StoreUnavailable(
                "API keys cannot be checked right now: the key store does not answer.", retry_after_s=1.0
            ) from error
        self._last_failure = None
        now = self._clock.monotonic()
        ttl = self._config.key_ttl_s if key is not None else self._config.key_missing_ttl_s
        entry = _Entry(key, fetched_at=now, fresh_until=now + ttl)
        if key is None:
            self._cache.pop(key_id, None)
            self._missing[key_id] = entry
        else:
            self._missing.pop(key_id, None)
            self._cache[key_id] = entry
        return entry
