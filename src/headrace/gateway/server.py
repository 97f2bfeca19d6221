"""The HTTP server: uvicorn with limits on headers and slow clients, errors in OpenAI's shape, and a drain.

uvicorn reads headers without a limit, waits for them for ever, and answers what it cannot parse in plain text.
"""

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httptools
import uuid_utils
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.core.errors import HeadersTooLarge, HeadraceError, InvalidRequest, RequestTimeout
from headrace.gateway.app import Gateway
from headrace.gateway.config import GatewayConfig
from headrace.gateway.errors import error_json

GRACE_S = 2.0
"""After streams were told to end, what they may take to say so."""

_LINGER_S = 1.0
"""After a refusal, how long a client may go on sending before the connection is cut."""


class _GuardedProtocol(HttpToolsProtocol):
    """One connection. ``limits`` is set by :func:`_protocol`.

    The read timer runs from the first byte of a request until it is complete, the write timer while the client reads
    nothing of the answer.
    """

    limits: GatewayConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._in_head = True
        self._refusal: HeadraceError | None = None
        self._lingering = False
        """Refused: what still comes is read and dropped, because closing now would destroy the answer on its way."""
        self._answering: RequestResponseCycle | None = None
        """Whose answer is due: ``cycle`` is the request that came last, and clients may send several at once."""
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # uvicorn's own narrowing of asyncio's signature
        self._arm_read(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_read()
        self.resume_writing()
        super().connection_lost(exc)
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._read_timer is None:
                self._arm_read(self.limits.header_timeout_s)
        super().data_received(data)
        if self._in_head and not self._lingering and self._num_head_bytes > self.limits.max_header_bytes:
            self._refuse(HeadersTooLarge(f"The headers exceed {self.limits.max_header_bytes} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.limits.max_header_bytes or len(self.headers) > self.limits.max_headers:
            self._refusal = HeadersTooLarge(
                f"The request has {len(self.headers)} headers of {num_bytes} bytes; at most "
                f"{self.limits.max_headers} of {self.limits.max_header_bytes} bytes together are allowed."
            )
            # Ends the parsing; uvicorn then calls send_400_response.
            raise httptools.HttpParserError("headers too large")
        self._in_head = False
        self._num_head_bytes = 0
        # The handler waits for the body as long; this timer is for bodies that nobody waits for any more.
        self._arm_read(self.limits.body_timeout_s + 1.0)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm_read()
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or was refused while it was parsed."""
        self._refuse(self._refusal or InvalidRequest(msg))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _refuse(self, error: HeadraceError) -> None:
        body = error_json(error)
        lines = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"x-request-id: req-%s\r\n" % uuid_utils.uuid7().hex.encode(),
            b"connection: close\r\n\r\n",
            body,
        ]
        self._disarm_read()
        due = self._answering
        if due is not None and not due.response_complete:
            # In the middle of an answer, or instead of one to an earlier request, this one would only mislead.
            if due.response_started or due is not self.cycle:
                self.transport.close()
                return
            # The body turned out not to be HTTP: the handler that waits for it has nobody to answer any more.
            self._leave()
        self._lingering = True
        self.transport.write(b"".join(lines))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._read_timer = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _leave(self) -> None:
        """Tell the handler at work that its client is gone."""
        due = self._answering
        if due is not None and not due.response_complete:
            due.disconnected = True
            due.message_event.set()

    def _arm_read(self, timeout_s: float) -> None:
        self._disarm_read()
        self._read_timer = self.loop.call_later(timeout_s, self._read_timed_out)

    def _disarm_read(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_timed_out(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        if self._in_head and self._num_head_bytes > 0:
            self._refuse(RequestTimeout(f"The headers did not arrive within {self.limits.header_timeout_s:g} s."))
        else:
            self.transport.close()


def _protocol(config: GatewayConfig) -> type[_GuardedProtocol]:
    return type("GuardedProtocol", (_GuardedProtocol,), {"limits": config})


class GatewayServer(uvicorn.Server):
    """Serves a gateway. On SIGTERM or ``should_exit`` it stops accepting, drains, and returns from ``serve``."""

    def __init__(self, gateway: Gateway) -> None:
        config = gateway.config
        super().__init__(
            uvicorn.Config(
                gateway,
                http=_protocol(config),
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=config.idle_timeout_s,
                timeout_graceful_shutdown=math.ceil(config.drain_s + GRACE_S),
            )
        )
        self._gateway = gateway

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT, and then return to the caller, who has more to close.

        uvicorn's own version raises the signal again at the end, which kills the process before that.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.drain()
        await super().shutdown(sockets)
