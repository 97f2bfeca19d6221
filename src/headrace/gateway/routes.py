"""One table of all routes. Each says who may call it; what is not in the table does not exist."""

import enum
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from headrace.core.errors import Forbidden, MethodNotAllowed, NotFound
from headrace.gateway.auth import Authenticator
from headrace.gateway.call import Call
from headrace.ports.store import Role

CALL_KEY = "headrace.call"
"""Where a request's :class:`Call` travels in its ASGI scope."""

Handler = Callable[[Call], Awaitable[None]]


class Access(enum.Enum):
    """Who may call a route."""

    PUBLIC = "anybody"
    TENANT = "a tenant's key"
    OPERATOR = "an admin key"


_ROLES = {Access.TENANT: Role.TENANT, Access.OPERATOR: Role.ADMIN}


class Route(msgspec.Struct, frozen=True):
    """One method of one path, which is in Starlette's notation."""

    method: str
    path: str
    access: Access
    handler: Handler


class _Path:
    """An ASGI endpoint: all methods of one path, behind their access policies."""

    def __init__(self, path: str, methods: dict[str, Route], authenticator: Authenticator) -> None:
        self._path = path
        self._methods = methods
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Run the handler of the call that the gateway left in ``scope``.

        Raises:
            MethodNotAllowed: the path does not take this method.
            Unauthenticated: the route wants a key, and there is none that is good.
            Forbidden: the key is good, but for other things.
            StoreUnavailable: the key cannot be checked.
            HeadraceError: whatever the handler raises.
        """
        call: Call = scope[CALL_KEY]
        call.route = self._path
        # The server leaves out the body of an answer to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route = self._methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(self._methods))
            raise MethodNotAllowed(f"Not allowed to {method[:16]} on {self._path}; it takes {allowed}.")
        if route.access is not Access.PUBLIC:
            start = call.clock.monotonic()
            call.key = await self._authenticator.authenticate(call.header(b"authorization"))
            call.breakdown.auth = call.clock.monotonic() - start
            if call.key.role is not _ROLES[route.access]:
                raise Forbidden(f"This endpoint needs {route.access.value}; yours is of the role '{call.key.role}'.")
        await route.handler(call)


def build_router(
    routes: Sequence[Route],
    authenticator: Authenticator,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]],
) -> Router:
    """A router that answers the table's routes and raises ``NotFound`` for everything else."""
    by_path: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    paths = [StarletteRoute(path, _Path(path, methods, authenticator)) for path, methods in by_path.items()]
    return Router(paths, redirect_slashes=False, default=_nothing_here, lifespan=lifespan)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's signature
    raise NotFound(f"Invalid URL ({scope['method'][:16]} {scope['path'][:128]})")
