"""The ASGI application and its server.

The application finds a request's route in an index, because Starlette would try about a hundred
patterns.
"""

import asyncio
import signal
import socket
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from ipaddress import ip_network
from typing import Any, cast

import uvicorn
from fastapi import APIRouter, FastAPI
from pydantic.warnings import UnsupportedFieldAttributeWarning
from pydantic_core import to_json
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

import bottega as package
from bottega.api import documents, errors
from bottega.api.auth import Authenticate, refusal
from bottega.api.routes import batches, operations, websocket
from bottega.api.routes.files import LONGEST_BODY
from bottega.api.schemas.base import LONGEST_DATA, MOST_BODY_BYTES
from bottega.api.server import connections
from bottega.api.server.connections import (
    Addresses,
    Bounds,
    HttpProtocol,
    KeylessRates,
    Networks,
    WebSocketProtocol,
)
from bottega.api.server.documents import add_console, add_docs
from bottega.api.server.middleware import (
    Answers,
    BelowPath,
    Cors,
    LimitRequests,
    LongBodies,
    RepeatRequests,
    Translate,
    Translation,
    refuse,
)
from bottega.container import Service, open_service, tune_gc
from bottega.errors import InvalidInputError
from bottega.services import background
from bottega.settings import Settings
from bottega.tenants import operator

# FastAPI hides these warnings only at the start, but models are built later; see DescribedModel.
warnings.filterwarnings("ignore", "The 'alias' attribute", UnsupportedFieldAttributeWarning)

_WEBSOCKET = "websocket"
REQUEST_TIMEOUT_S = 20.0
"""Maximum number of seconds for a request's head to arrive, and again for its body."""
MAX_STREAMS = 1000
"""Maximum number of streams and waiting requests of a tenant with keys, per API process."""
STOP_S = 5
"""Maximum number of seconds for a stopping process to finish its answers."""
IDLE_S = 2.0
"""Seconds without a request after which a replaced process closes a connection."""
LONGEST_ANSWER_S = 600
"""Maximum number of seconds for a replaced process to finish its answers."""
_Key = tuple[str, int, str]
"""Method (or :data:`_WEBSOCKET`), number of segments, and group; see :func:`_group`."""


class RouteIndex:
    """Router that tries only routes with the request's method, number of segments and group.

    The group is a part of the path; see :func:`_group`. The first request for a group in
    :data:`_ROUTERS` loads the group's routes. Starlette's router answers requests without a route,
    and requests that FastAPI's telemetry traces.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._every: ASGIApp = router.app
        self._index = _indexed(router.routes)
        self._late = {group: name for name, groups in _ROUTERS.items() for group in groups}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._every(scope, receive, send)
            return
        found = self.find(scope)
        path = None if found is None else found[0].path  # type: ignore[attr-defined]
        named = {} if found is None else found[1].get("path_params", {})
        if (refused := await refusal(scope, path, named)) is not None:
            await refuse(refused, scope, receive, send)
        elif found is None or "fastapi.telemetry" in scope:
            await self._every(scope, receive, send)
        else:
            route, more = found
            scope["router"] = self._router
            scope.update(more)
            await route.handle(scope, receive, send)

    def find(self, scope: Scope) -> tuple[BaseRoute, Scope] | None:
        """Return the request's route and the fields that the route adds to the scope."""
        method = scope["method"] if scope["type"] == "http" else _WEBSOCKET
        key = _key(method, scope["path"])
        if (name := self._late.get(key[2])) is not None:
            self._load(name)
        for route in self._index.get(key, ()):
            match, more = route.matches(scope)
            if match is Match.FULL:
                return route, more
        return None

    def _load(self, name: str) -> None:
        for group in _ROUTERS[name]:
            self._late.pop(group, None)
        routes = _routes_of(name)
        self._router.routes[:0] = routes
        self._index |= _indexed(routes)


def _group(path: str) -> str:
    """Return a path's group: ``runs`` for ``/v1/runs/…``, but ``/mcp`` for ``/mcp/…``."""
    first, second = [*path.split("/", 3), "", ""][1:3]
    return second if first == "v1" else f"/{first}"


def _key(method: str, path: str) -> _Key:
    return method, path.count("/"), _group(path)


def _indexed(routes: Sequence[BaseRoute]) -> dict[_Key, list[BaseRoute]]:
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


_DESCRIPTION = """
Teams of LLM agents on Postgres. Define agents and a graph of their dependencies, start runs, and
watch every sub-agent live (`GET /v1/runs/{id}/events` as server-sent events, or the WebSocket
`/v1/runs/{id}/ws`). Errors are RFC 9457 problems with a stable `code`. Send an API key as
`Authorization: Bearer <key>`; a server that never had a key needs none, and serves only
its own machine.
"""


