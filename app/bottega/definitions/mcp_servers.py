"""Definitions of MCP servers: an address, and the tools that were read there."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.definitions import store
from bottega.definitions.kinds import MCP_SERVERS
from bottega.definitions.store import Definition
from bottega.errors import ConflictError

_ADDRESS = ("url", "command")
_ASKED = (*_ADDRESS, "headers")
_READ = ("tools", "warnings", "tools_at", "stale")


def with_tools_of(content: dict[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a definition from a client, with the tools of the version before.

    A server at another address has other tools: they must be read first.
    """
    if earlier is not None and all(content[each] == earlier[each] for each in _ADDRESS):
        return content | {each: earlier[each] for each in _READ if each in earlier}
    return content | {"tools": None, "warnings": [], "tools_at": None, "stale": False}


async def store_tools(
    connection: AsyncConnection,
    tenant_id: UUID,
    asked: Definition,
    tools: Sequence[Mapping[str, Any]],
    warnings: Sequence[str],
) -> tuple[Definition, bool]:
    """Store the tools that a server said; return its definition, and if that is a new version.

    Args:
        asked: the definition by which the server was asked.

    Raises:
        NotFoundError: it was deleted meanwhile.
        ConflictError: ``changed``: it has another address by now.
    """
    current = await store.get(connection, MCP_SERVERS, tenant_id, asked.name, lock=True)
    if any(current.content[each] != asked.content[each] for each in _ASKED):
        raise ConflictError(
            f"the MCP server '{asked.name}' was replaced while it was asked: refresh it again",
            code="changed",
        )
    found = {"tools": list(tools), "warnings": list(warnings)}
    if all(current.content[each] == found[each] for each in found):
        await _set_fresh(connection, tenant_id, current)
        return current, False
    now: datetime = (await connection.execute(select(func.now()))).scalar_one()
    content = current.content | found | {"tools_at": now.isoformat(), "stale": False}
    return await store.replace(connection, MCP_SERVERS, tenant_id, asked.name, content), True


async def _set_fresh(connection: AsyncConnection, tenant_id: UUID, current: Definition) -> None:
    """Take the mark from stored tools that the server has confirmed: no version of their own."""
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
