"""What is wrong with a gateway's file is said before it serves."""

from pathlib import Path

import pytest

from headrace.apps.config import GatewayProcess, WorkerAddress
from headrace.apps.gateway import connectors
from headrace.apps.storage import StorageConfig
from headrace.core.config import load
from headrace.core.errors import ConfigError
from headrace.gateway.config import GatewayConfig

STORAGE = StorageConfig("postgresql://", "blobs", "cache")
FILE = """
{line}
workers = []
[storage]
database_url = "postgresql://"
blobs = "blobs"
cache = "cache"
[gateway]
salt_secret = "0123456789abcdef"
{table}
"""


def settings(*workers: WorkerAddress) -> GatewayProcess:
    return GatewayProcess(gateway=GatewayConfig(salt_secret="s" * 16), storage=STORAGE, workers=list(workers))


def test_workers_at_unix_sockets_need_no_tls() -> None:
    found = connectors(settings(WorkerAddress("a", "unix:/run/a"), WorkerAddress("b", "unix:/run/b")))
    assert list(found) == ["a", "b"]


@pytest.mark.parametrize(
    ("workers", "what"),
    [
        ([WorkerAddress("a", "10.0.0.1:7700")], "needs mutual TLS"),
        ([WorkerAddress("a", "10.0.0.1")], "not an address"),
        ([WorkerAddress("a", "unix:/run/a"), WorkerAddress("a", "unix:/run/b")], "two workers are named 'a'"),
    ],
)
def test_workers_that_cannot_be_reached_as_written_are_refused(workers: list[WorkerAddress], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        connectors(settings(*workers))


@pytest.mark.parametrize(
    ("line", "table", "what"),
    [
        ("port = 65536", "", "port"),
        ("port = 0", "", "port"),
        ("internal_port = 70000", "", "internal_port"),
        ("", "[remote]\nconnect_timeout_s = 0", "connect_timeout_s is 0"),
        ("", "[remote]\nsilence_timeout_s = -1.0", "silence_timeout_s is -1.0"),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, line: str, table: str, what: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(FILE.format(line=line, table=table))
    with pytest.raises(ConfigError, match=what):
        load(path, GatewayProcess)
