"""Calls of MCP servers: the list of a server's tools, and calls of them in a run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from pydantic import JsonValue

from bottega.mcp.answers import McpResult, result_of, usable
from bottega.mcp.connection import Connection, McpForgottenError, OnProgress, OnQuestion
from bottega.mcp.schemas import MOST_TOOLS
from bottega.mcp.servers import McpServer, McpToolSchema
from bottega.tools.egress import Egress
from bottega.trace_context import current, headers_of

_MOST_PAGES = 50


async def list_tools(server: McpServer, egress: Egress) -> tuple[list[McpToolSchema], list[str]]:
    """Return the tools of a server, and what had to be changed or left out.

    Raises:
        McpError: ``mcp_unreachable``, or ``egress_forbidden``: its address is not allowed.
    """
    connection = Connection(server, egress)
    await connection.open()
    try:
        return await asyncio.to_thread(usable, [each async for each in _listed(connection)])
    finally:
        await connection.close()


async def _listed(connection: Connection) -> AsyncIterator[Any]:
    """Yield the items of all pages, as the server sent them."""
    from mcp_types import ListToolsRequest, PaginatedRequestParams

    cursor, number = None, 0
    for _ in range(_MOST_PAGES):
        request = ListToolsRequest(params=PaginatedRequestParams(cursor=cursor))
        page = await connection.request(lambda *_, request=request: request)
        tools = page.get("tools")
        if not isinstance(tools, list):
            raise connection.unreadable()
        for each in tools:
            yield each
        number += len(tools)
        cursor = page.get("nextCursor")
        if not isinstance(cursor, str) or number > MOST_TOOLS:
            return


class McpConnections:
    """The connections of a run to MCP servers: one for each, opened at its first call.

    Args:
        on_changed: learns that a server says its tools have changed.
    """

    def __init__(
        self, egress: Egress, on_changed: Callable[[McpServer], Awaitable[None]] | None = None
    ) -> None:
        self._egress = egress
        self._on_changed = on_changed
        self._open: dict[str, Connection] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def call(
        self,
        server: McpServer,
        tool: str,
        arguments: dict[str, Any],
        *,
        on_progress: OnProgress | None = None,
        on_question: OnQuestion | None = None,
        schema: Mapping[str, JsonValue] | None = None,
    ) -> McpResult:
        """Call a tool once. A connection that broke off is opened again for the next call.

        Args:
            schema: of the tool's arguments; it may want some of them in headers.

        Raises:
            McpError: there was no result; the server may have done it all the same.
        """
        connection = await self._connection(server)
        from mcp_types import CallToolRequest, CallToolRequestParams

        def make(answers: Any, state: str | None) -> Any:
            params = CallToolRequestParams(
                name=tool,
                arguments=arguments,
                input_responses=answers,
                request_state=state,
                _meta=headers_of(current.get()) or None,  # as the protocol names it, without HTTP
            )
            return CallToolRequest(params=params)

        async def asked() -> Any:
            if schema is not None:
                connection.mirror(tool, schema)
            return await connection.request(make, on_progress=on_progress, on_question=on_question)

        try:
            result = await asked()
        except McpForgottenError:
            connection = await self._connection(server)
            result = await asked()
        return result_of(result, connection.secrets)

    async def _connection(self, server: McpServer) -> Connection:
        async with self._locks.setdefault(server.name, asyncio.Lock()):
            known = self._open.get(server.name)
            if known is not None and known.is_open:
                return known
            if known is not None:
                await known.close()
            told = self._on_changed and partial(self._on_changed, server)
            made = self._open[server.name] = Connection(server, self._egress, told)
            await made.open()
            return made

    async def aclose(self) -> None:
        """Close all connections, and end the programs."""
        opened = list(self._open.values())
        self._open.clear()
        await asyncio.gather(*(each.close() for each in opened))
