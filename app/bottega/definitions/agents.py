"""Checks specific to agents: their references to sub-agents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json
from sqlalchemy import Table, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.tables import agent_versions, graph_versions
from bottega.errors import CycleError, InvalidInputError

TASK_TOOLS = (
    *("dispatch_subagent", "dispatch_subagents", "poll_subagent", "await_subagent"),
    *("cancel_subagent", "send_to_subagent"),
    *("read_file", "write_file", "list_files"),
)
"""Tools of an agent in mode ``async``, besides the agent's own."""
_REACHABLE = text("""
WITH RECURSIVE reached(name) AS (
    SELECT unnest(CAST(:roots AS text[]))
    UNION
    SELECT child.name
    FROM reached
    JOIN agents a ON a.tenant_id = :tenant AND a.name = reached.name AND a.deleted_at IS NULL
    JOIN agent_versions v
      ON v.tenant_id = :tenant AND v.name = a.name AND v.version = a.version
    CROSS JOIN jsonb_array_elements_text(v.definition #> '{subagents,names}') AS child(name)
)
SELECT a.name, a.version, v.definition ->> 'description' = '' AS undescribed,
       v.definition -> 'stateless' = 'false' AS stateful,
       ARRAY(SELECT jsonb_array_elements_text(v.definition #> '{subagents,names}')) AS children
FROM reached
JOIN agents a ON a.tenant_id = :tenant AND a.name = reached.name AND a.deleted_at IS NULL
JOIN agent_versions v ON v.tenant_id = :tenant AND v.name = a.name AND v.version = a.version
""")

_EXPOSED = "SELECT exposed_input($1, $2, $3)::text AS schema"


@dataclass(frozen=True, slots=True)
class Reached:
    """An agent that others can call.

    Attributes:
        version: current version.
        children: names of its sub-agents.
        undescribed: it has no description, so a model cannot know when to call it.
        stateful: it keeps its conversation from call to call.
    """

    version: int
    children: tuple[str, ...]
    undescribed: bool
    stateful: bool


async def reachable(
    connection: AsyncConnection, tenant_id: UUID, roots: Sequence[str]
) -> dict[str, Reached]:
    """Return existing agents among ``roots`` and their sub-agents at all depths, by name."""
    rows = await connection.execute(_REACHABLE, {"tenant": tenant_id, "roots": list(roots)})
    return {
        row.name: Reached(row.version, tuple(row.children), row.undescribed, row.stateful)
        for row in rows
    }


async def hold_sub_agents(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Let no other transaction change which sub-agents agents have, until this one ends.

    Comes before any lock on an agent's row.
    """
    await connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended('agents:' || :tenant, 0))"),
        {"tenant": str(tenant_id)},
    )


async def refuse_circle(
    connection: AsyncConnection, tenant_id: UUID, name: str, children: Sequence[str]
) -> Mapping[str, Reached]:
    """Check that ``name`` may have these sub-agents; return those that exist, at all depths.

    Holds a lock until the transaction ends, so that two concurrent definitions cannot close a
    cycle together.

    Raises:
        CycleError: ``name`` is a sub-agent of one of them, at any depth.
    """
    if not children:
        return {}
    await hold_sub_agents(connection, tenant_id)
    found = await reachable(connection, tenant_id, children)
    edges = {agent: reached.children for agent, reached in found.items()} | {name: tuple(children)}
    if path := circle(edges, name):
        raise CycleError(path, what="sub-agent")
    return found


def refuse_stateful(name: str, children: Sequence[str], found: Mapping[str, Reached]) -> None:
    """Check that an agent in mode ``async`` has no sub-agent with one conversation for all calls.

    Raises:
        InvalidInputError: ``stateful_subagent``.
    """
    for index, child in enumerate(children):
        if child in found and found[child].stateful:
            raise InvalidInputError(
                f"'{child}' has \"stateless\": false, and each task of '{name}' has a conversation "
                f"of its own: give '{child}' \"stateless\": true, or '{name}' the mode 'sync'",
                code="stateful_subagent",
                pointer=f"/subagents/names/{index}",
            )


def circle(edges: Mapping[str, Iterable[str]], start: str) -> list[str] | None:
    """Return a path along ``edges`` from ``start`` to itself, or ``None``. O(nodes + edges)."""
    came_from: dict[str, str] = {}
    waiting = [start]
    while waiting:
        node = waiting.pop()
        for child in edges.get(node, ()):
            if child == start:
                path = [start, node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1] if len(path) > 2 or node != start else [start, start]
            if child not in came_from:
                came_from[child] = node
                waiting.append(child)
    return None


async def exposed_inputs(
    driver: asyncpg.Pool, tenant_id: UUID, agent: str, way: str
) -> Sequence[Any]:
    """Return the ``input_schema`` of an agent, alone in a list; ``[]``: it is not exposed so."""
    rows = await driver.fetch(_EXPOSED, tenant_id, agent, way)
    return [None if row["schema"] is None else from_json(row["schema"]) for row in rows]


async def first_subagents(
    connection: AsyncConnection, tenant_id: UUID, pinned: Mapping[str, Any], agent: str | None
) -> dict[str, Any] | None:
    """Return the ``subagents`` of a run's first agent: ``agent``, else its graph's first node."""
    if agent is None:
        name, number = pinned["graph"]["name"], pinned["graph"]["version"]
        nodes = await _defined(connection, graph_versions, tenant_id, name, number, "nodes")
        agent = nodes[0]["agent"]
    number = pinned["agents"][agent]
    subagents: dict[str, Any] | None = await _defined(
        connection, agent_versions, tenant_id, agent, number, "subagents"
    )
    return subagents


async def _defined(
    connection: AsyncConnection,
    versions: Table,
    tenant_id: UUID,
    name: str,
    number: int,
    field: str,
) -> Any:
    columns = versions.c
    query = select(columns.definition[field]).where(
        columns.tenant_id == tenant_id, columns.name == name, columns.version == number
    )
    return (await connection.execute(query)).scalar_one()
