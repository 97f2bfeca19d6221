"""Configurations of the processes of a local installation."""

import os
from typing import Literal

import msgspec

from headrace.adapters.engine.fake import FakeConfig
from headrace.adapters.engine.tls import TlsFiles
from headrace.apps.config import GatewayProcess, WorkerAddress, WorkerProcess
from headrace.apps.logs import LogConfig
from headrace.apps.storage import StorageConfig
from headrace.dispatch.config import DispatchConfig
from headrace.engine.config import EngineConfig
from headrace.gateway.config import GatewayConfig
from headrace.worker.config import WorkerConfig

FAKE = FakeConfig(vocab_size=1 << 20, token_ids=tuple(range(1000, 1256)), max_num_seqs=1024, step_s=0.01)
"""It takes any prompt, and says what are words and pieces of words in every common vocabulary."""

LOCAL_KV_CACHE_BYTES = 2 << 30
"""Over all workers of this machine, which other programs need as well: about 90,000 tokens of the demo model."""


LOCAL_DRAIN_S = 10.0
"""How long streams may go on after Ctrl-C: a person waits for the end."""


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of one local installation share."""

    model: str
    engine: Literal["native", "fake"]
    dtype: Literal["bfloat16", "float32"]
    storage: StorageConfig
    num_workers: int
    num_gateways: int
    host: str
    port: int
    salt_secret: str


def worker_config(local: Local, index: int, tls: TlsFiles, listen_port: int, http_port: int) -> WorkerProcess:
    """Worker number ``index``, with its share of the machine."""
    num_threads = max(1, (os.cpu_count() or 1) // local.num_workers)
    engine = EngineConfig(
        dtype=local.dtype, num_threads=num_threads, kv_cache_bytes=LOCAL_KV_CACHE_BYTES // local.num_workers
    )
    return WorkerProcess(
        name=f"worker-{index}",
        model=local.model,
        kind=local.engine,
        storage=local.storage,
        tls=tls,
        engine=engine,
        fake=FAKE,
        worker=WorkerConfig(
            listen=f"127.0.0.1:{listen_port}",
            http_listen=f"127.0.0.1:{http_port}",
            drain_timeout_s=LOCAL_DRAIN_S,
        ),
        log=LogConfig(format="json"),
        die_with_parent=True,
    )


def gateway_config(
    local: Local, index: int, tls: TlsFiles, workers: list[WorkerAddress], internal_port: int
) -> GatewayProcess:
    """Gateway number ``index``; all share one public port."""
    return GatewayProcess(
        name=f"gateway-{index}",
        host=local.host,
        port=local.port,
        reuse_port=local.num_gateways > 1,
        internal_port=internal_port,
        gateway=GatewayConfig(salt_secret=local.salt_secret, drain_s=LOCAL_DRAIN_S),
        storage=local.storage,
        workers=workers,
        dispatch=DispatchConfig(reconnect_max_s=0.5),  # on loopback a try costs nothing, and a person waits for it
        tls=tls,
        log=LogConfig(format="json"),
        die_with_parent=True,
    )
