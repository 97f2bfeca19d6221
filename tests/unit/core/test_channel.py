import ssl
from pathlib import Path

import pytest

from headrace.core.channel import Address, TcpAddress, UnixAddress, check_transport_security, parse_address
from headrace.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7700", TcpAddress("127.0.0.1", 7700)),
        ("worker-3.internal:0", TcpAddress("worker-3.internal", 0)),
        ("[::1]:7700", TcpAddress("::1", 7700)),
        ("unix:/run/w.sock", UnixAddress(Path("/run/w.sock"))),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "host", ":7700", "host:", "host:x", "host:65536", "host:-1", "host:１", "unix:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|unix:"):
        parse_address(text)


def test_tcp_in_the_clear_is_refused() -> None:
    with pytest.raises(ConfigError, match="mutual TLS"):
        check_transport_security(TcpAddress("127.0.0.1", 1), None)
    check_transport_security(TcpAddress("127.0.0.1", 1), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    check_transport_security(UnixAddress(Path("/s")), None)
