"""Routes of MCP servers: their addresses, and the tools of the last refresh."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import func, select, update

from bottega.api.errors import problems
from bottega.api.schemas.base import NAME_PATTERN, Answer, Body, Name, named_examples
from bottega.api.shared.definitions import (
    Caller,
    DefinitionName,
    DefinitionRoutes,
    Sending,
    refuse_foreign,
)
from bottega.api.shared.deps import Actor, DefineTenant, ServiceDep
from bottega.api.shared.processes import TenantLimit
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.db.tables import tenants
from bottega.definitions import store
from bottega.definitions.store import MCP_SERVERS, Definition
from bottega.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UpstreamError,
)
from bottega.json_schema.values import WHOLE
from bottega.mcp.client import list_tools
from bottega.redaction import Redactor
from bottega.settings.providers import is_endpoint, may_be_sent
from bottega.tenants import audit
from bottega.tools.egress import refuse_inside
from bottega.tools.guard import AllowList, EgressRefusedError
from bottega.tools.http import SecretHeader

_Url = Annotated[
    str,
    StringConstraints(min_length=1, max_length=2000),
    AfterValidator(is_endpoint),
    Field(description="URL of the endpoint for streamable HTTP. Redirects are not followed."),
]
_Command = Annotated[
    str,
    StringConstraints(pattern=NAME_PATTERN),
    Field(description="A key of the operator's setting BOTTEGA_MCP_STDIO: a local program."),
]
_Headers = Annotated[
    dict[str, str | SecretHeader],
    AfterValidator(may_be_sent),
    Field(max_length=50, description='Sent with each request: text or `{"secret": "NAME"}`.'),
]


class McpServerBody(Body):
    """An MCP server's definition, which may repeat the name in the path."""

    model_config = ConfigDict(
        hide_input_in_errors=True,
        json_schema_extra={
            "examples": [
                {"url": "https://mcp.example.com/mcp", "headers": {"x-key": {"secret": "MCP_KEY"}}},
                {"command": "time"},
            ]
        },
    )

    name: Name | None = None
    """Null, or the name in the path."""
    url: _Url | None = None
    command: _Command | None = None
    headers: _Headers = Field(default_factory=dict)
    timeout_s: Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)] = 30.0
    """Timeout of one tool call, in seconds."""
    max_bytes: Annotated[int, Field(ge=1000, le=20_000_000), WHOLE] = 1_000_000
    """Maximum size of a message from the server, in bytes."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise PydanticCustomError(
                "one_way", "send either url, for a remote server, or command, for a local server"
            )
        if self.command is not None and self.headers:
            raise PydanticCustomError("headers", "a local command gets no headers: leave them out")
        return self


class NewMcpServer(McpServerBody):
    """An MCP server to create."""

    model_config = ConfigDict(json_schema_extra=named_examples(McpServerBody, "shop", "clock"))

    name: Name


class McpServerSummary(Answer):
    """One version of an MCP server, without its headers and tools."""

    shows = McpServerBody

    name: str
    """Name of the MCP server, unique in the tenant."""
    version: int
    """Number of this version, from 1."""
    url: str | None
    command: str | None
    timeout_s: float
    max_bytes: int
    tools_at: datetime | None
    """Time of the refresh that read the server's tools; null: there was no refresh yet."""
    stale: bool = False
    """True: during a run, the server reported that its tools have changed. Then send `POST
    /v1/mcp-servers/{name}/refresh`."""
    created_at: datetime
    """Time at which this version was stored."""


class McpServerTool(Answer):
    """A tool of an MCP server, as models see it."""

    name: str
    """The server's name for the tool."""
    description: str
    """The server's description of the tool."""
    input_schema: dict[str, Any]
    """JSON Schema of the arguments."""


class McpServer(McpServerSummary):
    """One version of an MCP server."""

    headers: dict[str, str | SecretHeader]
    tools: list[McpServerTool] | None
    """Tools that the last refresh read; null: there was no refresh yet."""
    warnings: list[str]
    """Parts of the tools that Bottega had to change or leave out."""


class McpServerTools(Answer):
    """The tools that an MCP server listed at the last refresh."""

    version: int
    """Version of the server's definition. If the tools changed, this is a new version."""
    tools: list[McpServerTool]
    """Tools that agents can use from now on."""
    warnings: list[str]


_ADDRESS = ("url", "command")
_ASKED = (*_ADDRESS, "headers")
_READ = ("tools", "warnings", "tools_at", "stale")


