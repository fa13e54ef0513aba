"""The graph of a run in the API, with the states of the run's nodes after an event of the log.

A node may contain inner nodes: the node's elements, the turns of the node's loop, or the nodes of
the node's sub-graph. The API and the log give an inner node the same name: ``pages/0`` is an
element of ``pages``, ``improve/2`` a turn of ``improve``, ``improve/2/draft`` a node in this turn.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self
from uuid import UUID

from sqlalchemy import ARRAY, Integer, Select, Text, any_, bindparam, func, select, text, tuple_
from sqlalchemy.dialects.postgresql import distinct_on

from bottega.agents.query import task_id_at
from bottega.db.pool import AsyncConnection
from bottega.db.tables import run_events, runs
from bottega.definitions import store
from bottega.definitions.graphs import to_graph
from bottega.definitions.pinned import pinned_graph, pins_of
from bottega.engine.replay import (
    AGENT_CHANGES,
    ENDS,
    NODE_STATES,
    TOOL_ENDS,
    RunReplay,
    TaskReplay,
    replay_run,
)
from bottega.errors import InvalidInputError, NotFoundError
from bottega.events.log import STEP_EVENTS
from bottega.events.types import FINAL_EVENT, EventType
from bottega.graph.decisions import is_plain, name_of_node
from bottega.runs import read
from bottega.runs.messages import read_events

_LAST = text("SELECT last_seq FROM run_cursor(:tenant, :run)")
_task = runs.c.parent_task
_ELEMENTS = select(
    runs.c.id,
    runs.c.status,
    _task["node"].label("line"),
    _task["name"].astext.label("name"),
    _task["task_id"].astext.label("task_id"),
).where(runs.c.tenant_id == bindparam("tenant"), _task["node"].is_not(None))
_OWN_ELEMENT = _ELEMENTS.where(runs.c.id == bindparam("run"))
_CHILDREN = _ELEMENTS.where(runs.c.parent_run_id == bindparam("run"))
_OF_TASKS = (
    *(*AGENT_CHANGES, EventType.AGENT_COMPLETED, EventType.AGENT_FAILED),
    *(EventType.SUBAGENT_DISPATCHED, EventType.SUBAGENT_STATUS_CHANGED, *ENDS),
    *(EventType.RUN_RESUMED, *FINAL_EVENT.values()),
)
"""Types of events that change the status of a task."""
_OF_NODES = (*_OF_TASKS, *NODE_STATES, EventType.EDGE_DECIDED)
_OF_ELEMENTS = (EventType.TOOL_STARTED, *TOOL_ENDS)
"""Types of events that change the status of a tool node's element. The events may be long."""
_STATES_OF_TASKS = {
    "queued": "pending",
    "streaming": "running",
    "timeout": "failed",
    "cancelled": "failed",
}


