"""Tools of MCP servers: functions that read a server's list of tools, and that call tools.

The client reads each item of an answer separately, so an unreadable item does not affect others.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from bottega.agents.approval import EXPIRES_S, Approval
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.parts import Part, text_of
from bottega.agents.tools import ToolBase, error_result, success_result
from bottega.errors import InvalidInputError, UnavailableError
from bottega.events.data import PartType
from bottega.json_schema.arguments import shown_schema
from bottega.json_schema.patterns import MOST_IN_AGENT, size_of
from bottega.json_schema.schema import escaped
from bottega.mcp.connection import (
    Connection,
    McpForgottenError,
    McpUnansweredError,
    OnProgress,
    OnQuestion,
)
from bottega.redaction import Redactor
from bottega.tools.egress import Egress
from bottega.tools.mcp import MOST_TOOLS, McpServer, McpToolSchema
from bottega.tools.media import HEAD_BYTES, is_text, media_type_of
from bottega.trace_context import current, headers_of

LONGEST_NAME = 128
LONGEST_DESCRIPTION = 2000
MOST_BYTES_OF_TOOLS = 1_000_000
"""Maximum size in bytes of all descriptions and schemas of a server."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})


@dataclass(slots=True)
class Patterns:
    """Distinct regular expressions in one server's schemas, within limits of number and memory."""

    _known: set[str] = field(default_factory=set)
    # Bytes of memory that further patterns may take in a model server that compiles all patterns.
    _left: int = 8_000_000

    def fit(self, pattern: str) -> bool:
        """Add a pattern, if it is within the limit; return true if the pattern is now included."""
        if pattern in self._known:
            return True
        try:
            size = size_of(pattern).bytes
        except InvalidInputError:
            return False
        if size > self._left or len(self._known) >= MOST_IN_AGENT:
            return False
        self._left -= size
        self._known.add(pattern)
        return True


def tool_schema(
    name: str, description: str, schema: dict[str, JsonValue], patterns: Patterns
) -> McpToolSchema:
    """Return a server's tool, shortened to fit Bottega's limits.

    Args:
        patterns: patterns of the server's earlier tools; the function adds the patterns of this
            tool.

    Raises:
        InvalidInputError: the tool cannot be used.
    """
    warnings = []
    if not 0 < len(name) <= LONGEST_NAME or "\0" in name:
        raise InvalidInputError(f"its name must have 1 to {LONGEST_NAME} characters")
    schema_shown = shown_schema(schema)
    if len(description) > LONGEST_DESCRIPTION:
        warnings.append(f"its description was cut at {LONGEST_DESCRIPTION} characters")
    refused: list[str] = []
    schema_shown = _kept(schema_shown, patterns, refused)
    if refused:
        warnings.append(f"these patterns were left out: {', '.join(sorted(refused)[:10])}")
    text = description.replace("\0", "")[:LONGEST_DESCRIPTION] or f"The tool {name}."
    return McpToolSchema(name, text, schema_shown, tuple(warnings))


