"""The configuration file of each kind of process, as one typed tree; `headrace up` writes these for its children."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.adapters.engine.fake import FakeConfig
from headrace.adapters.engine.remote import RemoteConfig
from headrace.adapters.engine.tls import TlsFiles
from headrace.apps.logs import LogConfig
from headrace.apps.storage import StorageConfig
from headrace.dispatch.config import DispatchConfig
from headrace.engine.config import EngineConfig
from headrace.gateway.config import GatewayConfig
from headrace.worker.config import WorkerConfig

Port = Annotated[int, Meta(ge=1, le=65535)]


class WorkerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """``headrace worker FILE``."""

    name: str
    """Unique among the workers; appears in logs and metrics."""
    model: str
    """``name`` or ``name@version``; resolved once, at the start."""
    storage: StorageConfig
    tls: TlsFiles | None = None
    """Required unless ``worker.listen`` is a Unix socket."""
    kind: Literal["native", "fake"] = "native"
    """``native`` runs the model; ``fake`` makes up words, for load on everything above the engine."""
    engine: EngineConfig = EngineConfig()
    fake: FakeConfig = FakeConfig()
    """Used by ``kind = "fake"`` alone."""
    worker: WorkerConfig = WorkerConfig()
    log: LogConfig = LogConfig()
    die_with_parent: bool = False
    """Stop when the process that started this one ends, however it ends."""


class WorkerAddress(msgspec.Struct, frozen=True):
    """A worker as a gateway finds it."""

    name: str
    """Unique among the workers of this file."""
    address: str
    """``HOST:PORT`` or ``unix:PATH``"""


class GatewayProcess(msgspec.Struct, frozen=True, kw_only=True):
    """``headrace gateway FILE``."""

    gateway: GatewayConfig
    storage: StorageConfig
    workers: list[WorkerAddress]
    """Not necessarily up when the gateway starts; it connects and reconnects by itself."""
    tls: TlsFiles | None = None
    """Required unless every worker is at a Unix socket."""
    name: str = "gateway"
    """How the workers' logs and this process's own name it."""
    host: str = "127.0.0.1"
    """The address to listen on; ``0.0.0.0`` is every IPv4 address of the machine."""
    port: Port = 8000
    """The port to listen on; the API speaks HTTP without TLS."""
    reuse_port: bool = False
    """Let several gateway processes of one machine share the port; the kernel spreads connections over them."""
    internal_port: Port | None = None
    """A second port, on loopback, with the same routes: reaches this very process even if the public one is shared."""
    dispatch: DispatchConfig = DispatchConfig()
    remote: RemoteConfig = RemoteConfig()
    log: LogConfig = LogConfig()
    die_with_parent: bool = False
    """Stop when the process that started this one ends, however it ends."""
