"""What a gateway may be told; every limit that refuses a request is here."""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and timeouts of one gateway process. All gateways of one platform share ``salt_secret``."""

    salt_secret: Annotated[str, Meta(min_length=16)]
    """Keys the HMAC that turns a tenant's id into its prefix-cache salt. The same in every gateway."""

    max_header_bytes: Count = 32 * 1024
    """Request line and headers together; more is answered 431."""
    max_headers: Count = 100
    """Header lines of one request; more are answered 431."""
    max_body_bytes: Count = 4 * 1024 * 1024
    """A longer body is answered 413, before it is read where it says its length."""
    header_timeout_s: Positive = 10.0
    """From the first byte of a request (or from the connection's start) to the end of its headers."""
    body_timeout_s: Positive = 30.0
    """From the end of the headers to the end of the body; 408 after that."""
    write_timeout_s: Positive = 60.0
    """A connection whose reader takes nothing for so long is cut."""
    idle_timeout_s: Annotated[int, Meta(ge=1)] = 75
    """How long an idle connection stays open between requests."""

    max_concurrent_requests: Count = 1024
    """Generations at once in this gateway; one more is answered 503."""
    request_timeout_s: Positive = 600.0
    """A request that has not ended by then is answered 504, or ends its stream with that error."""
    admission_grace_s: Positive = 0.25
    """A stream's status waits so long for the dispatcher to refuse; then the headers go out and later errors are
    events of the stream."""
    keepalive_s: Positive = 10.0
    """A stream that was silent for so long gets an SSE comment, so that proxies do not cut it."""
    startup_wait_s: Annotated[float, Meta(ge=0)] = 3.0
    """At its start a gateway waits so long for a first worker before it answers anybody."""
    drain_s: Positive = 30.0
    """On shutdown, streams may go on for so long before they end with an error."""

    max_choices: Annotated[int, Meta(ge=1, le=128)] = 128
    """Choices of one request: ``n`` times the number of prompts."""
    max_messages: Count = 4096
    """Messages of one conversation."""
    max_stop_chars: Count = 256
    """Length of one stop string."""
    max_stop_token_ids: Count = 128
    """Entries of ``stop_token_ids``."""
    max_logit_bias: Count = 1024
    """Entries of ``logit_bias``."""

    key_ttl_s: Positive = 30.0
    """How long a key found in the store is believed: the longest a revoked key goes on working."""
    key_missing_ttl_s: Positive = 5.0
    """How long a key that was not found is refused without asking again."""
    key_stale_s: Positive = 900.0
    """While the store is away, keys seen within this time go on working."""
    key_cache_size: Count = 10_000
    """Keys remembered, found or not; beyond that the least recently used are forgotten."""
    key_lookup_timeout_s: Positive = 2.0
    """A look-up that takes longer counts as a store that is away."""
    max_key_lookups: Count = 16
    """Store look-ups at once; a flood of made-up keys queues here and not in the store."""

    open_metrics: bool = True
    """Whether ``/metrics`` answers without an admin key."""
    max_tenant_labels: Count = 1000
    """Tenants with a metrics label of their own; the others share ``other``."""
