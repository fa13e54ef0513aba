"""Forks: a new run copies the first steps of an earlier run and executes the later steps again.

A fork begins at a node or after an event. If a fork begins at a node, the new run executes the node
again, or publishes a text from the request as the node's output. Then the new run executes all
nodes that follow. If a fork begins after an event, the new run executes all steps after the event
again. The copied steps call no model or tool again: the new run replays their events.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import select, tuple_

from bottega.db.pool import AsyncConnection
from bottega.db.tables import agent_versions
from bottega.definitions.agents import listed, named_by
from bottega.definitions.graphs import publication_schema
from bottega.errors import ConflictError, ForbiddenError, InvalidInputError
from bottega.events import log
from bottega.events.types import UNFINISHED, Event, EventType, RunStatus
from bottega.json_schema.output import output_schema
from bottega.runs.control import SentMessage, send
from bottega.runs.retry import (
    NodeTasks,
    base_of,
    carry_over,
    repeatable,
    repeated_values,
    same_tasks,
    task_root_of,
    until,
)
from bottega.runs.submit import accept
from bottega.tenants.limits import NO_LIMITS, StoredLimits


@dataclass(frozen=True, slots=True)
class Fork:
    """The steps of a run that a new run executes again, and the client's changes to these steps.

    Attributes:
        node: name of the node at which the fork begins; ``None``: the fork begins after an event.
        at_seq: ``seq`` of the last event to copy. A model's message is not copied if a result of
            its tool calls comes later.
        publication: text that the node publishes; ``None``: the new run executes the node.
        agent: new values of fields in the definition of the node's agent or, without a node, of the
            run's agent.
        input: a message to the run's agent; in a graph, the question to the repeated nodes.
        session_id: session of the new run; ``None``: none. The run continues no conversation.
    """

    node: str | None = None
    at_seq: int | None = None
    publication: str | None = None
    agent: Mapping[str, Any] | None = None
    input: str | None = None
    session_id: str | None = None


def _refuse_giving(nodes: NodeTasks, name: str, may_give: Callable[[Any], None]) -> None:
    """Check that the caller may answer for a node, or for the people whom its sub-graph asks."""
    for node in (nodes.node(name), *nodes.human_nodes().get(name, ())):
        may_give(node)


async def fork(
    connection: AsyncConnection,
    pool: asyncpg.Pool,
    tenant_id: UUID,
    run_id: UUID,
    request: Fork,
    *,
    memory: str,
    principal: str,
    limits: StoredLimits = NO_LIMITS,
    may_give: Callable[[Mapping[str, Any], str | None], None],
) -> dict[str, Any]:
    """Submit a run that repeats an old run from a node or event on, with the same pinned versions.

    Args:
        memory: the server's memory mode. The new run has this mode or, if stricter, the old run's.
        principal: the API key or user that starts the new run.
        may_give: function (node, old user) that raises if the caller may not answer for the node.

    Raises:
        NotFoundError: the tenant has no such run.
        ForbiddenError: ``beyond_limits``, or the error that ``may_give`` raises.
        InvalidInputError: ``unknown_node``, ``node_skipped`` or ``unknown_event``; the publication
            does not fit the node's schema; or ``wanted.agent`` is set, but the node has no agent.
        ConflictError: ``not_final``, ``child_run``, ``no_graph``, ``session_user``.
    """
    waits = () if request.node is not None else (RunStatus.WAITING,)
    old = await repeatable(connection, tenant_id, run_id, unfinished=UNFINISHED.difference(waits))
    if old["mode"] == "batch":
        raise ConflictError(f"{run_id} is a batch: retry it", code="no_graph")
    nodes = await NodeTasks.of(connection, tenant_id, old)
    events: Sequence[Event] = await log.read_all(pool, tenant_id, run_id, on=connection.driver)
    if request.node is None:
        events = _until_event(events, old, request.at_seq or 0)
    else:
        _refuse_node(events, old, nodes, request.node)
    again: set[str] = set()
    if nodes is not None:
        again = _done_again(nodes, request, partial(_may_answer, may_give, old["user"]))
    carried = carry_over(events, task_root_of(old), nodes, again)
    if request.publication is not None and nodes is not None and request.node is not None:
        _refuse_giving(nodes, request.node, lambda node: may_give(node, old["user"]))
        node = nodes.node(request.node)
        await _check_publication(connection, old, nodes, node, request.publication)
    new = await repeated_values(connection, tenant_id, old, memory=memory, limits=limits)
    new |= same_tasks(old) | {"turn": base_of(old), "principal": principal, "conversation": "none"}
    new |= {"session_id": request.session_id, "given": _given(old["given"], request, again)}
    place = {"seq": request.at_seq} if request.node is None else {"node": request.node}
    new["fork_of"] = {"run_id": run_id, **place, "usage": carried.usage.to_dict()}
    if request.agent:
        new["overrides"] = _with_changes(old, nodes, request, limits)
    if request.input is not None and nodes is not None:
        new["input"] = request.input
    run = await accept(connection, tenant_id, new, carried)
    if request.input is not None and nodes is None:
        message = SentMessage(request.input, (), principal)
        await send(connection, tenant_id, UUID(run["id"]), message, "/input")
    return run


def _refuse_node(
    events: Sequence[Event], old: Mapping[str, Any], nodes: NodeTasks | None, name: str
) -> None:
    """Check that a run's graph has the named node, and that the run did not skip the node."""
    if nodes is None:
        raise ConflictError(
            f"run {old['id']} does not execute a graph (its mode is '{old['mode']}'): "
            "give 'at_seq' instead of 'node'",
            code="no_graph",
        )
    if name not in nodes.ids:
        raise InvalidInputError(
            f"the graph of run {old['id']} has no node '{name}': its nodes are "
            f"{', '.join(nodes.ids)}",
            code="unknown_node",
            pointer="/node",
        )
    for event in events:
        if event.type == EventType.NODE_SKIPPED and event.data["node"] == name:
            raise InvalidInputError(
                f"run {old['id']} skipped the node '{name}' ({event.data['reason']}), and the new "
                "run would skip the node too: fork at the node whose answer decided this",
                code="node_skipped",
                pointer="/node",
            )


