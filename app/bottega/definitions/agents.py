"""References from agents' definitions to sub-agents and to models.

A reference to a model is ``MODEL``, ``provider/MODEL`` or ``provider:MODEL``.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import text

from bottega.agents.provider import DialectName
from bottega.db.pool import AsyncConnection
from bottega.errors import CycleError, InvalidInputError

TASK_TOOLS = (
    *("dispatch_subagent", "dispatch_subagents", "poll_subagent", "await_subagent"),
    *("cancel_subagent", "send_to_subagent"),
    *("read_file", "write_file", "list_files"),
)
"""Tools that an agent in mode ``async`` has in addition to its own tools."""
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

EXPOSED = """
SELECT (v.definition -> 'input_schema')::text AS schema FROM agents a
JOIN agent_versions v ON v.tenant_id = $1 AND v.name = a.name AND v.version = a.version
WHERE a.tenant_id = $1 AND a.name = $2 AND a.deleted_at IS NULL AND v.definition -> 'expose' ? $3
"""
"""SQL for an agent's ``input_schema``. Parameters: tenant, name, and a value of ``expose``."""


@dataclass(frozen=True, slots=True)
class Reached:
    """An agent of a team: a root, or a sub-agent at any depth.

    Attributes:
        version: the current version of the agent.
        children: names of the agent's sub-agents.
        undescribed: true: the agent has no description, so models cannot know when to call this
            agent.
        stateful: true: all calls of this agent share one conversation.
    """

    version: int
    children: tuple[str, ...]
    undescribed: bool
    stateful: bool


async def reachable(
    connection: AsyncConnection, tenant_id: UUID, roots: Sequence[str]
) -> dict[str, Reached]:
    """Return the existing agents of ``roots``, and their sub-agents at all depths, by name."""
    rows = await connection.execute(_REACHABLE, {"tenant": tenant_id, "roots": list(roots)})
    return {
        row.name: Reached(row.version, tuple(row.children), row.undescribed, row.stateful)
        for row in rows
    }


