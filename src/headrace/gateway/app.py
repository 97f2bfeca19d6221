"""The gateway as an ASGI application: every request gets an id, an answer, a line in the log, and is counted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog
from starlette.types import Receive, Scope, Send

from headrace.core.errors import ClientGone, HeadraceError
from headrace.gateway.auth import Authenticator
from headrace.gateway.call import Call
from headrace.gateway.deps import GatewayDeps
from headrace.gateway.errors import as_headrace
from headrace.gateway.handlers import GenerationHandlers
from headrace.gateway.listing import ListingHandlers
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.models import ModelDirectory
from headrace.gateway.routes import CALL_KEY, Access, Route, build_router

_log = structlog.get_logger("headrace.gateway.access")


def create_app(deps: GatewayDeps) -> "Gateway":
    """A gateway over ``deps``. Its lifespan follows what the dispatcher serves; the dispatcher's is the caller's."""
    return Gateway(deps)


class Gateway:
    """The application. One event loop; :meth:`drain` before the server stops."""

    def __init__(self, deps: GatewayDeps) -> None:
        self.config = deps.config
        self._deps = deps
        self.metrics = GatewayMetrics(deps.config.max_tenant_labels)
        self.models = ModelDirectory(deps.dispatcher, deps.registry, deps.cache_dir)
        authenticator = Authenticator(deps.keys, deps.config, deps.clock)
        self._generation = GenerationHandlers(deps, self.models, self.metrics)
        self._listing = ListingHandlers(self.models, authenticator, self.metrics)
        self.routes = self._routes()
        self._router = build_router(self.routes, authenticator, self._lifespan)
        self._expulsion: asyncio.TimerHandle | None = None

    def _routes(self) -> list[Route]:
        generation, listing = self._generation, self._listing
        metrics_access = Access.PUBLIC if self.config.open_metrics else Access.OPERATOR
        return [
            Route("POST", "/v1/chat/completions", Access.TENANT, generation.chat),
            Route("POST", "/v1/completions", Access.TENANT, generation.completion),
            Route("GET", "/v1/models", Access.TENANT, listing.list_models),
            Route("GET", "/v1/models/{id:path}", Access.TENANT, listing.get_model),
            Route("GET", "/healthz", Access.PUBLIC, listing.healthz),
            Route("GET", "/readyz", Access.PUBLIC, listing.readyz),
            Route("GET", "/metrics", metrics_access, listing.metrics),
        ]

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        self._deps.dispatcher.on_change(self.models.refresh)
        self.models.refresh()
        # Connections wait in the listening socket's backlog meanwhile, instead of being told that nothing is served
        # by a gateway that was only just restarted.
        await self.models.wait_until_any(self.config.startup_wait_s)
        try:
            yield
        finally:
            if self._expulsion is not None:
                self._expulsion.cancel()
            await self.models.close()

    def drain(self) -> None:
        """Refuse new generations from now on, and end the present ones after ``drain_s``. Idempotent."""
        if self._expulsion is not None:
            return
        self._generation.draining = self._listing.draining = True
        self.metrics.draining.set(1)
        loop = asyncio.get_running_loop()
        self._expulsion = loop.call_later(self.config.drain_s, self._generation.expel)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        call = Call(scope, receive, send, self.config, self._deps.clock)
        scope[CALL_KEY] = call
        try:
            await self._router(scope, receive, send)
        except ClientGone as error:
            call.note_error(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer and we get a log line
            call.note_error(error)
            if call.status is None:
                await call.fail(as_headrace(error))
        finally:
            self.metrics.finished(call, call.route)
            _log_access(call)


def _log_access(call: Call) -> None:
    """One line for each request, with where its time went and nothing of what it said."""
    error: HeadraceError | None = call.error
    fields: dict[str, object] = {
        "request_id": call.request_id,
        "method": call.scope["method"],
        "route": call.route,
        "status": call.outcome,
        "duration_ms": round((call.clock.monotonic() - call.started_at) * 1000, 3),
    }
    if call.key is not None:
        fields.update(tenant=call.key.tenant_id, key_id=call.key.key_id)
    if error is not None:
        fields["error"] = error.code
    if call.model is not None:
        fields.update(
            uid=call.uid,
            model=call.model,
            prompt_tokens=call.usage.num_prompt,
            output_tokens=call.usage.num_output,
            cached_tokens=call.usage.num_cached,
            finish=",".join(sorted(set(call.finish_reasons))),
            **call.breakdown.milliseconds(),
        )
    _log.info("request", **fields)
