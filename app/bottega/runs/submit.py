"""Acceptance of a run: its row, pinned versions, first event and queue entry.

All is stored in the caller's transaction, so a run is queued exactly if the client's request
succeeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any
from uuid import UUID

from pydantic_core import from_json, to_json
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.definitions import store
from bottega.definitions.agents import Reached
from bottega.errors import InvalidInputError, LimitedError, UnknownAgentError
from bottega.runs.read import to_response
from bottega.runs.sessions import session_user

_MAX_CHAIN = 20
_MODES = ("off", "read", "full")

# Everything needed to pin versions, in one query: the graph, and every reachable agent.
_PINS = text("""
WITH RECURSIVE wanted AS (
    SELECT v.version, ARRAY(
        SELECT node ->> 'agent' FROM jsonb_array_elements(v.definition -> 'nodes') node) AS nodes
    FROM graphs g JOIN graph_versions v
      ON v.tenant_id = g.tenant_id AND v.name = g.name AND v.version = g.version
    WHERE g.tenant_id = :tenant AND g.name = CAST(:graph AS text) AND g.deleted_at IS NULL
), reached(name, version, definition) AS (
    SELECT a.name, v.version, v.definition FROM agents a JOIN agent_versions v
      ON v.tenant_id = a.tenant_id AND v.name = a.name AND v.version = a.version
    WHERE a.tenant_id = :tenant AND a.deleted_at IS NULL AND (
        a.name = CAST(:agent AS text) OR a.name = ANY((SELECT nodes FROM wanted)::text[]))
    UNION
    SELECT a.name, v.version, v.definition FROM reached
    CROSS JOIN jsonb_array_elements_text(reached.definition #> '{subagents,names}') AS child(name)
    JOIN agents a ON a.tenant_id = :tenant AND a.name = child.name AND a.deleted_at IS NULL
    JOIN agent_versions v
      ON v.tenant_id = a.tenant_id AND v.name = a.name AND v.version = a.version
)
SELECT CAST(jsonb_build_object(
    'graph', (SELECT jsonb_build_object('version', version, 'nodes', nodes) FROM wanted),
    'agents', (SELECT coalesce(jsonb_object_agg(name, jsonb_build_object(
        'version', version, 'undescribed', definition ->> 'description' = '',
        'memory', coalesce(definition ->> 'memory', 'full'),
        'children', coalesce(nullif(definition #> '{subagents,names}', 'null'), '[]'))), '{}')
        FROM reached)) AS text)
""")
_REFUSALS = {
    "queued_runs": "{limit} runs are queued already: wait until some have ended",
    "tokens_per_day": "the {limit} tokens for today (UTC) are used up: start more runs tomorrow",
}
_ACCEPT = text("""
SELECT CAST(accept_run(
    :tenant, CAST(:new AS jsonb), CAST(:carried AS jsonb), CAST(:tasks AS jsonb),
    CAST(:publications AS jsonb)) AS text)
""")


@dataclass(frozen=True, slots=True)
class NewRun:
    """A request for a run.

    Attributes:
        user: the integrator's name for its end user; ``None``: the session's user, if it has one.
        timeout_s: wall time from the first start on.
        queue_timeout_s: longest wait for that start.
        token_budget: input and output tokens of all model calls; ``None``: no limit.
        webhook_url: called when the run has ended.
        memory: ``off``, ``read`` or ``full``; the run's agents may make it stricter.
        principal: who starts it.
    """

    mode: str
    agent: str | None
    graph: str | None
    session_id: str | None
    user: str | None
    input: str | list[dict[str, Any]]
    priority: int
    timeout_s: float
    queue_timeout_s: float
    token_budget: int | None
    webhook_url: str | None
    metadata: dict[str, Any]
    memory: str
    principal: str | None

    @classmethod
    def of(
        cls,
        asked: Mapping[str, Any],
        *,
        timeout_s: float,
        queue_timeout_s: float,
        memory: str,
        principal: str | None,
    ) -> "NewRun":
        """Build it from a validated body of ``POST /v1/runs``.

        Args:
            timeout_s, queue_timeout_s: the server's defaults.
            memory: the server's mode; the body can only make it stricter.
        """
        limits = {"timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s}
        asked = {**asked, "memory": stricter(memory, asked.get("memory") or memory)}
        known = [field.name for field in fields(cls)]  # a stored body may have other fields
        given = {name: asked[name] for name in known if asked.get(name) is not None}
        return cls(**{**dict.fromkeys(known), **limits, **given, "principal": principal})


def stricter(*modes: str) -> str:
    """Return the strictest of some memory modes."""
    return min(modes, key=_MODES.index)


@dataclass(frozen=True, slots=True)
class Carried:
    """Steps that a run copies from the run that it repeats.

    Attributes:
        events: of the log, from ``seq`` 2 on.
        tasks, publications: rows that result from the events.
    """

    events: Sequence[Mapping[str, Any]] = ()
    tasks: Sequence[Mapping[str, Any]] = ()
    publications: Sequence[Mapping[str, Any]] = ()


async def submit(connection: AsyncConnection, tenant_id: UUID, new: NewRun) -> dict[str, Any]:
    """Store and queue a run; return it as :func:`bottega.runs.read.get` does.

    Raises:
        UnknownAgentError: an agent that it needs does not exist.
        InvalidInputError: its graph does not exist (``unknown_graph``), a sub-agent has no
            description (``missing_description``), or its sub-agents nest too deep (``too_deep``).
        LimitedError, ConflictError: see :func:`accept`.
    """
    pinned, memory = await _pin_versions(connection, tenant_id, new)
    return await accept(connection, tenant_id, {**asdict(new), "pinned": pinned, "memory": memory})


async def accept(
    connection: AsyncConnection,
    tenant_id: UUID,
    new: Mapping[str, Any],
    carried: Carried = Carried(),
) -> dict[str, Any]:
    """Store and queue a run whose values are complete and checked.

    Args:
        new: columns of its row, with ``pinned``.
        carried: steps copied from another run.

    Raises:
        LimitedError: ``queued_runs`` or ``tokens_per_day``.
        ConflictError: ``session_user``.
    """
    values = {
        "tenant": tenant_id,
        "new": to_json(new).decode(),
        "carried": to_json(carried.events).decode(),
        "tasks": to_json(carried.tasks).decode(),
        "publications": to_json(carried.publications).decode(),
    }
    answer = from_json(await connection.scalar(_ACCEPT, values))
    if (reason := answer.get("refused")) == "session_user":
        raise session_user(new["session_id"])
    if reason is not None:
        what = _REFUSALS[reason].format(limit=answer["limit"])
        raise LimitedError(what, code=reason, retry_after_s=answer["retry_after_s"])
    return to_response(answer)


async def _pin_versions(
    connection: AsyncConnection, tenant_id: UUID, new: NewRun
) -> tuple[dict[str, Any], str]:
    """Return the versions that the run keeps, and its memory mode.

    The mode is the strictest of the request's and those of the agents that it starts with.
    """
    found = from_json(
        await connection.scalar(
            _PINS, {"tenant": tenant_id, "agent": new.agent, "graph": new.graph}
        )
    )
    nodes: list[str] = []
    graph: dict[str, Any] | None = None
    if new.graph is not None:
        if found["graph"] is None:
            raise InvalidInputError(
                f"there is no graph '{new.graph}'", code="unknown_graph", pointer="/graph"
            )
        nodes = found["graph"]["nodes"]
        graph = {"name": new.graph, "version": found["graph"]["version"]}
    named_by = dict.fromkeys(nodes, "/graph")
    if new.agent is not None:
        named_by = {new.agent: "/agent"} | named_by
    agents = {
        name: Reached(agent["version"], tuple(agent["children"]), agent["undescribed"])
        for name, agent in found["agents"].items()
    }
    for name, agent in agents.items():
        named_by |= {
            child: f"sub-agent of {name}" for child in agent.children if child not in named_by
        }
    if unknown := store.missing(list(named_by), list(agents)):
        listed = ", ".join(f"'{name}' ({named_by[name]})" for name in unknown)
        raise UnknownAgentError(
            f"no such agent: {listed}. Create it, or correct the name",
            pointer=next((place for name in unknown if (place := named_by[name])[0] == "/"), None),
        )
    _refuse_depth(new.agent, agents)
    called = {child for agent in agents.values() for child in agent.children}
    if undescribed := sorted(name for name in called if agents[name].undescribed):
        raise InvalidInputError(
            f"sub-agents need a description, so that a model knows when to call them: "
            f"{', '.join(undescribed)}",
            code="missing_description",
        )
    first = [new.agent] if new.agent is not None else nodes
    memory = stricter(new.memory, *(found["agents"][name]["memory"] for name in first))
    pinned = {name: agent.version for name, agent in agents.items()}
    return {"agents": pinned, "graph": graph}, memory


def _refuse_depth(root: str | None, agents: Mapping[str, Reached]) -> None:
    """Refuse chains of sub-agents that are too deep to build, cycles among them."""
    level = set(agents) if root is None else {root}
    for _ in range(_MAX_CHAIN):
        level = {child for name in level if name in agents for child in agents[name].children}
        if not level:
            return
    raise InvalidInputError(
        f"its sub-agents are nested more than {_MAX_CHAIN} deep: make the chain shorter",
        code="too_deep",
    )
