"""A real server on an ephemeral port, in the test's own event loop."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import asyncpg
import httpx2
import uvicorn
import websockets
from pydantic_core import from_json

from bottega.container import Service, open_service
from bottega.db.sessions import SilenceTimeouts
from bottega.main import create_app, server_config
from bottega.settings import Settings
from tests.documented import check_event, check_problem
from tests.waiting import deadline, until

_TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients that use no TLS: their default loads the system's certificates, which takes 40 ms."""

_document: dict[str, Any] = {}
"""The OpenAPI document, once a server has made it: it takes a second, and never changes."""


@dataclass(frozen=True, slots=True)
class Running:
    """Running server and its client.

    Attributes:
        owner: connection as the database's owner, which no policy restricts.
        headers: of its client's requests: the key, if it has one.
    """

    service: Service
    owner: asyncpg.Pool
    client: httpx2.AsyncClient
    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    async def frames(self, path: str) -> list[dict[str, Any]]:
        """Collect the frames of a WebSocket of this server; see :func:`frames`."""
        return await frames(self.port, path, self.headers)

    async def watch(self, run_id: str) -> list[dict[str, Any]]:
        """Collect all events of a run, from the first to the final one."""
        return await self.frames(f"/v1/runs/{run_id}/ws")


async def frames(
    port: int | None, path: str, headers: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Collect all events of a WebSocket until the server closes it, which must be with 1000.

    Leaves out live text and heartbeats, which depend on timing. Checks the events' data.
    """
    received: list[dict[str, Any]] = []
    async with (
        deadline(lambda: received[-20:]),
        websockets.connect(f"ws://127.0.0.1:{port}{path}", additional_headers=headers) as socket,
    ):
        async for message in socket:
            received.append(from_json(message))
    assert socket.close_code == 1000
    events = [frame for frame in received if is_stored(frame)]
    for event in events:
        if event["data"]:  # a test's own log may have none
            check_event(event)
    return events


def is_stored(frame: dict[str, Any]) -> bool:
    """Return whether a frame is an event of the log."""
    return frame["type"] not in ("llm.delta", "tool.progress", "heartbeat")


async def watch(port: int | None, run_id: str) -> list[dict[str, Any]]:
    """Collect all events of a run, from the first to the final one."""
    return await frames(port, f"/v1/runs/{run_id}/ws")


def client_of(port: int | None, **options: Any) -> httpx2.AsyncClient:
    """Return a client of a server on this machine; the caller closes it."""
    hooks = {"response": [check_problem]}
    options = {"timeout": 30, "verify": _TRUSTS_NOBODY, "event_hooks": hooks, **options}
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", **options)


@asynccontextmanager
async def running(
    settings: Settings,
    url: str,
    *,
    worker: bool = False,
    silence: SilenceTimeouts = SilenceTimeouts(),
) -> AsyncIterator[Running]:
    async with (
        open_service(settings, url, api=True, worker=worker, silence=silence) as service,
        _serving(service) as port,
        asyncpg.create_pool(url, min_size=0) as owner,
        client_of(port) as client,
    ):
        yield Running(service, owner, client, port)


@asynccontextmanager
async def without_database(server: Running) -> AsyncIterator[None]:
    """Use all connections of a server during the block: what needs the database must wait."""
    database = server.service.database
    async with AsyncExitStack() as held:
        for _ in range(database.pool.get_max_size()):
            await held.enter_async_context(database.pool.acquire())
        yield


@asynccontextmanager
async def _serving(service: Service) -> AsyncIterator[int]:
    """Serve the API during the block, and yield the port.

    Uses parts of ``Server.serve``, which itself takes over signals and sleeps at its end.
    """
    app = create_app(service)
    is_usual = not service.settings.root_path  # else its addresses differ
    app.openapi_schema = (_document if is_usual else {}) or None
    config = server_config(app, port=0)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    serving = asyncio.ensure_future(server.main_loop())
    state = server.server_state
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        service.wakeups.close()
        serving.cancel()
        for listening in server.servers:
            listening.close()
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not (state.connections or state.tasks), within=10)
        if is_usual:
            _document.update(app.openapi_schema or {})
