"""Health and metrics over HTTP, for supervisors, load balancers and Prometheus."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.core.channel import Address, TcpAddress, parse_address
from headrace.core.errors import ConfigError, EngineDead
from headrace.core.frames import EngineStats
from headrace.worker.health import Health
from headrace.worker.listener import bind, bound_address
from headrace.worker.metrics import WorkerMetrics

_STATS_TIMEOUT_S = 1.0


class Watched(Protocol):
    """What the pages are about."""

    health: Health
    metrics: WorkerMetrics

    @property
    def ready(self) -> bool: ...

    async def stats(self) -> EngineStats: ...


def create_app(watched: Watched) -> Starlette:
    """``/healthz``: 200 unless stuck. ``/readyz``: 200 while new sequences are taken. ``/metrics``: Prometheus text."""

    async def healthz(_request: Request) -> Response:
        if watched.health.healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stuck", "reason": watched.health.reason}, status_code=503)

    async def readyz(_request: Request) -> Response:
        if watched.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503)

    async def metrics(_request: Request) -> Response:
        stats: EngineStats | None = None
        with contextlib.suppress(TimeoutError, EngineDead):
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                stats = await watched.stats()
        text = watched.metrics.exposition(stats, healthy=watched.health.healthy)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])


class _Server(uvicorn.Server):
    """Leaves signals to the process: they drain the worker, which then stops this server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """The pages, on their own port."""

    def __init__(self, watched: Watched, listen: str) -> None:
        address = parse_address(listen)
        if not isinstance(address, TcpAddress):
            raise ConfigError(f"http_listen is '{listen}'; health and metrics need HOST:PORT")
        self.address: Address = address
        self._watched = watched
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and begin to serve.

        Raises:
            ConfigError: the address cannot be taken.
        """
        sock = bind(self.address)
        self.address = bound_address(sock, self.address)
        config = uvicorn.Config(
            create_app(self._watched),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            limit_concurrency=64,
        )
        self._server = _Server(config)
        # Listening already, so that nobody is refused while the server task starts.
        sock.listen()
        self._task = asyncio.get_running_loop().create_task(self._server.serve([sock]), name="worker-http")

    async def stop(self) -> None:
        """Stop to serve. Idempotent."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None
