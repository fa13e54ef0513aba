"""Routing by an index; Starlette tries the pattern of each route in turn, a hundred of them."""

from collections import defaultdict
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

_WEBSOCKET = "websocket"
_Key = tuple[str, int, str]
"""Method, or :data:`_WEBSOCKET`; number of segments; and the second segment, such as ``runs``."""


class RouteIndex:
    """Router that tries only routes which fit the request's method and the shape of its path.

    Whatever they do not match goes to Starlette's router: other paths, methods that are not
    allowed, and all requests while FastAPI traces them.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._every: ASGIApp = router.app
        self._index = _indexed(router.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or "fastapi.telemetry" in scope
            or (found := self.find(scope)) is None
        ):
            await self._every(scope, receive, send)
        else:
            route, more = found
            scope["router"] = self._router
            scope.update(more)
            await route.handle(scope, receive, send)

    def find(self, scope: Scope) -> tuple[BaseRoute, Scope] | None:
        """Return the request's route, and the fields that it adds to the scope."""
        method = scope["method"] if scope["type"] == "http" else _WEBSOCKET
        for route in self._index.get(_key(method, scope["path"]), ()):
            match, more = route.matches(scope)
            if match is Match.FULL:
                return route, more
        return None


def _key(method: str, path: str) -> _Key:
    segments = path.split("/", 3)
    return method, path.count("/"), segments[2] if len(segments) > 2 else ""


def _indexed(routes: Sequence[BaseRoute]) -> dict[_Key, list[BaseRoute]]:
    """Index the routes whose first two segments are plain, in their order."""
    index: defaultdict[_Key, list[BaseRoute]] = defaultdict(list)
    for route in routes:
        methods: Sequence[str] = ()
        if isinstance(route, Route):
            methods = sorted(route.methods or ())
        elif isinstance(route, WebSocketRoute):
            methods = [_WEBSOCKET]
        for method in methods:
            key = _key(method, route.path)  # type: ignore[attr-defined]
            if "{" not in key[2] and ":path}" not in route.path:  # type: ignore[attr-defined]
                index[key].append(route)
    return index
