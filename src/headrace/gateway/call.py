"""One HTTP request on its way through the gateway: its ids, its clock, what has been answered so far."""

import asyncio
import re
import traceback
from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec
import structlog
import uuid_utils
from starlette.types import Receive, Scope, Send

from headrace.core.clock import Clock
from headrace.core.errors import (
    ClientGone,
    HeadraceError,
    RequestTimeout,
    RequestTooLarge,
    UnsupportedMediaType,
)
from headrace.gateway.config import GatewayConfig
from headrace.gateway.errors import Header, Headers, as_headrace, error_headers, error_json
from headrace.gateway.timing import Breakdown
from headrace.ports.store import ApiKey

_log = structlog.get_logger("headrace.gateway")

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Usage(msgspec.Struct):
    """Tokens of one request; the prompt counts once, however many choices share it."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0


class Call:
    """The gateway's own view of one request. One handler owns it; nothing here is shared between requests."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: GatewayConfig, clock: Clock) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._config = config
        self.clock = clock
        self.started_at = clock.monotonic()
        self.created = int(clock.wall())
        self.uid = uuid_utils.uuid7().hex
        """Time-ordered and unique: the body of every id that this request gives out."""
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = self._request_id()
        self.breakdown = Breakdown()
        self.key: ApiKey | None = None
        self.usage = Usage()
        self.route = "unknown"
        """The path in the route table."""
        self.model: str | None = None
        """The served name, once it is known to exist: bounded, so fit for a metrics label."""
        self.status: int | None = None
        """Of the answer; None until it has begun."""
        self.error: HeadraceError | None = None
        self.finish_reasons: list[str] = []
        self.first_token_at: float | None = None
        self.sending = False
        """Whether a write is waiting for the client to read."""

    @property
    def caller(self) -> ApiKey:
        """The key that :mod:`headrace.gateway.routes` authenticated; a route without authentication has none."""
        assert self.key is not None, "the route's access policy lets anybody in"
        return self.key

    @property
    def outcome(self) -> int:
        """The status for logs and metrics: 499 for a client that left, also in the middle of its answer."""
        if self.status is None or isinstance(self.error, ClientGone):
            return ClientGone.status
        return self.status

    def header(self, name: bytes) -> str | None:
        """A request header, the last one if it is repeated."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass one ASGI message on; returns when the connection's buffer has room."""
        self.sending = True
        try:
            await self._send(message)
        finally:
            self.sending = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers, with the request's id among them."""
        self.status = status
        headers.append((b"x-request-id", self.request_id.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Sequence[Header] = (),
    ) -> None:
        """Send a whole answer."""
        length = str(len(body)).encode()
        await self.begin(status, [(b"content-type", content_type), (b"content-length", length), *headers])
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: HeadraceError, headers: Sequence[Header] = ()) -> None:
        """Answer with an error; the caller has made sure that nothing was answered yet."""
        self.error = error
        await self.answer(error_json(error), status=error.status, headers=[*error_headers(error), *headers])

    def note_error(self, error: Exception) -> None:
        """Remember what went wrong, for the log and the metrics; a defect of ours is logged with where it happened."""
        self.error = as_headrace(error)
        if self.error is not error:
            # Neither the message nor local variables: both may hold what the caller sent.
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
            _log.error("defect", request_id=self.request_id, kind=type(error).__name__, frames=frames)

    async def read_json(self) -> bytes:
        """The request's body.

        Raises:
            UnsupportedMediaType: it does not say that it is JSON, or it is compressed.
            RequestTooLarge: more than ``max_body_bytes``; nothing beyond that was kept.
            RequestTimeout: it did not arrive within ``body_timeout_s``.
            ClientGone: the connection ended first.
        """
        self._check_media_type()
        limit = self._config.max_body_bytes
        length = self.header(b"content-length")
        if length is not None and int(length) > limit:
            raise RequestTooLarge(f"The body has {length} bytes; at most {limit} are allowed.")
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("The connection ended before the body was complete.")
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    if num_bytes > limit:
                        raise RequestTooLarge(f"The body has more than {limit} bytes, which is the limit.")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise RequestTimeout(f"The body did not arrive within {self._config.body_timeout_s:g} s.") from None
        return b"".join(chunks)

    async def disconnected(self) -> None:
        """Returns when the client has left. Only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _check_media_type(self) -> None:
        content_type = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise UnsupportedMediaType(
                f"The Content-Type is {content_type[:64]!r}; send the body as 'application/json'."
            )
        encoding = (self.header(b"content-encoding") or "identity").strip().lower()
        if encoding != "identity":
            raise UnsupportedMediaType(f"The Content-Encoding {encoding[:32]!r} is not supported.")

    def _request_id(self) -> str:
        given = self.header(b"x-request-id")
        return given if given is not None and _CLIENT_ID.fullmatch(given) else f"req-{self.uid}"