async def definition_of(
    connection: AsyncConnection, tenant_id: UUID, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the definition of a run's pinned graph, including the definitions of its sub-graphs.

    Raises:
        NotFoundError: ``no_graph``.
    """
    pinned = {"graph": run["pinned"]["graph"]}
    pins = {(pin.name, pin.version): pin for pin in pins_of(tenant_id, pinned)}
    columns = store.GRAPHS.versions.c
    query = select(columns.name, columns.version, columns.definition).where(
        columns.tenant_id == tenant_id, tuple_(columns.name, columns.version).in_(pins)
    )
    rows = await connection.execute(query)
    definitions = {pins[row.name, row.version]: row.definition for row in rows}
    definition = pinned_graph(tenant_id, pinned, definitions)
    if definition is None:
        raise NotFoundError(f"run {run['id']} has no graph", code="no_graph")
    return definition


_Node = Mapping[str, Any]
"""Definition of a node, of a part of a node, or of a graph."""


class _Level(NamedTuple):
    """Nodes by name in topological order, and the edges between the nodes."""

    nodes: Mapping[str, _Node]
    edges: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, content: Mapping[str, Any], prefix: str = "") -> Self:
        """Read a graph's definition. Add the prefix to the nodes' names."""
        defined = {name_of_node(node): node for node in content["nodes"]}
        order = to_graph(content).get_topological_order()
        ends = ("source", "target")
        edges = [{**edge, **{end: prefix + edge[end] for end in ends}} for edge in content["edges"]]
        return cls({prefix + name: defined[name] for name in order}, edges)

    @classmethod
    def inside(cls, name: str, node: _Node, steps: Collection[str]) -> Self:
        """Return a node's inner nodes. ``steps``: last segments of the names of begun nodes."""
        for repetition in ("for_each", "loop"):
            if repetition in node:
                part = _without(repetition, node)
                numbers = sorted(int(step) for step in steps if step.isdecimal())
                return cls({f"{name}/{number}": part for number in numbers})
        if "definition" not in node:
            return cls({})
        nodes, edges = cls.of(node["definition"], f"{name}/")
        tries = [f"try-{number}" for number in range(2, node.get("retry", {"max": 0})["max"] + 2)]
        again = {f"{name}/{step}": _without("retry", node) for step in tries if step in steps}
        return cls({**nodes, **again}, edges)


def _without(field: str, node: _Node) -> _Node:
    return {key: value for key, value in node.items() if key != field}


async def graph(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    seq: int | None = None,
    inside: str | None = None,
) -> dict[str, Any]:
    """Return a run's graph, or a node's inner nodes, with the nodes' states and publications.

    The graph of a child run that executes an element consists of this element.

    Args:
        seq: show the states after the event ``seq``; ``None``: after the run's last event.
        inside: name of the node whose inner nodes are returned; ``None``: return the whole graph.

    Raises:
        NotFoundError: the run does not exist; ``no_graph``: the run has no graph; ``no_node``:
            there is no such node.
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
    more = () if inside is None else _OF_ELEMENTS
    states = await _node_states(connection, tenant_id, run, definition, seq, more)
    level = await _own_level(connection, of_run, definition, states)
    children: Mapping[str, Any] = {}
    if inside is not None:
        children = {row.name: row for row in await connection.execute(_CHILDREN, of_run)}
        level = _level_inside(inside, level, states, children)
    published = await _publications(connection, run, of_run, seq, [*level.nodes])
    nodes = [
        {
            "type": "agent",
            **node,
            **states.part(name, node)._asdict(),
            "name": name,
            "reason": states.reasons.get(name),
            "taken_over": states.ends.get(name, seq + 1) <= run["carried_seq"],
            "has_parts": name not in children and ("for_each" in node or "definition" in node),
            "published": None if name in states.reasons else published.get(name),
        }
        for name, node in level.nodes.items()
    ]
    taken = states.replay.edges
    edges = [{**edge, "taken": taken.get((edge["source"], edge["target"]))} for edge in level.edges]
    named = {field: run["pinned"]["graph"][field] for field in ("name", "version")}
    return {**named, "seq": seq, "nodes": nodes, "edges": edges}


async def _own_level(
    connection: AsyncConnection,
    of_run: Mapping[str, UUID],
    definition: _Node,
    states: "_NodeStates",
) -> _Level:
    """Return a run's whole graph or, for a child run, only the element that it executes."""
    level = _Level.of(definition)
    if (own := (await connection.execute(_OWN_ELEMENT, of_run)).one_or_none()) is None:
        return level
    *line, name = own.line
    for above in line:
        level = _Level.of(level.nodes[above]["definition"])
    states.add(own.name, _Part(_STATES_OF_TASKS.get(own.status, own.status)))
    return _Level({own.name: _without("for_each", level.nodes[name])})


async def _publications(
    connection: AsyncConnection,
    run: Mapping[str, Any],
    of_run: Mapping[str, UUID],
    seq: int,
    names: Sequence[str],
) -> dict[str, Any]:
    """Return each node's last publication: from this run up to ``seq``, else from the session."""
    rows: dict[str, Any] = {
        item["agent"]: {**item, "task_id": None, "metadata": item["details"].get("metadata") or {}}
        for item in run["session_base"] or ()
    }
    version_rows = await connection.execute(_published(), {**of_run, "until": seq, "names": names})
    return rows | {row["agent"]: row for row in version_rows.mappings()}


def _level_inside(
    inside: str, level: _Level, states: "_NodeStates", children: Mapping[str, Any]
) -> _Level:
    """Return the inner nodes of a node. The node may itself be an inner node.

    Args:
        level: the nodes of the run's graph.
        children: child runs that execute elements, by the element's name.

    Raises:
        NotFoundError: ``no_node``: there is no such node.
    """
    steps = inside.split("/")
    for name in ("/".join(steps[:end]) for end in range(1, len(steps) + 1)):
        if any(each.startswith(f"{name}/") for each in level.nodes):
            continue  # the run is a child run that executes one element of this node
        if name in children:
            detail = f"child run {children[name].id} executes '{name}': read the child run's graph"
            raise NotFoundError(detail, code="no_node")
        if (node := level.nodes.get(name)) is None:
            detail = f"there is no '{name}'; there is {', '.join([*level.nodes][:20]) or 'nothing'}"
            raise NotFoundError(detail, code="no_node")
        if "for_each" in node:
            states.add_elements(name, node, children)
        level = _Level.inside(name, node, states.steps.get(name, ()))
    return level


class _Part(NamedTuple):
    """The state of a node, turn or element; ``run_id``: the child run that executes it."""

    status: str
    task_id: UUID | None = None
    run_id: UUID | None = None


@dataclass(slots=True)
class _NodeStates:
    """The states of a run's nodes, by name.

    Attributes:
        parts: states of elements, and of nodes that have begun or were skipped.
        steps: last segments of the names of a node's begun inner nodes, by the node's name.
        reasons: the reason of each skipped node, by name.
        ends: ``seq`` of the last event of each node that has ended, by name.
    """

    replay: RunReplay
    ends: Mapping[str, int]
    reasons: Mapping[str, str] = field(default_factory=dict)
    parts: dict[str, _Part] = field(default_factory=dict)
    steps: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, name: str, part: _Part) -> None:
        self.parts[name] = part
        while "/" in name:
            name, _, step = name.rpartition("/")
            self.steps.setdefault(name, {})[step] = None

    def add_elements(self, name: str, node: _Node, children: Mapping[str, Any]) -> None:
        above = self.parts.get(name, _PENDING).task_id
        for number in range(node["for_each"]["max"]):
            element = f"{name}/{number}"
            if (run := children.get(element)) is not None:
                status = _STATES_OF_TASKS.get(run.status, run.status)
                self.add(element, _Part(status, UUID(run.task_id), run.id))
            elif above is not None:
                task_id = task_id_at(above, ((0, number),))
                if (task := self.replay.tasks.get(task_id)) is not None:
                    self.add(element, _Part(_status_of(self.replay, task), task_id))

    def part(self, name: str, node: _Node) -> _Part:
        """Return a node's state. A turn's state follows from the states of the turn's nodes."""
        if name in self.parts or name not in self.steps:
            return self.parts.get(name, _PENDING)
        inner = _Level.inside(name, node, self.steps[name]).nodes
        states = {each: self.part(each, of).status for each, of in inner.items()}
        open_ = next((each for each in ("waiting", "running") if each in states.values()), None)
        if open_ is not None or {*states.values()} <= {"pending"}:
            return _PENDING if open_ is None else _Part(open_)
        last = [*states][-1]
        if "loop" in node or last.startswith(f"{name}/try-"):
            return _Part(states[last])
        fatal = [each for each, of in inner.items() if of.get("on_error") != "continue"]
        return _Part("failed" if any(states[each] == "failed" for each in fatal) else "completed")


