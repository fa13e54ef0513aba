"""Calls of MCP servers: the list of a server's tools, and calls of them in a run."""

import asyncio
import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import JsonValue, TypeAdapter

from bottega.agents.parts import Part, PartType
from bottega.errors import InvalidInputError
from bottega.mcp.connection import Connection, McpForgottenError, OnProgress, OnQuestion
from bottega.mcp.schemas import MOST_BYTES_OF_TOOLS, MOST_TOOLS, Patterns, tool_schema
from bottega.mcp.servers import McpServer, McpToolSchema
from bottega.tools.egress import Egress
from bottega.tools.media import HEAD_BYTES, is_text, media_type_of
from bottega.trace_context import current, headers_of

_MOST_PAGES = 50
_KINDS: dict[str, PartType] = {
    "image": "image",
    "audio": "audio",
    "application/pdf": "document",
}


@dataclass(frozen=True, slots=True)
class McpResult:
    """The result of a call.

    Attributes:
        parts: texts, images and other content, in the server's order.
        structured: the same as JSON, if the server sends it so.
        secrets: values that were sent to the server and must not be shown.
    """

    parts: tuple[Part, ...]
    is_error: bool = False
    structured: JsonValue = None
    secrets: tuple[str, ...] = ()


async def list_tools(server: McpServer, egress: Egress) -> tuple[list[McpToolSchema], list[str]]:
    """Return the tools of a server, and what had to be changed or left out.

    Raises:
        McpError: ``mcp_unreachable``, or ``egress_forbidden``: its address is not allowed.
    """
    connection = Connection(server, egress)
    await connection.open()
    try:
        return await asyncio.to_thread(_usable, [each async for each in _listed(connection)])
    finally:
        await connection.close()


async def _listed(connection: Connection) -> Any:
    from mcp_types import ListToolsRequest, ListToolsResult, PaginatedRequestParams

    cursor, number = None, 0
    for _ in range(_MOST_PAGES):
        params = PaginatedRequestParams(cursor=cursor)
        request = ListToolsRequest(params=params)
        page = await connection.request(lambda *_, request=request: (request, ListToolsResult))
        for each in page.tools:
            yield each
        number += len(page.tools)
        cursor = page.next_cursor
        if cursor is None or number > MOST_TOOLS:
            return


def _usable(tools: Iterable[Any]) -> tuple[list[McpToolSchema], list[str]]:
    from mcp.shared.inbound import find_invalid_x_mcp_header

    found: dict[str, McpToolSchema] = {}
    warnings = []
    left, patterns = MOST_BYTES_OF_TOOLS, Patterns()
    for number, each in enumerate(tools):
        if number == MOST_TOOLS:
            warnings.append(f"only the first {MOST_TOOLS} tools are used")
            break
        try:
            if (fault := find_invalid_x_mcp_header(each.input_schema)) is not None:
                raise InvalidInputError(fault)
            tool = tool_schema(each.name, each.description or "", each.input_schema, patterns)
        except InvalidInputError as error:
            warnings.append(f"the tool {each.name[:100]!r} was left out: {error.detail}")
            continue
        left -= len(tool.description) + len(json.dumps(tool.input_schema))
        if left < 0:
            warnings.append(
                f"the tool {tool.name!r} and those after it were left out: the server's tools have"
                f" more than {MOST_BYTES_OF_TOOLS} bytes"
            )
            break
        warnings += [f"the tool {tool.name!r}: {warning}" for warning in tool.warnings]
        found.setdefault(tool.name, tool)
    return list(found.values()), warnings


class McpConnections:
    """The connections of a run to MCP servers: one for each, opened at its first call."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
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

        def make(answers: Any, state: str | None) -> tuple[Any, Any]:
            params = CallToolRequestParams(
                name=tool,
                arguments=arguments,
                input_responses=answers,
                request_state=state,
                _meta=headers_of(current.get()) or None,  # as the protocol names it, without HTTP
            )
            return CallToolRequest(params=params), _call_result()

        async def asked() -> Any:
            if schema is not None:
                connection.mirror(tool, schema)
            return await connection.request(make, on_progress=on_progress, on_question=on_question)

        try:
            result = await asked()
        except McpForgottenError:
            connection = await self._connection(server)
            result = await asked()
        return McpResult(
            tuple(_parts(result.content)),
            is_error=bool(result.is_error),
            structured=result.structured_content,
            secrets=connection.secrets,
        )

    async def _connection(self, server: McpServer) -> Connection:
        async with self._locks.setdefault(server.name, asyncio.Lock()):
            known = self._open.get(server.name)
            if known is not None and known.is_open:
                return known
            if known is not None:
                await known.close()
            made = self._open[server.name] = Connection(server, self._egress)
            await made.open()
            return made

    async def aclose(self) -> None:
        """Close all connections, and end the programs."""
        opened = list(self._open.values())
        self._open.clear()
        await asyncio.gather(*(each.close() for each in opened))


@cache
def _call_result() -> TypeAdapter[Any]:
    from mcp_types import CallToolResult, InputRequiredResult

    return TypeAdapter(CallToolResult | InputRequiredResult)


def _parts(content: Iterable[Any]) -> Iterator[Part]:
    """Yield a result's content as parts of a message."""
    for each in content:
        if each.type == "text":
            yield Part("text", text=each.text)
        elif each.type in ("image", "audio"):
            yield _media(each.data, each.mime_type)
        elif each.type == "resource_link":
            yield Part("text", text=f"{each.name}: {each.uri}")
        elif each.type == "resource":
            held = each.resource
            text = getattr(held, "text", None)
            if text is None:
                yield _media(held.blob, held.mime_type)
            else:
                yield Part("text", text=text)


def _media(encoded: str, declared: str | None) -> Part:
    """Return base64 as a part, of the type that its bytes have."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return Part("text", text="[content that is not valid base64]")
    media_type = media_type_of(data[:HEAD_BYTES], declared)
    if is_text(media_type):
        return Part("text", text=data.decode(errors="replace"))
    kind = _KINDS.get(media_type) or _KINDS.get(media_type.partition("/")[0], "file")
    return Part(kind, data=data, media_type=media_type)
