"""The official MCP client, talking to a server of a test."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import anyio
import httpx2
import mcp.types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

ERAS = ("legacy", "2026-07-28")
"""Modes of the client: the handshake of 2025-11-25, and the protocol without sessions."""

Asked = Callable[[mcp.types.ElicitRequestFormParams], Awaitable[mcp.types.ElicitResult]]


class _Balancer(httpx2.AsyncHTTPTransport):
    """Sends each request to the next of some ports."""

    def __init__(self, ports: Sequence[int]) -> None:
        super().__init__()
        self._ports = cycle(ports)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.url = request.url.copy_with(port=next(self._ports))
        return await super().handle_async_request(request)


@asynccontextmanager
async def connected(
    ports: int | Sequence[int] | None,
    headers: Mapping[str, str],
    era: str,
    ask: Asked | None = None,
) -> AsyncIterator[Client]:
    """Connect a client.

    Args:
        ports: of one server, or of several behind a balancer.
        ask: asks a person; without it the client says that it cannot.
    """
    if not isinstance(ports, Sequence):
        assert ports is not None
        ports = [ports]

    async def asked(context: Any, params: Any) -> mcp.types.ElicitResult:
        assert ask is not None
        return await ask(params)

    url = f"http://127.0.0.1:{ports[0]}/mcp"
    balancer = _Balancer(ports)
    async with httpx2.AsyncClient(headers=dict(headers), timeout=60, transport=balancer) as http:
        client = Client(
            streamable_http_client(url, http_client=http),
            mode=era,
            elicitation_callback=None if ask is None else asked,
        )
        is_closing = False
        try:
            async with client:
                yield client
                is_closing = True
        except* anyio.ClosedResourceError:
            # The SDK fails if a late answer to a cancelled call comes while it closes.
            if not is_closing:
                raise


def said(result: mcp.types.CallToolResult) -> str:
    """Return the text of a result."""
    (part,) = result.content
    assert isinstance(part, mcp.types.TextContent)
    return part.text
