"""The graph of a run as it stood at an event of its log, for the API."""

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Integer, Select, bindparam, func, select, text, tuple_
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.tables import run_events
from bottega.definitions import kinds
from bottega.definitions.graphs import to_graph
from bottega.definitions.pinned import pinned_graph, pins_of
from bottega.engine.replay import AGENT_CHANGES, ENDS, NODE_STATES, RunReplay, replay_run
from bottega.errors import InvalidInputError, NotFoundError
from bottega.events.log import STEP_EVENTS
from bottega.events.types import FINAL_EVENT, EventType
from bottega.graph.decisions import is_plain, name_of_node
from bottega.runs import read
from bottega.runs.messages import read_events

_GRAPH = select(kinds.GRAPHS.versions.c.definition).where(
    kinds.GRAPHS.versions.c.tenant_id == bindparam("tenant"),
    kinds.GRAPHS.versions.c.name == bindparam("name"),
    kinds.GRAPHS.versions.c.version == bindparam("version"),
)
_LAST = text("SELECT last_seq FROM run_cursor(:tenant, :run)")
_OF_TASKS = (
    *(*AGENT_CHANGES, EventType.AGENT_COMPLETED, EventType.AGENT_FAILED),
    *(EventType.SUBAGENT_DISPATCHED, EventType.SUBAGENT_STATUS_CHANGED, *ENDS),
    *(EventType.RUN_RESUMED, *FINAL_EVENT.values()),
)
"""Types of events that change the status of a task."""
_OF_NODES = (*_OF_TASKS, *NODE_STATES, EventType.EDGE_DECIDED)
_STATES_OF_TASKS = {
    "queued": "pending",
    "streaming": "running",
    "timeout": "failed",
    "cancelled": "failed",
}


