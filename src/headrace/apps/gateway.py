"""``headrace gateway``: one process of the CPU tier."""

import functools
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import prometheus_client
import structlog
import uvloop
from cyclopts import Parameter

from headrace.adapters.engine.remote import connect
from headrace.adapters.engine.tls import client_context
from headrace.apps import logs
from headrace.apps.config import GatewayProcess
from headrace.apps.processes import die_with_parent, settle_garbage_collector
from headrace.apps.storage import wait_for_storage
from headrace.core.channel import check_transport_security, parse_address
from headrace.core.clock import SystemClock
from headrace.core.config import load
from headrace.core.errors import ConfigError
from headrace.core.ids import WorkerId
from headrace.dispatch.dispatcher import Dispatcher
from headrace.gateway.app import create_app
from headrace.gateway.deps import GatewayDeps
from headrace.gateway.server import GatewayServer
from headrace.ports.engine import Engine

BACKLOG = 2048

log = structlog.get_logger(__name__)


def gateway(config: Annotated[Path, Parameter(help="The TOML file of this gateway.")]) -> None:
    """Run one gateway process until SIGTERM; it then accepts nothing new and lets streams finish."""
    settings = load(config, GatewayProcess)
    logs.configure(settings.log, process=settings.name)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # a series for each series, read by nobody
    if settings.die_with_parent:
        die_with_parent()
    uvloop.run(_serve(settings))


async def _serve(settings: GatewayProcess) -> None:
    clock = SystemClock()
    dispatcher = Dispatcher(connectors(settings), settings.dispatch, clock)
    async with wait_for_storage(settings.storage) as (store, registry):
        # Only now: a connection that nobody answers is worse than one that is refused.
        sockets = [_listen(settings.host, settings.port, reuse=settings.reuse_port)]
        if settings.internal_port is not None:
            sockets.append(_listen("127.0.0.1", settings.internal_port, reuse=False))
        deps = GatewayDeps(
            keys=store,
            registry=registry,
            dispatcher=dispatcher,
            config=settings.gateway,
            clock=clock,
            cache_dir=Path(settings.storage.cache),
        )
        settle_garbage_collector()
        await dispatcher.start()
        try:
            log.info("serving", address=f"{settings.host}:{settings.port}", num_workers=len(settings.workers))
            await GatewayServer(create_app(deps)).serve(sockets)
        finally:
            await dispatcher.close()
    log.info("stopped")


def connectors(settings: GatewayProcess) -> dict[WorkerId, Callable[[], Awaitable[Engine]]]:
    """How to reach each worker.

    Raises:
        ConfigError: two workers have one name, or an address is malformed or reached over TCP without TLS.
    """
    tls = client_context(settings.tls) if settings.tls is not None else None
    found: dict[WorkerId, Callable[[], Awaitable[Engine]]] = {}
    for worker in settings.workers:
        if worker.name in found:
            raise ConfigError(f"two workers are named '{worker.name}'; give each its own name")
        check_transport_security(parse_address(worker.address), tls)
        found[WorkerId(worker.name)] = functools.partial(
            connect, worker.address, tls, settings.remote, client=settings.name
        )
    return found


def _listen(host: str, port: int, *, reuse: bool) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
