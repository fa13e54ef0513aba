"""Repetition of a run as a new run, from the start or with copied steps of the old run.

A retry from the last step copies all steps that succeeded. A fork copies the steps before a node or
an event (see :mod:`bottega.runs.forks`).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Self
from uuid import UUID

import asyncpg
from sqlalchemy import and_, select

from bottega.agents.messages import DEMAND_TITLES, AgentUsage, ToolCall
from bottega.agents.output import OUTPUT_INVALID
from bottega.agents.query import ending_of, task_id_at
from bottega.db.pool import AsyncConnection
from bottega.db.tables import runs
from bottega.definitions.graphs import to_graph
from bottega.engine.journal import CANCELLED, EPISODE_NOT_STORED, row_change
from bottega.engine.replay import ENDS, NODE_STATES, TOOL_ENDS, answer_of, replay_run, tool_call_of
from bottega.errors import ConflictError, ForbiddenError
from bottega.events import log
from bottega.events.data import LlmCompletedData, is_repeated
from bottega.events.types import UNFINISHED, Event, EventError, EventType, RunStatus
from bottega.files.inputs import files_of
from bottega.files.store import touch
from bottega.graph.decisions import GraphRules, name_of_node
from bottega.runs import graphs, read
from bottega.runs.pins import strictest
from bottega.runs.submit import Carried, accept
from bottega.subagents.child import places_of
from bottega.tenants.limits import NO_LIMITS, StoredLimits

Parents = Mapping[UUID | None, UUID | None]
"""The parent of each task; ``None`` is the root."""

_ENDS = (EventType.AGENT_COMPLETED, EventType.AGENT_FAILED, EventType.MEMORY_PUBLISHED)
_GOOD_ENDS = (EventType.AGENT_COMPLETED, EventType.SUBAGENT_COMPLETED)
_TRIES = (EventType.LLM_STARTED, EventType.LLM_FAILED, EventType.LLM_CANCELLED)
_ASKS = (EventType.INTERRUPT_CREATED, EventType.INTERRUPT_RESOLVED)
_TEXTS = (EventType.MEMORY_PUBLISHED, EventType.MEMORY_INJECTED, EventType.CONTEXT_RECALLED)
_LOOKS = ("poll_subagent", "await_subagent", "cancel_subagent")
_KEPT = (
    "mode",
    "agent",
    "graph",
    "user",
    "input",
    "pinned",
    "priority",
    "timeout_s",
    "queue_timeout_s",
    "token_budget",
    "cost_budget",
    "webhook_url",
    "overrides",
    "output_schema",
    "given",
    *DEMAND_TITLES,
    "metadata",
    "memory",
    "memory_used",
)


async def retry(
    connection: AsyncConnection,
    pool: asyncpg.Pool,
    tenant_id: UUID,
    run_id: UUID,
    *,
    from_last_step: bool,
    memory: str = "full",
    principal: str | None = None,
    limits: StoredLimits = NO_LIMITS,
) -> dict[str, Any]:
    """Submit a run that repeats a finished run, with the same pinned versions.

    Args:
        from_last_step: copy the finished steps of the old run into the new run's log. The new run
            then repeats no model call and no tool call of these steps.
        memory: the server's memory mode. The new run has this mode or, if stricter, the old run's.
        principal: the API key or user that starts the new run.
        limits: limits of the principal's API key.

    Raises:
        NotFoundError: the tenant has no such run.
        ForbiddenError: ``beyond_limits``.
        ConflictError: ``not_final``; ``child_run``: the run does a task of another run.
    """
    old = await repeatable(connection, tenant_id, run_id)
    new = await repeated_values(connection, tenant_id, old, memory=memory, limits=limits)
    new |= {"session_id": old["session_id"], "retry_of": run_id, "principal": principal}
    if (conversation_id := old["conversation_id"]) is not None:
        new |= {"conversation": "continue", "conversation_id": conversation_id}
        new |= {"turn": base_of(old)}
    if not from_last_step:
        return await accept(connection, tenant_id, new)
    events = await log.read_all(pool, tenant_id, run_id, on=connection.driver)
    nodes = await NodeTasks.of(connection, tenant_id, old)
    carried = carry_over(events, task_root_of(old), nodes)
    return await accept(connection, tenant_id, new | same_tasks(old), carried)


async def repeatable(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    *,
    unfinished: Collection[str] = UNFINISHED,
) -> dict[str, Any]:
    """Lock and return a run that may be repeated.

    Args:
        unfinished: statuses in which a run may not be repeated.

    Raises:
        NotFoundError: the tenant has no such run.
        ConflictError: ``not_final``; ``child_run``: the run does a task of another run.
    """
    # A concurrent deletion of the session or user waits for this lock, and then deletes the new
    # run, too.
    same = and_(runs.c.tenant_id == tenant_id, runs.c.id == run_id)
    held = select(runs.c.id).where(same).with_for_update(read=True, key_share=True)
    await connection.execute(held)
    old = await read.get(connection, tenant_id, run_id)
    if old["status"] in unfinished:
        raise ConflictError(
            f"run {run_id} is not over (it is {old['status']}): wait for its end, or cancel it",
            code="not_final",
        )
    if old["parent_run_id"] is not None:
        raise ConflictError(
            f"run {run_id} does a task of run {old['parent_run_id']}: repeat that run",
            code="child_run",
        )
    return old


async def repeated_values(
    connection: AsyncConnection,
    tenant_id: UUID,
    old: Mapping[str, Any],
    *,
    memory: str,
    limits: StoredLimits,
) -> dict[str, Any]:
    """Return the values that a new run takes from the old run.

    Args:
        memory, limits: see :func:`retry`.

    Raises:
        ForbiddenError: ``beyond_limits``.
    """
    await touch(connection, tenant_id, files_of(old["input"]))
    pinned = _pinned(old["pinned"], limits)
    common = {name: old[name] for name in _KEPT}
    return common | {"pinned": pinned, "memory": strictest(memory, old["memory"])}


def base_of(old: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``turn`` of a new run that continues the same earlier runs as the old run."""
    return old["turn"] and {"base": old["turn"]["base"]}


