"""Identifiers, as distinct types so that one cannot be passed where another is meant."""

from typing import NewType

TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
RequestId = NewType("RequestId", str)
"""One call of a client, e.g. ``chatcmpl-0193…``; unique for ever."""

SequenceId = NewType("SequenceId", str)
"""One generation inside a request (``n`` choices make ``n`` sequences), e.g. ``chatcmpl-0193…/0``."""

WorkerId = NewType("WorkerId", str)
ModelName = NewType("ModelName", str)
VersionId = NewType("VersionId", str)
"""The digest that names an immutable model version: the first 12 hex digits of the SHA-256 of its manifest."""

Digest = NewType("Digest", str)
"""A content address: ``sha256:`` and 64 hex digits."""
