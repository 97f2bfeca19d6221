"""The socket that clients connect to."""

import asyncio
import contextlib
import socket
import ssl
import stat
from collections.abc import Callable

from headrace.core.channel import Address, Channel, TcpAddress, UnixAddress
from headrace.core.errors import ConfigError


def bind(address: Address) -> socket.socket:
    """A bound socket that does not listen yet. A Unix socket is for its owner only; a left-over one is replaced.

    Raises:
        ConfigError: the address cannot be taken.
    """
    try:
        return _bind_unix(address) if isinstance(address, UnixAddress) else _bind_tcp(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}; is something else there?") from error


def _bind_tcp(address: TcpAddress) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_unix(address: UnixAddress) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(address.path.stat().st_mode):
            address.path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(address.path))
        # Nobody can connect before listen(), so there is no moment at which the wider mode counts.
        address.path.chmod(0o600)
    except OSError:
        sock.close()
        raise
    return sock


def bound_address(sock: socket.socket, asked: Address) -> Address:
    """Where a socket really is: port 0 became a number."""
    return TcpAddress(asked.host, sock.getsockname()[1]) if isinstance(asked, TcpAddress) else asked


class Listener:
    """Accepts connections and gives each a channel."""

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        make_channel: Callable[[], Channel],
        *,
        handshake_timeout_s: float,
    ) -> None:
        self.address = address
        self._tls = tls
        self._make_channel = make_channel
        self._handshake_timeout_s = handshake_timeout_s
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Start to accept.

        Raises:
            ConfigError: the address cannot be taken.
        """
        sock = bind(self.address)
        self.address = bound_address(sock, self.address)
        loop = asyncio.get_running_loop()
        if isinstance(self.address, UnixAddress):
            self._server = await loop.create_unix_server(self._make_channel, sock=sock)
        else:
            self._server = await loop.create_server(
                self._make_channel,
                sock=sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s if self._tls is not None else None,
            )

    def close(self) -> None:
        """Accept no more; connections that stand are not touched. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            if isinstance(self.address, UnixAddress):
                self.address.path.unlink(missing_ok=True)