_PENDING = _Part("pending")


async def _node_states(
    connection: AsyncConnection,
    tenant_id: UUID,
    run: Mapping[str, Any],
    definition: _Node,
    seq: int,
    more: Sequence[EventType],
) -> _NodeStates:
    """Replay a run's log up to an event. Return the states that the run's nodes then have.

    Args:
        more: types of events that are read in addition to the events about nodes.
    """
    decides = run["mode"] == "dag" and not is_plain(definition)
    events = await read_events(
        connection,
        {**run, "tenant_id": tenant_id},
        run_events.c.type.in_([*_OF_NODES, *more] if decides else _OF_TASKS),
        run_events.c.seq <= seq,
        run_events.c.step < seq + STEP_EVENTS,
    )
    replay = await asyncio.to_thread(replay_run, events)  # a log may be long
    if not decides:
        tasks = {
            task.agent: (task_id, task)
            for task_id, task in replay.tasks.items()
            if task_id is not None and task.agent is not None and task.status is not None
        }
        ends = {name: task.tries[-1].seq for name, (_, task) in tasks.items() if task.tries}
        states = _NodeStates(replay, ends)
        for name, (task_id, task) in tasks.items():
            states.add(name, _Part(_status_of(replay, task), task_id))
        return states
    ends = {name: node.seq for name, node in replay.nodes.items() if node.status != "running"}
    reasons = {name: why for name, node in replay.nodes.items() if (why := node.reason)}
    states = _NodeStates(replay, ends, reasons)
    # A running node waits if an inner node waits. Begin with the last nodes, because inner nodes
    # come after their outer node in the replay.
    waiting_below: set[str] = set()
    for name, node in reversed(replay.nodes.items()):
        status = node.status
        if status == "running":
            status = _unended(replay, replay.task(node.task_id).status)
            status = "waiting" if name in waiting_below else status
        if status == "waiting":
            parts = name.split("/")
            waiting_below.update("/".join(parts[:end]) for end in range(1, len(parts)))
        states.add(name, _Part(status, node.task_id))
    return states