async def definition_of(
    connection: AsyncConnection, tenant_id: UUID, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the definition of the graph that a run pinned.

    Raises:
        NotFoundError: ``no_graph``.
    """
    if (pinned := run["pinned"]["graph"]) is None:
        raise NotFoundError(f"run {run['id']} has no graph", code="no_graph")
    named = {field: pinned[field] for field in ("name", "version")}
    found = await connection.execute(_GRAPH, {"tenant": tenant_id, **named})
    definition: dict[str, Any] = found.scalar_one()
    return definition


async def whole_definition_of(
    connection: AsyncConnection, tenant_id: UUID, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the definition of the graph that a run pinned, with its sub-graphs' definitions.

    Raises:
        NotFoundError: ``no_graph``.
    """
    pinned = {"graph": run["pinned"]["graph"]}
    pins = {(pin.name, pin.version): pin for pin in pins_of(tenant_id, pinned)}
    columns = kinds.GRAPHS.versions.c
    query = select(columns.name, columns.version, columns.definition).where(
        columns.tenant_id == tenant_id, tuple_(columns.name, columns.version).in_(pins)
    )
    rows = await connection.execute(query)
    found = {pins[row.name, row.version]: row.definition for row in rows}
    definition = pinned_graph(tenant_id, pinned, found)
    if definition is None:
        raise NotFoundError(f"run {run['id']} has no graph", code="no_graph")
    return definition


async def graph(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, seq: int | None = None
) -> dict[str, Any]:
    """Return a run's graph, with the states and publications of its nodes.

    Args:
        seq: the event after which the graph is read; ``None``: the run's last event.

    Raises:
        NotFoundError: unknown run, or (code ``no_graph``) a run without a graph.
        InvalidInputError: the run has no event ``seq``.
    """
    run = await read.get(connection, tenant_id, run_id)
    definition = await definition_of(connection, tenant_id, run)
    of_run = {"tenant": tenant_id, "run": run_id}
    last = await connection.scalar(_LAST, of_run)
    if (seq := seq or last) > last:
        raise InvalidInputError(
            f"the last event of run {run_id} has the seq {last}: give a seq from 1 to {last}",
            pointer="/seq",
        )
    rows: dict[str, Any] = {
        item["agent"]: {**item, "task_id": None, "metadata": item["details"].get("metadata") or {}}
        for item in run["session_base"] or ()
    }
    published = await connection.execute(_published(), {**of_run, "until": seq})
    rows |= {row["agent"]: row for row in published.mappings()}
    states = await _node_states(connection, tenant_id, run, definition, seq)
    defined = {name_of_node(node): node for node in definition["nodes"]}
    nodes = [
        {
            "type": "agent",
            **defined[name],
            "name": name,
            "status": states.statuses.get(name, "pending"),
            "reason": states.reasons.get(name),
            "taken_over": states.ends.get(name, seq + 1) <= run["carried_seq"],
            "published": None if name in states.reasons else rows.get(name),
        }
        for name in to_graph(definition).get_topological_order()
    ]
    edges = [
        {**edge, "taken": states.taken.get((edge["source"], edge["target"]))}
        for edge in definition["edges"]
    ]
    pinned = run["pinned"]["graph"]
    named = {field: pinned[field] for field in ("name", "version")}
    return {**named, "seq": seq, "nodes": nodes, "edges": edges}


class _NodeStates(NamedTuple):
    """The states of a run's nodes, by name, and of its edges, by source and target.

    Attributes:
        reasons: the reason of each skipped node, by name.
        ends: ``seq`` of the last event of each node that has ended, by name.
    """

    statuses: Mapping[str, str]
    reasons: Mapping[str, str]
    taken: Mapping[tuple[str, str], bool]
    ends: Mapping[str, int]


async def _node_states(
    connection: AsyncConnection,
    tenant_id: UUID,
    run: Mapping[str, Any],
    definition: Mapping[str, Any],
    seq: int,
) -> _NodeStates:
    """Return the states of the nodes of a run's graph after an event, from a replay of the log."""
    decides = run["mode"] == "dag" and not is_plain(definition)
    events = await read_events(
        connection,
        {**run, "tenant_id": tenant_id},
        run_events.c.type.in_(_OF_NODES if decides else _OF_TASKS),
        run_events.c.seq <= seq,
        run_events.c.step < seq + STEP_EVENTS,
    )
    replay = await asyncio.to_thread(replay_run, events)  # a log may be long
    if not decides:
        ends = {
            task.agent: task.tries[-1].seq
            for task in replay.tasks.values()
            if task.agent is not None and task.tries
        }
        return _NodeStates(_statuses_by_agent(replay), {}, {}, ends)
    # The nodes of a sub-graph come after the node that contains it, and begin with its name.
    statuses: dict[str, str] = {}
    waiting_below: set[str] = set()
    for name, node in reversed(replay.nodes.items()):
        statuses[name] = node.status
        if node.status == "running":
            status = _unended(replay, replay.task(node.task_id).status)
            statuses[name] = "waiting" if name in waiting_below else status
        if statuses[name] == "waiting":
            parts = name.split("/")
            waiting_below.update("/".join(parts[:end]) for end in range(1, len(parts)))
    reasons = {name: why for name, node in replay.nodes.items() if (why := node.reason)}
    ends = {name: node.seq for name, node in replay.nodes.items() if node.status != "running"}
    return _NodeStates(statuses, reasons, replay.edges, ends)


def _unended(replay: RunReplay, status: str | None) -> str:
    """Return the status of a node that has not ended yet, from the status of its task."""
    if replay.is_over:
        return "failed"
    return "waiting" if status == "waiting" else "running"


def _statuses_by_agent(replay: RunReplay) -> dict[str, str]:
    """Return the status of each agent's last task."""
    found: dict[str, str] = {}
    for task_id, task in replay.tasks.items():
        if task_id is not None and task.agent is not None and task.status is not None:
            status = _STATES_OF_TASKS.get(task.status, task.status)
            is_open = status in ("running", "waiting")
            found[task.agent] = _unended(replay, status) if is_open else status
    return found


@cache
def _published() -> Select[Any]:
    """Select the last publication of each node of a run's graph, from its log."""
    version = run_events.c.data["version"].as_integer()
    name = func.coalesce(run_events.c.data["node"].astext, run_events.c.agent)
    until = bindparam("until", type_=Integer)
    last = (
        select(run_events, version.label("version"), name.label("name"))
        .where(
            run_events.c.tenant_id == bindparam("tenant"),
            run_events.c.run_id == bindparam("run"),
            run_events.c.seq <= until,
            run_events.c.step < until + STEP_EVENTS,
            run_events.c.type == EventType.MEMORY_PUBLISHED,
            name.not_like("%/%"),  # such a name is that of a sub-graph's node
        )
        .ext(distinct_on(name))
        .order_by(name, version.desc())
        .subquery()
    )
    answer = read.answer_in(last, read.event_data(last, last.c.data["answer_seq"].as_integer()))
    return select(
        last.c.name.label("agent"),
        last.c.version,
        last.c.task_id,
        last.c.at.label("published_at"),
        func.coalesce(last.c.data["content"].astext, answer).label("content"),
        func.coalesce(last.c.data["metadata"], text("'{}'::jsonb")).label("metadata"),
    )


async def published_graph(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, name: str
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a run's graph as a definition, and the version that each node has published.

    Skipped nodes have a ``reason``.

    Raises:
        NotFoundError: unknown run, or its graph has another name.
    """
    found = await graph(connection, tenant_id, run_id)
    if found["name"] != name:
        raise NotFoundError(f"run {run_id} has the graph '{found['name']}', not '{name}'")
    shown = ("name", "agent", "ttl_s", "reason", "graph", "for_each", "loop")
    nodes = [{field: node.get(field) for field in shown} for node in found["nodes"]]
    versions = {
        node["name"]: node["published"]["version"] for node in found["nodes"] if node["published"]
    }
    edges = [{**edge, "taken": None} for edge in found["edges"]]
    return {"nodes": nodes, "edges": edges, "ttl_s": None}, versions