async def hold_sub_agents(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Lock every agent's list of sub-agents until the end of this transaction.

    A transaction must call this function before it locks the row of an agent.
    """
    await connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended('agents:' || :tenant, 0))"),
        {"tenant": str(tenant_id)},
    )


async def refuse_circle(
    connection: AsyncConnection, tenant_id: UUID, name: str, children: Sequence[str]
) -> Mapping[str, Reached]:
    """Check that ``name`` may have ``children``; return the existing sub-agents at all depths.

    The function calls :func:`hold_sub_agents`, because two concurrent changes could together close
    a cycle.

    Raises:
        CycleError: ``name`` is a sub-agent of one of ``children``, at any depth.
    """
    if not children:
        return {}
    await hold_sub_agents(connection, tenant_id)
    below = await reachable(connection, tenant_id, children)
    edges = {agent: reached.children for agent, reached in below.items()} | {name: tuple(children)}
    if path := circle(edges, name):
        raise CycleError(path, what="sub-agent")
    return below


def refuse_stateful(name: str, children: Sequence[str], below: Mapping[str, Reached]) -> None:
    """Check that an agent in mode ``async`` has no sub-agent whose calls share a conversation.

    Raises:
        InvalidInputError: a sub-agent shares a conversation (``stateful_subagent``).
    """
    for index, child in enumerate(children):
        if child in below and below[child].stateful:
            raise InvalidInputError(
                f"'{child}' has \"stateless\": false, but each task of '{name}' has its own "
                f"conversation: set \"stateless\": true in '{child}', or mode 'sync' in '{name}'",
                code="stateful_subagent",
                pointer=f"/subagents/names/{index}",
            )


def circle(edges: Mapping[str, Iterable[str]], start: str) -> list[str] | None:
    """Return a path from ``start`` back to ``start``, in O(nodes + edges); ``None``: no path."""
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


OVERRIDABLE = ("system_message", "model", "max_iterations")
"""Fields of a definition that a run's overrides may replace."""


def overridden(definition: Mapping[str, Any], changed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an agent's definition with a run's changes; without changes, the same object."""
    fields = {name: changed[name] for name in OVERRIDABLE if name in changed}
    return {**definition, **fields} if fields else definition


def with_default(definition: Mapping[str, Any], model: str | None) -> Mapping[str, Any]:
    """Return an agent's definition; if it names no model, add the run's default model."""
    return definition if model is None or definition["model"] else {**definition, "model": model}


DEMO = "~demo"
"""Provider of drafts that use the demo model; no definition can have this name."""
OF_DEMO: Mapping[str, Any] = {
    **dict.fromkeys(("params", "recall", "approval")),
    "model": f"{DEMO}/demo",
    "success_check": [],
}
"""Fields that replace the fields of each agent in a draft that uses the demo model."""

DEFAULT = "default"
"""Name of the provider for references that name no provider."""
MOST_MODELS = 10
"""Maximum number of models of one agent."""


class ModelName(NamedTuple):
    """A model of a provider; a ``model`` of ``None`` means the provider's default model."""

    provider: str
    model: str | None


class KnownProvider(NamedTuple):
    """Fields of a provider, for the check of references to the provider's models.

    Attributes:
        version: version of the tenant's provider; ``None``: the provider belongs to the operator.
        models: the models that the provider has; ``None``: all models are allowed.
        headers: headers in the provider's definition.
        base_url: base URL in the provider's definition.
        prices: prices in the provider's definition.
    """

    version: int | None
    dialect: DialectName
    models: Sequence[str] | None = None
    headers: Mapping[str, Any] = MappingProxyType({})
    base_url: str | None = None
    prices: Mapping[str, Any] | None = None


def listed(model: str | Sequence[str] | None) -> Sequence[str | None]:
    """Return the models of an agent in the order of use; ``None`` means the default model."""
    return (model,) if model is None or isinstance(model, str) else tuple(model)


def named_by(reference: str | None, providers: Collection[str]) -> ModelName:
    """Return the provider and the model of a reference.

    The text before the first slash is a provider's name only if this provider exists, because names
    of models may contain slashes. The text before a colon is always a provider's name.

    Raises:
        InvalidInputError: ``unknown_provider``.
    """
    if reference is None:
        return _of_default(None, providers)
    before, slash, rest = reference.partition("/")
    if slash and rest and before in providers:
        return ModelName(before, rest)
    before, colon, rest = before.partition(":")
    if not colon:
        return _of_default(reference, providers)
    if before not in providers or not rest + slash:
        raise InvalidInputError(
            f"the model '{reference}' names the provider '{before}', which does not exist: create "
            f"this provider, or write {DEFAULT}/{reference} for a model of '{DEFAULT}'",
            code="unknown_provider",
        )
    return ModelName(before, reference[len(before) + 1 :])


def _of_default(model: str | None, providers: Collection[str]) -> ModelName:
    if DEFAULT not in providers:
        about = "an agent without a model" if model is None else f"the model '{model}'"
        raise InvalidInputError(
            f"{about} needs a provider: write provider/MODEL, or create a provider '{DEFAULT}'",
            code="unknown_provider",
        )
    return ModelName(DEFAULT, model)


def checked(reference: str | None, providers: Mapping[str, KnownProvider]) -> ModelName:
    """Check that a reference's provider has its model; return the provider and the model.

    Raises:
        InvalidInputError: ``unknown_provider``, ``unknown_model``.
    """
    name = named_by(reference, providers)
    models = providers[name.provider].models
    if models is not None and name.model is not None and name.model not in models:
        raise InvalidInputError(
            f"the provider '{name.provider}' does not list the model '{name.model}': its models "
            f"are {', '.join(models) or 'none'}",
            code="unknown_model",
        )
    return name
