"""Descriptions of MCP servers and of their tools. Pure."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import JsonValue

from bottega.errors import UnavailableError


class McpError(UnavailableError):
    """An MCP server does not answer, or its answer breaks the protocol."""

    code = "mcp_unreachable"


@dataclass(frozen=True, slots=True)
class StdioCommand:
    """A program that is an MCP server on its standard input and output.

    Attributes:
        env: the program's environment, in addition to PATH, HOME and LANG of this process.
        secrets: values in ``env`` that texts must not show.
    """

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)


class Headers(NamedTuple):
    """Header fields for a server, and the secrets among their values."""

    fields: Mapping[str, str]
    secrets: Sequence[str] = ()


async def no_headers() -> Headers:
    """Return no header fields."""
    return Headers({})


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server, with exactly one of ``url`` and ``command``.

    Attributes:
        url: URL of a server with the transport *streamable HTTP*.
        headers: function that returns the header fields, called for each connection. They are sent
            only to ``url``.
        timeout_s: seconds for one answer, without the time in which people answer questions.
        max_bytes: limit of one answer.
        tenant: the tenant that connects to the server.
    """

    name: str
    url: str | None = None
    command: StdioCommand | None = None
    headers: Callable[[], Awaitable[Headers]] = no_headers
    timeout_s: float = 30.0
    max_bytes: int = 1_000_000
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class McpToolSchema:
    """A tool of an MCP server, as models see it.

    Attributes:
        input_schema: JSON Schema of the tool's arguments, within our bounds.
        warnings: texts about the changes that make the tool fit the bounds.
    """

    name: str
    description: str
    input_schema: dict[str, JsonValue]
    warnings: tuple[str, ...] = ()
