"""Routes of MCP servers: their addresses, and the tools that they had when they were asked last."""

from typing import Any

from bottega.api.schemas.mcp_servers import (
    McpServer,
    McpServerBody,
    McpServerSummary,
    NewMcpServer,
)
from bottega.api.shared.definitions import Caller, definition_router
from bottega.api.shared.secret_hosts import Sending, refuse_foreign
from bottega.definitions import store
from bottega.definitions.mcp_servers import with_tools_of
from bottega.definitions.store import MCP_SERVERS
from bottega.errors import InvalidInputError, NotFoundError
from bottega.tools.addresses import AllowList
from bottega.tools.egress import refuse_inside
from bottega.tools.guard import EgressRefusedError
from bottega.tools.http import SecretHeader


async def _prepare(caller: Caller, name: str, body: McpServerBody) -> dict[str, Any]:
    if body.name not in (None, name):
        raise InvalidInputError(
            f"the name is '{name}' in the path, and another one in the body", pointer="/name"
        )
    if body.url is not None:
        _refuse_private(body.url, AllowList.parse(caller.service.settings.egress_allow))
        sent = [
            Sending(f"/headers/{header}", value.secret, body.url)
            for header, value in body.headers.items()
            if isinstance(value, SecretHeader)
        ]
        await refuse_foreign(caller, sent)
    if body.command is not None and body.command not in caller.service.settings.mcp_stdio:
        raise InvalidInputError(
            f"the operator of this server has set no command '{body.command}' in "
            "BOTTEGA_MCP_STDIO: correct it, or give the url of a server",
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
    """Refuse a literal address that is not public; names are checked when they are used.

    Raises:
        InvalidInputError: ``egress_forbidden``.
    """
    try:
        refuse_inside(url, allowed)
    except EgressRefusedError as error:
        raise InvalidInputError(error.detail, code="egress_forbidden", pointer="/url") from None


router = definition_router(
    MCP_SERVERS,
    new=NewMcpServer,
    content=McpServerBody,
    output=McpServer,
    summary=McpServerSummary,
    prepare=_prepare,
)