def task_root_of(old: Mapping[str, Any]) -> UUID:
    """Return the id from which a run derives the ids of its tasks."""
    root: UUID = old["task_root"] or old["id"]
    return root


def same_tasks(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that give a new run the session memory and task ids of the old run."""
    return {"session_base": old["session_base"], "task_root": task_root_of(old)}


class NodeTasks(NamedTuple):
    """The nodes of a run's graph, with the ids of the nodes' tasks.

    Attributes:
        definition: definition of the graph, including the definitions of the sub-graphs.
        ids: ids of the nodes' tasks, by the node's name.
    """

    definition: Mapping[str, Any]
    rules: GraphRules
    ids: Mapping[str, UUID]

    @classmethod
    async def of(
        cls, connection: AsyncConnection, tenant_id: UUID, run: Mapping[str, Any]
    ) -> Self | None:
        """Return the nodes of a run's graph; ``None`` if the run's mode is not ``dag``."""
        if run["mode"] != "dag":
            return None
        definition = await graphs.definition_of(connection, tenant_id, run)
        order = to_graph(definition).get_topological_order()
        root = task_root_of(run)
        ids = {name: task_id_at(root, ((0, number),)) for number, name in enumerate(order)}
        return cls(definition, GraphRules.of(definition), ids)

    def node(self, name: str) -> dict[str, Any]:
        nodes = {name_of_node(node): node for node in self.definition["nodes"]}
        return {**nodes[name], "name": name}

    def human_nodes(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return {name of a node: this node or nodes of its sub-graph, if they ask people}."""
        asking = {name_of_node(node): list(_asking(node)) for node in self.definition["nodes"]}
        return {name: found for name, found in asking.items() if found}

    def below(self, names: Iterable[str]) -> set[str]:
        """Return all nodes that come after the named nodes in the graph."""
        return {edge.target for name in names for edge in self.rules.below(name)}


def _asking(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a node and the nodes of its sub-graphs, but only nodes that ask people."""
    if node.get("type") == "human":
        yield node
    for inner in node.get("definition", {}).get("nodes", ()):
        yield from _asking(inner)


def _pinned(pinned: Mapping[str, Any], limits: StoredLimits) -> dict[str, object]:
    """Return the versions that the new run pins. Refuse versions beyond the key's limits."""
    limits.need_names(pinned["agents"], ())
    if limits.models is not None:
        raise ForbiddenError(
            "this key may use only certain models, but a repeated run keeps the models of the "
            "old run: start a new run",
            code="beyond_limits",
        )
    return limits.pinned(pinned)


def carry_over(
    events: Sequence[Event],
    task_root: UUID,
    nodes: NodeTasks | None = None,
    again: Collection[str] = (),
) -> Carried:
    """Return the steps of an old run that a new run copies instead of executing them again.

    Pure. The steps are the old run's events, numbered from 2, because event 1 is the new run's
    ``run.queued``. These events are left out:

    - failures that no later step used, and the events that followed from these failures;
    - work that began and did not finish;
    - people's decisions on tool calls without a result, so that the new run asks people again;
    - users' messages that no agent received.

    Args:
        task_root: the id from which the ids of the run's tasks are derived.
        nodes: nodes of the run's graph, if it is a DAG.
        again: names of nodes that are executed again from their start.
    """
    whole = events
    settled: set[UUID | None] = set()
    if nodes is not None:
        events = _without(events, nodes, again, again)
        settled = _settled(events, nodes)
    parents = {event.task_id: event.parent_task_id for event in events}
    undone = _undone(events, parents, task_root, settled)
    good = [event for index, event in enumerate(events) if index not in undone]
    if nodes is not None:
        good = _without_failed_nodes(good, nodes)
    answered = {
        (event.task_id, event.data["call"])
        for event in good
        if event.type == EventType.LLM_COMPLETED or _is_final_failure(event)
    }
    ended = {_call_of(event) for event in good if event.type in TOOL_ENDS}
    delivered = {
        event.data["message_id"] for event in good if event.type == EventType.MESSAGE_DELIVERED
    }
    kept_events = [
        event
        for event in good
        if not _is_of_run(event)
        and not (
            event.type in _ASKS
            and _call_of(event) not in ended
            and event.task_id not in settled  # not a tool call: a node asked people
        )
        and not (
            event.type == EventType.MESSAGE_RECEIVED and event.data["message_id"] not in delivered
        )
        and not (event.type in _TRIES and (event.task_id, event.data["call"]) not in answered)
    ]
    numbers = {event.seq: new for new, event in enumerate(kept_events, start=2)}
    is_dangling = any(_names_dropped(event, numbers) for event in kept_events)
    texts = replay_run(whole).texts if is_dangling else {}
    rows = [_row(event, numbers, parents, texts) for event in kept_events]
    usage = sum((task.usage for task in replay_run(kept_events).tasks.values()), AgentUsage())
    return Carried(rows, _tasks(kept_events, rows), usage)


def until(events: Sequence[Event], seq: int) -> list[Event]:
    """Return the events up to a ``seq``, without the blocks that end after this ``seq``.

    Pure. A block consists of a model's message and the results of all tool calls in the message.
    """
    events = events[:seq]
    parents = {event.task_id: event.parent_task_id for event in events}
    began: dict[UUID | None, int] = {}
    blocks: dict[UUID | None, tuple[int, set[tuple[Any, ...]]]] = {}
    for index, event in enumerate(events):
        began.setdefault(event.task_id, index)
        if event.type == EventType.LLM_COMPLETED:
            completed: LlmCompletedData = event.data
            tool_calls = completed["message"].get("tool_calls", ())
            calls = {(event.task_id, completed["call"], call["id"]) for call in tool_calls}
            blocks[event.task_id] = index, calls
        elif event.type in TOOL_ENDS and event.task_id in blocks:
            blocks[event.task_id][1].discard(_call_of(event))
    broken = {task: index for task, (index, calls) in blocks.items() if calls}
    never = len(events)
    return [
        event
        for index, event in enumerate(events)
        if index < broken.get(event.task_id, never)
        and all(
            began[event.task_id] < broken.get(above, never)
            for above in _above(event.task_id, parents)
        )
    ]


def _without(
    events: Sequence[Event], nodes: NodeTasks, again: Collection[str], undecided: Collection[str]
) -> list[Event]:
    """Return a run's events without the events of the nodes ``again``.

    Args:
        again: nodes whose events are dropped.
        undecided: nodes whose decisions on their outgoing edges are dropped.
    """
    parents = {event.task_id: event.parent_task_id for event in events}
    dropped = {nodes.ids[name] for name in again}
    return [
        event
        for event in events
        if dropped.isdisjoint((event.task_id, *_above(event.task_id, parents)))
        and not (event.type in NODE_STATES and _node_of(event.data["node"]) in again)
        and not (
            event.type == EventType.EDGE_DECIDED
            and (event.data["source"] in undecided or _node_of(event.data["source"]) in again)
        )
    ]


def _node_of(name: str) -> str:
    return name.partition("/")[0]


def _settled(events: Iterable[Event], nodes: NodeTasks) -> set[UUID | None]:
    """Return the tasks of nodes that completed, and of nodes whose failure did not end the run."""
    rules = nodes.rules.nodes
    return {
        event.task_id
        for event in events
        if event.type == EventType.NODE_COMPLETED
        or (
            event.type == EventType.NODE_FAILED
            and (rule := rules.get(event.data["node"])) is not None
            and rule.goes_on
        )
    }


def _without_failed_nodes(events: Sequence[Event], nodes: NodeTasks) -> list[Event]:
    """Drop the events of failed nodes, and of nodes that come after failed or unfinished nodes.

    The events of a failed node stay if the run continued after the failure. If an inner node of an
    unfinished node failed, the unfinished node is executed again from the start.
    """
    names_found: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.type in NODE_STATES:
            names_found[event.type].add(event.data["node"])
    rules = nodes.rules.nodes
    ended = names_found[EventType.NODE_COMPLETED] | names_found[EventType.NODE_FAILED]
    open_nodes = names_found[EventType.NODE_STARTED].intersection(rules) - ended
    handled = {
        name for name in names_found[EventType.NODE_FAILED] if name in rules and rules[name].goes_on
    }
    failed = {_node_of(name) for name in names_found[EventType.NODE_FAILED]}
    failed -= names_found[EventType.NODE_COMPLETED] | handled
    again = failed | nodes.below(failed | open_nodes)
    return _without(events, nodes, again, again | open_nodes)


def _is_of_run(event: Event) -> bool:
    unstored = event.type == EventType.WARNING and event.data["code"] == EPISODE_NOT_STORED
    return event.type.startswith("run.") or event.type == EventType.EPISODE_STORED or unstored


def _is_final_failure(event: Event) -> bool:
    return event.type == EventType.LLM_FAILED and not is_repeated(event.data)


def _undone(
    events: Sequence[Event],
    parents: Parents,
    task_root: UUID,
    settled: AbstractSet[UUID | None] = frozenset(),
) -> set[int]:
    """Return the indexes of the events that the new run must not copy because of failures.

    A later step used a failure if a model received the failure and answered. A task that is
    executed again, or that has not ended, keeps its dispatch and its finished steps. If an agent
    read the statuses of its tasks and then made no step, the agent reads the statuses again.

    Args:
        settled: tasks whose failures are copied.
    """
    log = _Log(events, parents, settled)
    failed: dict[UUID | None, int] = {}  # by task: index of the first event that is dropped
    again: set[UUID | None] = set()  # tasks to execute again: drop their end events
    for index, event in enumerate(events):
        failure = _is_failure(event) or log.is_no_answer(event, index)
        if failure and not log.built_upon(event.task_id, index):
            failed.setdefault(event.task_id, index)
            again |= {event.task_id, *_above(event.task_id, parents)}
    requests = _asked(events, task_root)
    calls = {requests[task] for task in again - log.async_tasks if task in requests}
    done = log.ended.keys() - again
    never = len(events)
    return {
        index
        for index, event in enumerate(events)
        if index >= failed.get(event.task_id, never)
        or (event.type in _ENDS and event.task_id in again)
        or (_is_of_attempt(event) and event.task_id not in done)
        or (_follows_call(event) and _call_of(event) in calls)
        or (_is_look(event) and log.is_last(event.task_id, index) and event.task_id not in done)
        or (event.type == EventType.AGENT_FAILED and _code(event) == "predecessor_failed")
    }


class _Log:
    """A log indexed by task.

    Attributes:
        beside: asynchronous tasks.
        ended: index of the end event of each task that has ended.
    """

    def __init__(
        self, events: Sequence[Event], parents: Parents, settled: AbstractSet[UUID | None]
    ) -> None:
        self._settled = settled
        self._events = events
        self._parents = parents
        self._answered: dict[UUID | None, int] = {}
        self._reported: dict[UUID, list[tuple[UUID | None, int]]] = {}
        self.async_tasks: set[UUID | None] = set()
        self.ended: dict[UUID | None, int] = {}
        for index, event in enumerate(events):
            if event.type == EventType.LLM_COMPLETED:
                self._answered[event.task_id] = index
            elif event.type == EventType.SUBAGENT_DISPATCHED:
                self.async_tasks.add(event.task_id)
            elif event.type in ENDS or event.type in _ENDS[:2]:
                self.ended[event.task_id] = index
            elif event.type in TOOL_ENDS and _is_look(event):
                for task in _ends_reported(event):
                    self._reported.setdefault(task, []).append((event.task_id, index))

    def is_last(self, task: UUID | None, index: int) -> bool:
        """Check if the task's model gave no answer after the event at an index."""
        return self._answered.get(task, -1) < index

    def is_no_answer(self, event: Event, index: int) -> bool:
        """Check if an event is a failed task's last answer, which was cut, refused or invalid."""
        task = event.task_id
        if event.type != EventType.LLM_COMPLETED or self._answered[task] != index:
            return False
        end = self.ended.get(task)
        if end is None or self._events[end].type in _GOOD_ENDS:
            return False
        is_invalid = _code(self._events[end]) == OUTPUT_INVALID
        return is_invalid or ending_of(answer_of(event.data)) is not None

    def built_upon(self, task: UUID | None, index: int) -> bool:
        """Check if a parent task of a failed task used the failure or succeeded after the failure.

        A synchronous task's caller receives the task's end at once. An asynchronous task's caller
        receives the task's end when the caller reads the task's status.
        """
        if not self._settled.isdisjoint((task, *_above(task, self._parents))):
            return True
        while task is not None:
            index = max(index, self.ended.get(task, index))
            parent = self._parents[task]
            places = self._reported.get(task, []) if task in self.async_tasks else [(parent, index)]
            if any(not self.is_last(agent, since) for agent, since in places):
                return True
            if parent not in self.ended:
                return False
            if self._events[self.ended[parent]].type in _GOOD_ENDS:
                return True
            task = parent
        return False


def _ends_reported(look: Event) -> Iterator[UUID]:
    """Yield the ids of the ended tasks in the result of a tool that reads tasks' statuses."""
    result = look.data["result"]
    for task in result.get("tasks", ()) if isinstance(result, Mapping) else ():
        if task["status"] in ENDS.values():
            yield UUID(task["task_id"])


def _is_failure(event: Event) -> bool:
    is_async = event.type in ENDS and event.type != EventType.SUBAGENT_COMPLETED
    return is_async or _is_final_failure(event) or _was_cancelled(event)


def _is_of_attempt(event: Event) -> bool:
    """Check if an event no longer applies when its asynchronous task is executed again."""
    return event.type.startswith("subagent.") and event.type not in (
        EventType.SUBAGENT_DISPATCHED,
        EventType.SUBAGENT_MESSAGE_SENT,
        EventType.SUBAGENT_BACKPRESSURE,  # belongs to the dispatching task
    )


def _is_look(event: Event) -> bool:
    """Check if an event is about a call of a tool that reads tasks' statuses (``_LOOKS``)."""
    is_call = event.type == EventType.TOOL_STARTED or event.type in TOOL_ENDS
    return is_call and event.data["name"] in _LOOKS


def _follows_call(event: Event) -> bool:
    """Check if an event is a tool call's end, or memory that was recalled after the call failed."""
    if event.type == EventType.CONTEXT_RECALLED:
        return event.data.get("tool_call_id") is not None
    return event.type in TOOL_ENDS


def _asked(events: Sequence[Event], task_root: UUID) -> dict[UUID | None, tuple[Any, ...]]:
    """Return, by task: (parent task, model call, tool call id) of the call that began the task."""
    requests: dict[UUID | None, tuple[Any, ...]] = {}
    for event in events:
        if event.type == EventType.LLM_COMPLETED:
            completed: LlmCompletedData = event.data
            number = completed["call"]
            for index, call in enumerate(completed["message"].get("tool_calls", ())):
                for place in places_of(number, index, ToolCall.model_validate(call)):
                    task_id = task_id_at(event.task_id or task_root, (place,))
                    requests[task_id] = (event.task_id, number, call["id"])
    return requests


def _call_of(event: Event) -> tuple[Any, ...]:
    return (event.task_id, *tool_call_of(event.data))


def _code(event: Event) -> str | None:
    return EventError.of(event.data).code


def _above(task: UUID | None, parents: Parents) -> Iterator[UUID | None]:
    """Yield the ids of a task's parent task, the parent's parent …, and ``None`` for the root."""
    while task is not None:
        task = parents[task]
        yield task


def _was_cancelled(event: Event) -> bool:
    return event.type == EventType.AGENT_FAILED and _code(event) == CANCELLED["code"]


def _names_dropped(event: Event, numbers: Mapping[int, int]) -> bool:
    """Check if an event refers to the text of an event that is dropped.

    In the log, a node's text may be a reference to an equal answer of a different node.
    """
    seq = event.data.get("answer_seq")
    return event.type in _TEXTS and seq is not None and seq not in numbers


def _row(
    event: Event, numbers: Mapping[int, int], parents: Parents, texts: Mapping[int, str | None]
) -> dict[str, Any]:
    """Return an event as a row of the new run's log.

    Args:
        numbers: new ``seq`` of the kept events, by their old ``seq``.
        texts: texts of answers, by old ``seq``. The texts replace references to dropped events.
    """
    data = dict(event.data)
    if _names_dropped(event, numbers):
        data["content"] = texts[data.pop("answer_seq")]
    elif data.get("answer_seq") is not None:
        data["answer_seq"] = numbers[data["answer_seq"]]
    above = len(list(_above(event.task_id, parents)))
    return {
        "type": event.type,
        "task_id": event.task_id,
        "parent_task_id": event.parent_task_id,
        "agent": event.agent,
        "depth": above - 1 if above else None,
        "data": data,
    }


def _tasks(events: Sequence[Event], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the events' tasks. ``rows``: the events' rows in the new run's log."""
    tasks: dict[UUID, dict[str, Any]] = {}
    for seq, (event, row) in enumerate(zip(events, rows, strict=True), start=2):
        if event.task_id is None:
            continue
        task = tasks.setdefault(
            event.task_id,
            {
                "id": event.task_id,
                "parent_id": event.parent_task_id,
                "agent": event.agent or "",
                "depth": row["depth"],
                "status": RunStatus.RUNNING,
            },
        )
        change = row_change(event.type, row["data"], seq)
        if event.type == EventType.AGENT_STARTED:
            del change["status"]  # a restart does not change the task's status
        task |= change
    return list(tasks.values())
