"""One connection that speaks the worker protocol, over TCP with mutual TLS or over a Unix socket.

Both ends are built on :class:`Channel`: writes of one turn of the event loop leave together, reads are cut into
messages, and neither direction buffers without bound.
"""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Protocol, cast

import msgspec

from headrace.core.errors import ConfigError, ProtocolError
from headrace.core.wire import Message, Reader, Writer

GATEWAY_NAME = "gateway.headrace.internal"
"""The DNS name in the certificate of whoever may use workers."""

WORKER_NAME = "worker.headrace.internal"
"""The DNS name in a worker's certificate."""

_LINGER_S = 2.0
_UNACKNOWLEDGED_MS = 10_000


class TcpAddress(msgspec.Struct, frozen=True):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(msgspec.Struct, frozen=True):
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``.

    Raises:
        ConfigError: it is none of them.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ConfigError(f"'{text}' names no path; write unix:/path/to/socket")
        return UnixAddress(Path(path))
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"'{text}' is not an address; write HOST:PORT or unix:/path/to/socket")
    return TcpAddress(host, int(port))


class Peer(Protocol):
    """What lives at this end of a channel. Its methods are called from the event loop and do not block."""

    def connected(self, channel: "Channel") -> None: ...

    def received(self, message: Message) -> None: ...

    def broken(self, error: ProtocolError) -> None:
        """The other end sent nonsense; nothing more is read. The peer closes the channel."""
        ...

    def lost(self, reason: str) -> None:
        """The connection is gone. The last call."""
        ...


class Channel(asyncio.Protocol):
    """The transport's end: bytes to messages and back."""

    def __init__(self, peer: Peer, reader: Reader) -> None:
        self._peer = peer
        self.reader = reader
        self._writer = Writer()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._flush_due = False
        self._deaf = False
        self._linger: asyncio.TimerHandle | None = None

    # --- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's TLS transports are Transports in everything but their base class, so isinstance would refuse them.
        self._transport = cast("asyncio.Transport", transport)
        _give_up_on_unacknowledged(self._transport)
        self._peer.connected(self)

    def data_received(self, data: bytes) -> None:
        if not self._hears():
            return
        try:
            messages = self.reader.feed(data)
        except ProtocolError as error:
            self._deaf = True
            self._peer.broken(error)
            return
        for message in messages:
            if not self._hears():  # handling the message before may have closed the channel
                return
            self._peer.received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        if self._linger is not None:
            self._linger.cancel()
        self._peer.lost("the other end closed it" if exc is None else str(exc) or type(exc).__name__)

    # --- called by the peer ------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a message; what is sent in one turn of the event loop leaves in one write.

        Raises:
            ProtocolError: the message is over the limit of the protocol. Nothing was queued.
        """
        self._writer.add(message)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    @property
    def num_outgoing_bytes(self) -> int:
        """What was sent and has not reached the kernel."""
        transport = self._transport
        unsent = 0 if transport is None or transport.is_closing() else transport.get_write_buffer_size()
        return self._writer.num_bytes + unsent

    def peer_names(self) -> frozenset[str]:
        """DNS names in the certificate of the other end; empty without TLS."""
        certificate = self._transport.get_extra_info("peercert") if self._transport is not None else None
        names = (certificate or {}).get("subjectAltName", ())
        return frozenset(value for kind, value in names if kind == "DNS")

    def pause_reading(self) -> None:
        """Let what arrives wait in the kernel, and so at the sender."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Undo :meth:`pause_reading`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Hear nothing more; send what is queued, within a moment, and disconnect."""
        self._deaf = True
        self._flush()
        if self._transport is not None:
            self._transport.close()
            self._linger = self._linger or self._loop.call_later(_LINGER_S, self._transport.abort)

    def abort(self) -> None:
        """Disconnect now."""
        self._deaf = True
        if self._transport is not None:
            self._transport.abort()

    def _hears(self) -> bool:
        return not self._deaf

    def _flush(self) -> None:
        self._flush_due = False
        if self._transport is not None and self._writer.num_bytes and not self._transport.is_closing():
            self._transport.write(self._writer.take())


def check_transport_security(address: Address, tls: ssl.SSLContext | None) -> None:
    """Refuse to speak or listen on TCP in the clear.

    Raises:
        ConfigError: a TCP address without TLS.
    """
    if isinstance(address, TcpAddress) and tls is None:
        raise ConfigError(
            f"{address}: the worker protocol needs mutual TLS on TCP; give a CA, a certificate and a key, "
            "or use a Unix socket (unix:/path)"
        )


def _give_up_on_unacknowledged(transport: asyncio.Transport) -> None:
    """Let the kernel end a connection whose peer stopped to acknowledge: a cut cable sends no FIN."""
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