_ROUTERS: Mapping[str, Sequence[str]] = {
    "routes.agents.router": (),
    "documents.router": (),
    "routes.graphs.router": ("graphs",),
    "routes.providers.router": (),
    "routes.providers.default_router": (),
    "routes.providers.health_router": (),
    "routes.mcp.servers.router": ("mcp-servers",),
    "routes.mcp.endpoint.router": ("mcp", "/mcp"),
    "routes.runs.router": (),
    "routes.stream.router": (),
    "routes.batches.router": (),
    "routes.evals.router": ("evals",),
    "routes.websocket.router": (),
    "routes.websocket.tickets_router": (),
    "routes.schedules.router": ("schedules",),
    "routes.deploy.router": ("apply",),
    "routes.sessions.router": ("sessions",),
    "routes.users.router": ("users",),
    "routes.files.router": (),
    "routes.interrupts.router": (),
    "routes.episodes.router": (),
    "routes.learning.router": (),
    "routes.learning.run_router": (),
    "routes.lessons.router": ("lessons",),
    "routes.keys.router": ("keys", "me", "sign-in", "tokens"),
    "routes.webhooks.router": ("webhook-secret",),
    "routes.webhooks.deliveries_router": ("webhook-deliveries",),
    "routes.secrets.router": ("secrets",),
    "routes.operations.router": (),
    "routes.operations.audit_router": (),
    "routes.operations.usage_router": (),
    "routes.series.router": ("metrics",),
    "routes.operations.load_router": (),
    "routes.patterns.router": ("patterns",),
    "routes.openai.routes.router": ("/openai",),
}
"""Routers in ``bottega.api``. Those with groups of paths are loaded at the first such request.

So a process whose requests only start runs does not load the other routes.
"""


def _routes_of(name: str) -> list[BaseRoute]:
    module, _, attribute = name.rpartition(".")
    router: APIRouter = getattr(import_module(f"bottega.api.{module}"), attribute)
    return router.routes


def every_route() -> list[BaseRoute]:
    """Load all routers, and return their routes in the order of the OpenAPI document."""
    return [route for name in _ROUTERS for route in _routes_of(name)]


def _translated_by(module: str) -> Translate:
    """Return a function that translates error responses; its first call imports the module."""

    def translated(status: int, problem: Mapping[str, Any]) -> Translation:
        translation = import_module(f"bottega.api.routes.{module}").translated(status, problem)
        return cast(Translation, translation)

    return translated


