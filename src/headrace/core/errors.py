"""One error tree. Every error owns its wire code, HTTP status and log level; foreign errors are translated in adapters.

HeadraceError
├── InvalidRequest            400  what the caller sent cannot be served as written
│   ├── ContextLengthExceeded 400
│   ├── RequestTimeout        408
│   ├── RequestTooLarge       413
│   │   └── HeadersTooLarge   431
│   └── UnsupportedMediaType  415
├── Unauthenticated           401
├── Forbidden                 403
├── NotFound                  404
│   └── ModelNotFound         404
├── MethodNotAllowed          405
├── Conflict                  409
├── RateLimited               429  the tenant's own limit
├── ClientGone                499  nobody is left to answer
├── Unavailable               503  capacity or a part is missing; worth a retry
│   ├── Overloaded            503  a bounded queue is full
│   ├── Draining              503
│   ├── EngineDead            503  the engine or the way to it was lost
│   └── StoreUnavailable      503
├── DeadlineExceeded          504
├── InternalError             500  a defect of ours
│   └── AuditFailed           500  an owner did not release
├── ProtocolError              –   a peer sent what the worker protocol does not allow
├── ConfigError                –   a configuration file or flag is wrong
└── ModelFormatError           –   a checkpoint is damaged or not supported
"""

import logging
from typing import ClassVar


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose. ``str(error)`` is safe to show to the caller."""

    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    """OpenAI's ``error.type``."""
    status: ClassVar[int] = 500
    log_level: ClassVar[int] = logging.ERROR

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(HeadraceError):
    code = "invalid_value"
    kind = "invalid_request_error"
    status = 400
    log_level = logging.INFO


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class RequestTimeout(InvalidRequest):
    code = "request_timeout"
    status = 408


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"
    status = 413


class HeadersTooLarge(RequestTooLarge):
    code = "headers_too_large"
    status = 431


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    status = 415


class Unauthenticated(HeadraceError):
    code = "invalid_api_key"
    kind = "authentication_error"
    status = 401
    log_level = logging.INFO


class Forbidden(HeadraceError):
    code = "forbidden"
    kind = "permission_error"
    status = 403
    log_level = logging.INFO


class NotFound(HeadraceError):
    code = "not_found"
    kind = "invalid_request_error"
    status = 404
    log_level = logging.INFO


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(HeadraceError):
    code = "method_not_allowed"
    kind = "invalid_request_error"
    status = 405
    log_level = logging.INFO


class Conflict(HeadraceError):
    code = "conflict"
    kind = "invalid_request_error"
    status = 409
    log_level = logging.INFO


class RateLimited(HeadraceError):
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"
    status = 429
    log_level = logging.INFO


class ClientGone(HeadraceError):
    code = "client_gone"
    kind = "invalid_request_error"
    status = 499
    log_level = logging.INFO


class Unavailable(HeadraceError):
    code = "unavailable"
    kind = "server_error"
    status = 503
    log_level = logging.WARNING


class Overloaded(Unavailable):
    code = "overloaded"


class Draining(Unavailable):
    code = "draining"


class EngineDead(Unavailable):
    code = "worker_lost"
    log_level = logging.ERROR


class StoreUnavailable(Unavailable):
    code = "store_unavailable"
    log_level = logging.ERROR


class DeadlineExceeded(HeadraceError):
    code = "deadline_exceeded"
    kind = "server_error"
    status = 504
    log_level = logging.WARNING


class InternalError(HeadraceError):
    pass


class AuditFailed(InternalError):
    code = "audit_failed"
    log_level = logging.CRITICAL


class ProtocolError(HeadraceError):
    code = "protocol_error"


class ConfigError(HeadraceError):
    code = "config_error"


class ModelFormatError(HeadraceError):
    code = "model_format_error"


def from_code(code: str | None, message: str) -> HeadraceError:
    """The error whose ``code`` crossed a process border; ``InternalError`` for a code that nobody here knows."""
    return _by_code(HeadraceError).get(code or "", InternalError)(message)


def _by_code(base: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {base.code: base}
    for kind in base.__subclasses__():
        found |= _by_code(kind)
    found[InternalError.code] = InternalError
    return found
