"""Types for MCP servers, and checks of agents' definitions that use the servers' tools."""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, field_validator

from bottega.errors import InvalidInputError, UnavailableError
from bottega.tools.people import Approvable

SEPARATOR = "__"
"""Separator of the server's name and the tool's name in the name for models."""
MOST_TOOLS = 256
"""Maximum number of tools of an agent with MCP servers."""
_LONGEST_NAME = 64
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")
_DIGITS = 8

McpToolName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""A tool's name, as its MCP server spells it."""


class McpToolDefinition(Approvable):
    """Tools of an MCP server; the model sees each tool under the name `server__tool`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        # In JSON, ``type`` is required, because it selects the class; in Python, it has a default.
        json_schema_extra=lambda schema: schema["required"].append("type"),
    )

    type: Literal["mcp"] = "mcp"
    """Kind of the tool."""
    server: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
    """Name of the server; see `POST /v1/mcp-servers`."""
    tools: Annotated[list[McpToolName] | None, Field(min_length=1, max_length=128)] = None
    """Names of the server's tools. Null means all tools that the server had at its last
    refresh before the run."""

    @field_validator("tools")
    @classmethod
    def _once(cls, tools: list[str] | None) -> list[str] | None:
        if twice := sorted(name for name, times in Counter(tools).items() if times > 1):
            raise ValueError(f"these tools are listed more than once: {', '.join(twice)}")
        return tools

    @property
    def names(self) -> Sequence[str]:
        """Names of the tools for the model; empty if ``tools`` is null (all tools)."""
        return [model_name(self.server, name) for name in self.tools or ()]

    def may_have(self, name: str) -> bool:
        """Return true if the model may see one of the tools under this name."""
        if self.tools is not None:
            return name in self.names
        return name.startswith(f"{self.server}{SEPARATOR}"[: _LONGEST_NAME - _DIGITS - 1])


def model_name(server: str, tool: str) -> str:
    """Return the name under which models see a server's tool: ``server__tool``.

    Characters that model servers refuse become ``_``. A name of more than 64 characters is cut, and
    ends with a hash.
    """
    name = _FORBIDDEN.sub("_", f"{server}{SEPARATOR}{tool}")
    if len(name) <= _LONGEST_NAME:
        return name
    digits = sha256(f"{server}{SEPARATOR}{tool}".encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST_NAME - _DIGITS - 1]}_{digits}"


def tools_in(
    definition: Mapping[str, Any], server: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """Return the tools of an MCP server that an agent may use.

    Args:
        definition: the agent's :class:`McpToolDefinition`, as JSON.
        server: definition of the server.
    """
    tools = {tool["name"]: tool for tool in server["tools"] or ()}
    return [tools[name] for name in definition.get("tools") or tools]


def refuse_unfit(
    agent: str,
    tools: Sequence[Mapping[str, Any]],
    others: Sequence[str],
    servers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuse an agent that uses unknown tools of MCP servers, or two tools with the same name.

    Args:
        tools: definitions of all tools of the agent, as JSON.
        others: names of the agent's sub-agents, which no tool may have.
        servers: ``{"tools": names}`` for each existing server, by the server's name; ``names`` is
            ``None`` before the server's first refresh.

    Raises:
        InvalidInputError: ``unknown_mcp_server``, ``mcp_server_not_refreshed``, ``unknown_tool``,
            ``duplicate_tool``, ``too_many_tools``.
    """
    names = Counter(others)
    for number, tool in enumerate(tools):
        if tool["type"] != "mcp":
            names[tool["name"]] += 1
            continue
        try:
            names.update(model_name(tool["server"], each) for each in _existing(tool, servers))
        except InvalidInputError as error:
            detail = f"the agent '{agent}', at /tools/{number}: {error.detail}"
            raise InvalidInputError(detail, code=error.code) from None
    if twice := sorted(name for name, times in names.items() if times > 1):
        raise InvalidInputError(
            f"tools and sub-agents of the agent '{agent}' share a name: {', '.join(twice)}. "
            "In `tools` of the agent's MCP servers, list only the tools that the agent needs",
            code="duplicate_tool",
        )
    if names.total() > MOST_TOOLS:
        raise InvalidInputError(
            f"the agent '{agent}' has {names.total()} tools, but the maximum is {MOST_TOOLS}: in "
            "`tools` of its MCP servers, list only the tools that the agent needs",
            code="too_many_tools",
        )


def refuse_unfit_tools(
    tools: Sequence[Mapping[str, Any]], servers: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse a graph that uses unknown tools of MCP servers.

    Raises:
        InvalidInputError: ``unknown_mcp_server``, ``mcp_server_not_refreshed``, ``unknown_tool``.
    """
    for tool in tools:
        if tool["type"] == "mcp":
            try:
                _existing(tool, servers)
            except InvalidInputError as error:
                raise InvalidInputError(error.detail, code=error.code, pointer="/graph") from None


def _existing(tool: Mapping[str, Any], servers: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    name: str = tool["server"]
    if name not in servers:
        raise InvalidInputError(
            f"there is no MCP server '{name}': create it with POST /v1/mcp-servers, or correct "
            "the name",
            code="unknown_mcp_server",
        )
    known = servers[name]["tools"]
    if known is None:
        raise InvalidInputError(
            f"the tools of the MCP server '{name}' are unknown: first send POST "
            f"/v1/mcp-servers/{name}/refresh",
            code="mcp_server_not_refreshed",
        )
    names: Sequence[str] = tool.get("tools") or known
    if unknown := sorted(set(names) - set(known)):
        raise InvalidInputError(
            f"the MCP server '{name}' has no tool {', '.join(unknown)}: correct the name, or send "
            f"POST /v1/mcp-servers/{name}/refresh if the tool is new",
            code="unknown_tool",
        )
    return names


class McpError(UnavailableError):
    """An MCP server does not answer, or its answer breaks the protocol."""

    code = "mcp_unreachable"


@dataclass(frozen=True, slots=True)
class StdioCommand:
    """A program that is an MCP server on its standard input and output.

    Attributes:
        env: the program's environment, in addition to PATH, HOME and LANG of this process.
        secrets: values in ``env`` that texts for people and models must not show.
    """

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)


class Headers(NamedTuple):
    """Header fields of requests to a server, and the secret values among them."""

    fields: Mapping[str, str]
    secrets: Sequence[str] = ()


async def no_headers() -> Headers:
    return Headers({})


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server, which has either a ``url`` or a ``command``.

    Attributes:
        url: URL of a server with the transport *streamable HTTP*; ``None`` for a program.
        headers: function that returns the header fields; called for each connection. The client
            sends these fields only to ``url``.
        timeout_s: seconds within which the server must answer, without the time in which people
            answer the server's questions.
        max_bytes: maximum size in bytes of one answer.
        tenant: name of the tenant that connects to the server.
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
        input_schema: JSON Schema of the tool's arguments, within Bottega's limits.
        warnings: texts that say how Bottega changed the server's tool to keep Bottega's limits.
    """

    name: str
    description: str
    input_schema: dict[str, JsonValue]
    warnings: tuple[str, ...] = ()