_FACADES = {"openai": _translated_by("openai.answers"), "mcp": _translated_by("mcp.messages")}


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application of an open service."""
    app = FastAPI(
        title="Bottega",
        version=package.__version__,
        description=_DESCRIPTION,
        redirect_slashes=False,
        openapi_url=None,
    )
    add_docs(app, lambda: to_json(app.openapi()))
    app.state.service = service
    settings = service.settings
    # The middleware that is added last is the first to get a request.
    app.add_middleware(RepeatRequests)
    app.add_middleware(
        LimitRequests,
        per_s=settings.requests_per_s,
        streams=MAX_STREAMS,
        max_bytes=MOST_BODY_BYTES,
        longer=_longer_bodies(),
    )
    rates = KeylessRates(settings.keyless_per_s, _trusted(settings))
    app.add_middleware(Authenticate, rates=rates, host=settings.host, origins=settings.cors_origins)
    errors.install(app)
    for name, groups in _ROUTERS.items():
        if not groups:
            # FastAPI's `include_router` would build each route again, and match each request twice.
            app.router.routes.extend(_routes_of(name))
    add_console(app)
    app.router.add_websocket_route("/{path:path}", websocket.nowhere)
    # Starlette's router passes each request to this attribute, inside the middleware above.
    app.router.middleware_stack = RouteIndex(app.router)
    app.openapi = lambda: documents.openapi_document(app, every_route())  # type: ignore[method-assign]
    return app


def _longer_bodies() -> dict[tuple[str, str], LongBodies]:
    """Return the limits of requests that may have long bodies: files, or inputs with base64."""
    uploads = LongBodies(LONGEST_BODY, each=8, all=64)
    inputs = LongBodies(MOST_BODY_BYTES + LONGEST_DATA, each=2, all=4)
    return {
        connections.UPLOADS: uploads,
        ("POST", "/v1/runs"): inputs,
        ("POST", "/v1/batches"): LongBodies(batches.LONGEST_BODY, each=2, all=4),
        ("POST", "/v1/schedules"): inputs,
        ("POST", "/openai/v1/chat/completions"): inputs,
        ("POST", "/openai/v1/responses"): inputs,
    }


def _trusted(settings: Settings) -> Networks:
    return [ip_network(entry) for entry in settings.trusted_proxies]


def server_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for ``app``."""
    service: Service = app.state.service
    settings = service.settings
    bounds = Bounds(
        patience_s=REQUEST_TIMEOUT_S,
        slow_reader_s=connections.SLOW_READER_S,
        connections=service.descriptors.connections,
    )
    addresses = Addresses(max(1, bounds.connections // 4), _trusted(settings))
    inner = Cors(app, settings.cors_origins) if settings.cors_origins else app
    outer = Answers(inner, _FACADES)
    return uvicorn.Config(
        BelowPath(outer, settings.root_path) if settings.root_path else outer,
        http=partial(HttpProtocol, bounds=bounds, addresses=addresses),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, addresses=addresses),  # type: ignore[arg-type]
        ws_max_size=64 * 1024,
        # Send no pings: heartbeats keep connections open, and a slow client answers pings too late.
        ws_ping_interval=None,
        # Do not compress: the server would compress each frame for each subscriber, and use 40 KB
        # of memory per connection.
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        # Otherwise uvicorn would believe forwarding headers from any program on this machine;
        # see KeylessRates.
        proxy_headers=False,
        # This timeout is longer than the usual timeouts of clients and proxies, so they close idle
        # connections before the server does.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=STOP_S,
        **options,
    )


class _Server(uvicorn.Server):
    """Server that leaves signals to its caller, and calls a function when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening(sockets[0].getsockname()[1])

    async def hand_over(self) -> None:
        """Accept no more connections; close each connection when it has no unanswered request."""
        for listening in self.servers:
            listening.close()
        setattr(self.server_state, connections.LAST_ANSWERS, True)
        # Wait, because a client may just be sending a request on a connection that looks idle.
        await asyncio.sleep(IDLE_S)
        self.config.timeout_graceful_shutdown = LONGEST_ANSWER_S
        self.should_exit = True


async def serve(
    settings: Settings,
    url: str,
    listener: socket.socket,
    *,
    worker: bool = True,
    on_listening: Callable[[int], None] = lambda port: None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve the API until SIGINT or SIGTERM; if ``worker`` is true, also execute runs.

    SIGHUP means that a new process has replaced this process and uses the same socket. This process
    then ends the streams that clients can resume at the new process, answers all other requests,
    and stops.

    Args:
        url: URL of the database, which must be migrated.
        listener: a socket that already listens; several processes may share it.
        on_listening: a function that is called with the port when the server accepts connections.
        on_ready: a function that is called when ``/readyz`` answers 200.

    Raises:
        InvalidInputError: ``no_keys``: other machines could use the server without a key.
    """
    if not settings.on_loopback and settings.oidc_issuer is None:
        await require_keys(settings, url)
    with listener:
        async with open_service(settings, url, api=True, worker=worker) as service:
            server = _Server(server_config(create_app(service)), on_listening)
            tune_gc()
            _obey_signals(server, service)
            async with background(partial(_report_readiness, service, on_ready)):
                await server.serve(sockets=[listener])


async def require_keys(settings: Settings, url: str) -> None:
    """Check that an API key exists.

    Raises:
        InvalidInputError: ``no_keys``.
    """
    if await operator.keys_required(url):
        return
    raise InvalidInputError(
        f"refusing to listen on {settings.host}: there are no API keys yet, so anyone who can "
        "reach this server could use it. Make a key first: bottega keys create --tenant default "
        "--scope admin. Or listen on 127.0.0.1",
        code="no_keys",
    )


async def _report_readiness(service: Service, on_ready: Callable[[], None]) -> None:
    while isinstance(await operations.readiness(service), Response):  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    on_ready()


def _obey_signals(server: _Server, service: Service) -> None:
    """Stop at SIGINT or SIGTERM (at the second signal: at once); at SIGHUP, hand over."""
    loop = asyncio.get_running_loop()
    stopping = False
    handing_over: list[asyncio.Task[None]] = []

    def stop() -> None:
        nonlocal stopping
        # End the streams, because the server waits for the end of all connections.
        service.stop_working.set()
        service.wakeups.close()
        if server.should_exit and not stopping:  # SIGHUP has set a longer timeout
            loop.call_later(STOP_S, partial(setattr, server, "force_exit", True))
        server.force_exit = stopping
        server.should_exit = stopping = True

    def hand_over() -> None:
        service.stop_working.set()
        service.wakeups.hand_over()
        handing_over.append(asyncio.ensure_future(server.hand_over()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, hand_over)