def _unended(replay: RunReplay, status: str | None) -> str:
    """Return the status of an unfinished node, derived from the status of the node's task."""
    if replay.is_over:
        return "failed"
    return "waiting" if status == "waiting" else "running"


def _status_of(replay: RunReplay, task: TaskReplay) -> str:
    """Return a task's status or, for a tool node's element, the status of the last tool call."""
    ended = next((call.ended for call in reversed(task.tools.values())), None)
    if task.status is None and ended is not None:
        return "completed" if ended["status"] == "success" else "failed"
    status = _STATES_OF_TASKS.get(task.status or "", task.status)
    return status if status not in (None, "running", "waiting") else _unended(replay, status)


@cache
def _published() -> Select[Any]:
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
            name == any_(bindparam("names", type_=ARRAY(Text))),
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
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, name: str, inside: str | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a run's graph as a definition, and the version of each node's last publication.

    A skipped node has a ``reason``.

    Args:
        inside: as for :func:`graph`.

    Raises:
        NotFoundError: the run does not exist, the run's graph has another name, or ``no_node``.
    """
    drawing = await graph(connection, tenant_id, run_id, inside=inside)
    if drawing["name"] != name:
        raise NotFoundError(f"run {run_id} has the graph '{drawing['name']}', not '{name}'")
    fields = ("name", "agent", "ttl_s", "reason", "graph", "for_each", "loop")
    nodes = [{field: node.get(field) for field in fields} for node in drawing["nodes"]]
    versions = {
        node["name"]: node["published"]["version"] for node in drawing["nodes"] if node["published"]
    }
    edges = [{**edge, "taken": None} for edge in drawing["edges"]]
    return {"nodes": nodes, "edges": edges, "ttl_s": None}, versions