def _until_event(events: Sequence[Event], old: Mapping[str, Any], seq: int) -> list[Event]:
    if seq > len(events):
        raise InvalidInputError(
            f"the last event of run {old['id']} has the seq {len(events)}: give an 'at_seq' from "
            f"1 to {len(events)}",
            code="unknown_event",
            pointer="/at_seq",
        )
    return until(events, seq)


def _done_again(
    nodes: NodeTasks, request: Fork, may_answer: Callable[[Mapping[str, Any]], bool]
) -> set[str]:
    """Return the nodes that a fork executes again: the fork's node, and all later nodes.

    A node that asks people, and all nodes after this node, are also executed again in two cases:
    the fork changes the question that the people saw; or a node that depends on the people's answer
    is executed again, and the caller may not answer for these people.

    Args:
        may_answer: returns true if the caller may answer for a node that asks people.
    """
    started = set() if request.node is None else {request.node}
    again = started | nodes.below(started)
    task_ids = set()
    for name, people in nodes.human_nodes().items():
        decides = request.node is None or not again.isdisjoint(nodes.below([name]))
        if request.input is not None or (decides and not all(map(may_answer, people))):
            task_ids.add(name)
    return again | task_ids | nodes.below(task_ids)


def _may_answer(
    may_give: Callable[[Mapping[str, Any], str | None], None],
    user: str | None,
    node: Mapping[str, Any],
) -> bool:
    try:
        may_give(node, user)
    except ForbiddenError:
        return False
    return True


async def _check_publication(
    connection: AsyncConnection,
    old: Mapping[str, Any],
    nodes: NodeTasks,
    node: Mapping[str, Any],
    text: str,
) -> None:
    schema = await _schema_of(connection, old, nodes, node)
    if schema is None:
        return
    _, problems = await asyncio.to_thread(lambda: output_schema(schema).read(text))
    if problems:
        raise InvalidInputError(
            f"the text does not fit the node's schema: {problems[0].pointer or 'the whole text'}: "
            f"{problems[0].message}",
            pointer="/publication",
        )


async def _schema_of(
    connection: AsyncConnection,
    old: Mapping[str, Any],
    nodes: NodeTasks,
    node: Mapping[str, Any],
) -> Mapping[str, Any] | None:
    """Return the JSON Schema of a node's publication; ``None``: any text."""
    columns = agent_versions.c
    query = select(columns.name, columns.definition["output_schema"].label("schema")).where(
        columns.tenant_id == old["tenant_id"],
        tuple_(columns.name, columns.version).in_(old["pinned"]["agents"].items()),
    )
    schemas = {row.name: row.schema for row in await connection.execute(query)}
    if old["output_schema"] is not None and node["name"] in nodes.rules.answering:
        schemas |= {node.get("agent"): old["output_schema"]}
    return publication_schema(node, nodes.definition, schemas)


def _given(before: Mapping[str, str], request: Fork, again: Collection[str]) -> dict[str, str]:
    """Return, by node, the text that the new run publishes instead of executing the node."""
    kept = {name: text for name, text in before.items() if name not in again}
    if request.node is not None and request.publication is not None:
        kept[request.node] = request.publication
    return kept


def _with_changes(
    old: Mapping[str, Any], nodes: NodeTasks | None, request: Fork, limits: StoredLimits
) -> dict[str, Any]:
    """Return the old run's overrides, with the fork's new values for an agent."""
    name = old["agent"]
    if nodes is not None:
        name = None if request.node is None else nodes.node(request.node).get("agent")
    if name is None:
        raise InvalidInputError(
            "there is no agent to change: choose a 'node' that has one", pointer="/agent"
        )
    changes = dict(request.agent or {})
    if limits.models is not None and "model" in changes:
        why = "this key may use only certain models: omit 'agent', or use another key"
        raise ForbiddenError(why, code="beyond_limits")
    pinned = old["pinned"]
    providers = [*pinned["providers"], *pinned["operators"]]
    try:
        for reference in listed(changes["model"]) if "model" in changes else ():
            named_by(reference, providers)
    except InvalidInputError as error:
        names_known = ", ".join(providers)
        raise InvalidInputError(
            f"{error.detail}. A fork can only use the providers of run {old['id']}: {names_known}",
            code=error.code,
            pointer="/agent/model",
        ) from None
    before = old["overrides"].get(name) or {}
    params = {**before.get("params", {}), **changes.pop("params", {})}
    return {**old["overrides"], name: {**before, **changes, "params": params}}