def with_tools_of(content: dict[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the tools of the previous version to a definition from a client.

    If the address changed, the result has no tools, because the server at the new address may have
    other tools. A refresh reads the tools at the new address.
    """
    if earlier is not None and all(content[each] == earlier[each] for each in _ADDRESS):
        return content | {each: earlier[each] for each in _READ if each in earlier}
    return content | {"tools": None, "warnings": [], "tools_at": None, "stale": False}


async def store_tools(
    connection: AsyncConnection,
    tenant_id: UUID,
    definition: Definition,
    tools: Sequence[Mapping[str, Any]],
    warnings: Sequence[str],
) -> tuple[Definition, bool]:
    """Store the tools in an MCP server's response.

    Args:
        definition: the definition with which Bottega requested the tools from the server.

    Returns:
        The current definition, and true if this definition is a new version.

    Raises:
        NotFoundError: somebody deleted the definition after the request for the tools.
        ConflictError: ``changed``: somebody changed the server's address or headers after the
            request.
    """
    current = await store.get(connection, MCP_SERVERS, tenant_id, definition.name, lock=True)
    if any(current.content[each] != definition.content[each] for each in _ASKED):
        raise ConflictError(
            f"the MCP server '{definition.name}' was replaced during the refresh: refresh it again",
            code="changed",
        )
    listing = {"tools": list(tools), "warnings": list(warnings)}
    if all(current.content[each] == listing[each] for each in listing):
        await _set_fresh(connection, tenant_id, current)
        return current, False
    now: datetime = (await connection.execute(select(func.now()))).scalar_one()
    content = current.content | listing | {"tools_at": now.isoformat(), "stale": False}
    return await store.replace(connection, MCP_SERVERS, tenant_id, definition.name, content), True


async def _set_fresh(connection: AsyncConnection, tenant_id: UUID, current: Definition) -> None:
    if current.content.get("stale"):
        table = MCP_SERVERS.versions
        await connection.execute(
            update(table)
            .where(
                table.c.tenant_id == tenant_id,
                table.c.name == current.name,
                table.c.version == current.version,
            )
            .values(definition=current.content | {"stale": False})
        )


_refreshing = TenantLimit(4, "refreshes of MCP servers", "refreshes")


def sent_secrets(body: McpServerBody) -> list[Sending]:
    """Return the secrets that the definition sends to an MCP server."""
    return [
        Sending(f"/headers/{header}", value.secret, body.url)
        for header, value in body.headers.items()
        if isinstance(value, SecretHeader) and body.url is not None
    ]


async def prepare(caller: Caller, name: str, body: McpServerBody) -> dict[str, Any]:
    if body.name not in (None, name):
        raise InvalidInputError(
            f"the name in the body differs from '{name}' in the path: send the same name, or none",
            pointer="/name",
        )
    if body.url is not None:
        _refuse_private(body.url, AllowList.parse(caller.service.settings.egress_allow))
        await refuse_foreign(caller, sent_secrets(body))
    if body.command is not None and body.command not in caller.service.settings.mcp_stdio:
        raise InvalidInputError(
            f"the operator's BOTTEGA_MCP_STDIO has no command '{body.command}': correct the "
            "command, or send the url of an MCP server",
            code="unknown_command",
            pointer="/command",
        )
    content = body.model_dump(exclude={"name"})
    try:
        current = await store.get(caller.tx, MCP_SERVERS, caller.tenant, name, lock=True)
    except NotFoundError:
        return with_tools_of(content, None)
    return with_tools_of(content, current.content)


def _refuse_private(url: str, allowed: AllowList) -> None:
    try:
        refuse_inside(url, allowed)
    except EgressRefusedError as error:
        raise InvalidInputError(error.detail, code="egress_forbidden", pointer="/url") from None


def _with_stale(_: Service, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the warnings, and a further warning if the server has reported changed tools."""
    if not content.get("stale") or "warnings" not in content:
        return {}
    warning = "the server says that its tools have changed: refresh it"
    return {"warnings": [*content["warnings"], warning]}


router = DefinitionRoutes(
    kind=MCP_SERVERS,
    new=NewMcpServer,
    content=McpServerBody,
    output=McpServer,
    summary=McpServerSummary,
    prepare=prepare,
    more_fields=_with_stale,
).router()


@router.post(
    "/{name}/refresh",
    operation_id="refresh_mcp_server",
    summary="Read the MCP server's tools",
    description=(
        "Asks the server for its tools, and stores them. If they changed, the definition gets a "
        "new version. Runs that were accepted before keep the old tools."
    ),
    response_model=McpServerTools,
    responses=problems(404, 409, 429, 502),
)
async def refresh(
    service: ServiceDep, tenant: DefineTenant, actor: Actor, name: DefinitionName
) -> Any:
    async with service.database.begin(tenant) as tx:
        definition = await store.get(tx, MCP_SERVERS, tenant, name)
        query = select(tenants.c.name).where(tenants.c.id == tenant)
        tenant_name: str = (await tx.execute(query)).scalar_one()
    with _refreshing.enter(tenant):
        tools, warnings = await _request_tools(service, tenant, tenant_name, definition)
    async with service.database.begin(tenant) as tx:
        stored, is_new = await store_tools(tx, tenant, definition, tools, warnings)
        if is_new:
            about = {"version": stored.version}
            await audit.note(tx, tenant, actor, "mcp_server.refresh", name, about)
    return {"version": stored.version, "tools": tools, "warnings": warnings}


async def _request_tools(
    service: Service, tenant: UUID, tenant_name: str, definition: Definition
) -> tuple[list[dict[str, Any]], list[str]]:
    """Request a server's tools; return the tools, and warnings about the tools, without secrets.

    Raises:
        InvalidInputError: a header of the definition has a secret that the server may not get;
            ``unknown_command``.
        UpstreamError: ``mcp_unreachable``, ``egress_forbidden``.
    """
    outgoing = service.outgoing
    server = outgoing.mcp.server(tenant, tenant_name, definition.name, definition.content)
    secrets = () if server.command is None else server.command.secrets
    clean = Redactor(secrets, beside=await outgoing.secrets.known(tenant, tenant_name))
    try:
        found, warnings = await list_tools(server, outgoing.egress)
    except UnavailableError as error:
        raise UpstreamError(clean.text(error.detail), code=error.code) from None
    tools = [
        {
            "name": each.name,
            "description": clean.text(each.description),
            "input_schema": clean.value(each.input_schema),
        }
        for each in found
    ]
    return tools, [clean.text(warning) for warning in warnings]