def _kept(schema: Any, patterns: Patterns, refused: list[str], here: str = "") -> Any:
    """Return the schema without patterns that exceed a limit; add their pointers to ``refused``."""
    if isinstance(schema, list):
        return [_kept(each, patterns, refused, f"{here}/{n}") for n, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    members = {}
    for name, value in schema.items():
        pointer = f"{here}/{escaped(name)}"
        if name == "pattern" and isinstance(value, str) and not patterns.fit(value):
            refused.append(pointer)
        elif name in _NAMED and isinstance(value, dict):
            members[name] = {
                each: _kept(inner, patterns, refused, f"{pointer}/{escaped(each)}")
                for each, inner in value.items()
            }
        elif name in _VALUES:
            members[name] = value
        else:
            members[name] = _kept(value, patterns, refused, pointer)
    return members


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
        structured: structured content as JSON, or ``None`` if the server sent no such content.
        secrets: secrets that the client sent to the server, and that texts must not contain.
    """

    parts: tuple[Part, ...]
    is_error: bool = False
    structured: JsonValue = None
    secrets: tuple[str, ...] = ()

    @property
    def value(self) -> JsonValue:
        """The result for a model: the text, and structured content if it differs from the text."""
        text = text_of(self.parts)
        if self.structured is None or _says(text, self.structured):
            return text
        return f"{text}\n{_json(self.structured)}" if text else self.structured


def result_of(answer: Mapping[str, Any], secrets: tuple[str, ...] = ()) -> McpResult:
    """Convert a server's answer to a call; content of an unknown kind becomes JSON text.

    If the answer has ``isError: true``, the tool failed; otherwise the tool succeeded.
    """
    content = answer.get("content")
    blocks = content if isinstance(content, list) else [] if content is None else [content]
    return McpResult(
        tuple(map(_part, blocks)),
        is_error=answer.get("isError") is True,
        structured=answer.get("structuredContent"),
        secrets=secrets,
    )


def usable(listed: Iterable[Any]) -> tuple[list[McpToolSchema], list[str]]:
    """Return the usable tools of a server's list, and warnings about changed or omitted tools."""
    schemas: dict[str, McpToolSchema] = {}
    warnings = []
    bytes_left, patterns = MOST_BYTES_OF_TOOLS, Patterns()
    for number, item in enumerate(listed):
        if number == MOST_TOOLS:
            warnings.append(f"only the first {MOST_TOOLS} tools are used")
            break
        name = item.get("name") if isinstance(item, dict) else None
        label = f"the tool {name[:100]!r}" if isinstance(name, str) else f"the tool {number + 1}"
        try:
            tool = _tool(item, patterns)
        except InvalidInputError as error:
            warnings.append(f"{label} was left out: {error.detail}")
            continue
        if tool.name in schemas:
            warnings.append(f"{label} was left out: an earlier tool has the same name")
            continue
        bytes_left -= len(tool.description) + len(json.dumps(tool.input_schema))
        if bytes_left < 0:
            warnings.append(
                f"{label} and all later tools were left out: the server's tools have more than "
                f"{MOST_BYTES_OF_TOOLS} bytes"
            )
            break
        warnings += [f"{label}: {warning}" for warning in tool.warnings]
        schemas[tool.name] = tool
    return list(schemas.values()), warnings


def _tool(item: Any, patterns: Patterns) -> McpToolSchema:
    from mcp.shared.inbound import find_invalid_x_mcp_header

    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise InvalidInputError("it has no name")
    schema, description = item.get("inputSchema"), item.get("description")
    if not isinstance(schema, dict):
        raise InvalidInputError("its inputSchema is not an object")
    text = description if isinstance(description, str) else ""
    tool = tool_schema(item["name"], text, schema, patterns)
    if (fault := find_invalid_x_mcp_header(schema)) is not None:
        raise InvalidInputError(fault)
    return tool


def _part(block: Any) -> Part:
    match block:
        case str(text) | {"type": "text", "text": str(text)}:
            return Part("text", text=text)
        case {"type": "image" | "audio", "data": str(data)}:
            return _media(data, block.get("mimeType"))
        case {"type": "resource_link", "uri": str(uri)}:
            name = block.get("name")
            return Part("text", text=f"{name}: {uri}" if isinstance(name, str) else uri)
        case {"type": "resource", "resource": {"text": str(text)}}:
            return Part("text", text=text)
        case {"type": "resource", "resource": {"blob": str(data)}}:
            return _media(data, block["resource"].get("mimeType"))
    return Part("text", text=_json(block))


def _media(encoded: str, declared: Any) -> Part:
    """Decode base64 to a part. The media type comes from the bytes; for text, from ``declared``."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return Part("text", text="[content that is not valid base64]")
    title = declared if isinstance(declared, str) else None
    media_type = media_type_of(data[:HEAD_BYTES], title)
    if is_text(media_type):
        return Part("text", text=data.decode(errors="replace"))
    kind = _KINDS.get(media_type) or _KINDS.get(media_type.partition("/")[0], "file")
    return Part(kind, data=data, media_type=media_type)


def _says(text: str, structured: JsonValue) -> bool:
    try:
        value = from_json(text)
    except ValueError:
        return False
    return json.dumps(value, sort_keys=True) == json.dumps(structured, sort_keys=True)


def _json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()


async def list_tools(server: McpServer, egress: Egress) -> tuple[list[McpToolSchema], list[str]]:
    """Return the tools of a server, and warnings about changed or omitted tools.

    Raises:
        McpError: the server does not answer, or breaks the protocol (``mcp_unreachable``), or the
            server's address is not allowed (``egress_forbidden``).
    """
    connection = Connection(server, egress)
    await connection.open()
    try:
        return await asyncio.to_thread(usable, [each async for each in _listed(connection)])
    finally:
        await connection.close()


async def _listed(connection: Connection) -> AsyncIterator[Any]:
    """Yield the items of all pages of the server's list, unchanged."""
    from mcp_types import ListToolsRequest, PaginatedRequestParams

    cursor, number = None, 0
    for _ in range(50):
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
    """The connections of a run to MCP servers; the first call of a server opens its connection.

    Args:
        on_changed: called when a server reports that its tools have changed.
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
        """Call a tool once. If the connection is lost, the next call opens a new connection.

        Args:
            schema: schema of the tool's arguments, which may require that headers repeat some
                arguments.

        Raises:
            McpError: the call has no result; the server may have executed the call nevertheless.
        """
        connection = await self._connection(server)
        from mcp_types import CallToolRequest, CallToolRequestParams

        def make(answers: Any, state: str | None) -> Any:
            params = CallToolRequestParams(
                name=tool,
                arguments=arguments,
                input_responses=answers,
                request_state=state,
                _meta=headers_of(current.get()) or None,  # the trace, also for servers without HTTP
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
            connection = self._open.get(server.name)
            if connection is not None and connection.is_open:
                return connection
            if connection is not None:
                await connection.close()
            on_changed = self._on_changed and partial(self._on_changed, server)
            made = self._open[server.name] = Connection(server, self._egress, on_changed)
            await made.open()
            return made

    async def aclose(self) -> None:
        """Close all connections; end the servers that are programs."""
        opened = list(self._open.values())
        self._open.clear()
        await asyncio.gather(*(each.close() for each in opened))


ProgressOf = Callable[[ToolCall], OnProgress | None]
QuestionsOf = Callable[[ToolCall], OnQuestion | None]


def _nobody(call: ToolCall) -> None:
    """Return ``None``: nobody gets a call's progress or answers a call's questions."""


class McpTool(ToolBase):
    """A tool of an MCP server.

    Args:
        name: name of the tool for models.
        known: removes the tenant's secrets from answers (in addition to secrets that the server
            got).
        approval: rule that says which calls a person must approve.
        progress: returns the function that receives a call's progress from the server.
        questions: returns the function that answers the server's questions during a call.
    """

    timeout_s = None
    """No limit of the whole call, because people may take long; the connection has limits."""

    def __init__(
        self,
        name: str,
        server: McpServer,
        schema: McpToolSchema,
        connections: McpConnections,
        *,
        known: Redactor = Redactor(()),
        approval: Approval | None = None,
        expires_s: float = EXPIRES_S,
        progress: ProgressOf = _nobody,
        questions: QuestionsOf = _nobody,
    ) -> None:
        self.name = name
        self.description = schema.description
        self.approval = approval
        self.expires_s = expires_s
        self._server = server
        self._schema = schema
        self._connections = connections
        self._known = known
        self._progress = progress
        self._questions = questions

    def __repr__(self) -> str:
        return f"McpTool({self.name!r})"

    def create_schema(self) -> dict[str, Any]:
        return self._schema.input_schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Call the tool; return an ERROR if the server reports an error or does not answer."""
        try:
            result = await self._connections.call(
                self._server,
                self._schema.name,
                tool_call.arguments,
                on_progress=self._progress(tool_call),
                on_question=self._questions(tool_call),
                schema=self._schema.input_schema,
            )
        except (InvalidInputError, UnavailableError) as error:
            message = error.detail
            if isinstance(error, McpUnansweredError):
                message += "; the call may have had its effect: check this before you repeat it"
            return error_result(tool_call, self._clean(message, ()), error.code)
        value = self._clean(result.value, result.secrets)
        if result.is_error:
            text = value if isinstance(value, str) else to_json(value).decode()
            return error_result(tool_call, text or "the tool failed")
        parts = [part for part in result.parts if part.text is None]
        return success_result(tool_call, value, parts)

    def _clean(self, value: Any, secrets: Sequence[str]) -> Any:
        return Redactor(secrets, beside=self._known).value(value)
