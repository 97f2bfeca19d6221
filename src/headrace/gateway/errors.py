"""Errors on the wire: OpenAI's object with all four fields, and the headers that go with a status."""

import math

import msgspec

from headrace.core.errors import HeadraceError, InternalError, Unauthenticated

Header = tuple[bytes, bytes]
Headers = list[Header]

MAX_RETRY_AFTER_S = 60
"""The official client does not retry at all when it is told to wait much longer."""


class ErrorObject(msgspec.Struct, frozen=True):
    """All four fields are always present; clients read them without asking."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


def error_json(error: HeadraceError) -> bytes:
    """``{"error": {...}}``, as a body or as the data of an SSE event."""
    return msgspec.json.encode(ErrorBody(ErrorObject(error.message, error.kind, error.param, error.code)))


def error_headers(error: HeadraceError) -> Headers:
    """``retry-after`` in whole seconds where the error knows one, and ``www-authenticate`` for 401."""
    headers: Headers = []
    if error.retry_after_s is not None:
        seconds = min(max(math.ceil(error.retry_after_s), 1), MAX_RETRY_AFTER_S)
        headers.append((b"retry-after", str(seconds).encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b'Bearer realm="headrace"'))
    return headers


def as_headrace(error: Exception) -> HeadraceError:
    """The error itself, or an :class:`InternalError` that tells the caller nothing of our insides."""
    if isinstance(error, HeadraceError):
        return error
    wrapped = InternalError("The server failed on this request; the request id finds it in our logs.")
    wrapped.__cause__ = error
    return wrapped
