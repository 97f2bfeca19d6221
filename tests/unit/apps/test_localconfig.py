import math
from pathlib import Path

from headrace.adapters.engine.tls import TlsFiles
from headrace.apps.localconfig import Local, gateway_config, worker_config
from headrace.apps.platform import STOP_TIMEOUT_S
from headrace.apps.storage import StorageConfig
from headrace.gateway.server import GRACE_S

TLS = TlsFiles(ca=Path("ca"), cert=Path("cert"), key=Path("key"))
LOCAL = Local(
    model="m@v",
    engine="fake",
    dtype="float32",
    storage=StorageConfig("postgresql://", "blobs", "cache"),
    num_workers=2,
    num_gateways=2,
    host="127.0.0.1",
    port=8000,
    salt_secret="s" * 16,
)


def test_processes_drain_before_they_would_be_killed() -> None:
    gateway = gateway_config(LOCAL, 0, TLS, [], 1)
    worker = worker_config(LOCAL, 0, TLS, 1, 2)
    assert math.ceil(gateway.gateway.drain_s + GRACE_S) < STOP_TIMEOUT_S
    assert worker.worker.drain_timeout_s < STOP_TIMEOUT_S
