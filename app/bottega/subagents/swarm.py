"""The asynchronous sub-agents of one run, and the run's queries that dispatch tasks."""

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import UUID, uuid4
from weakref import WeakSet

from bottega.agents.agent import BaseAgent
from bottega.agents.messages import AgentUsage, Usage
from bottega.agents.provider import Permit
from bottega.agents.query import CurrentCall, Path, Query, current_call, task_id_at
from bottega.agents.tools import ToolBase
from bottega.errors import InvalidInputError, ModelError
from bottega.subagents.budget import Account, Reservation, size_of_call
from bottega.subagents.handle import (
    Listener,
    Mode,
    Parent,
    RestoredTask,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
    Waiter,
    all_done,
    ends_of,
    missing,
    wait_for,
)
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import PluginContext, TaskOutcome, after_complete
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.shared_context import SharedContext, Workspace, private_folder_of


@dataclass(frozen=True, slots=True)
class ChildWork:
    """The work of a task, in a form that a worker can execute as a child run.

    Attributes:
        agent: name of the defined agent that executes the task, or whose helper executes it.
        is_helper: true if a helper of ``agent`` executes the task.
        question: the first message that the task's agent reads.
        most_steps: maximum number of model calls of the task's agent.
        files: texts of the shared files that the task's agent can read, by path.
    """

    agent: str
    is_helper: bool
    instructions: str | None
    question: str
    most_steps: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """Outcome of a child run that has ended.

    Attributes:
        files: texts of the files that the child run wrote in the task's folder, by path.
        output_json: the child run's parsed answer, if the agent has a schema for its answers.
    """

    outcome: SubagentOutcome
    usage: AgentUsage = AgentUsage()
    files: Mapping[str, str] = field(default_factory=dict)
    output_json: Any = None


class RemoteRuns(Protocol):
    """Execution of one run's tasks as child runs."""

    async def do(
        self, handle: SubagentHandle, work: ChildWork, pay: Callable[[AgentUsage], None]
    ) -> ChildEnd:
        """Execute a task's work as a child run, and wait until the child run has ended.

        Args:
            pay: function called with the child run's usage, also if the task was cancelled.
        """

    async def tell(self, handle: SubagentHandle, message_id: str, text: str) -> bool:
        """Send a message to a task's child run; return false if the child run has ended.

        A repeated call with the same ``message_id`` does not send the message again.
        """

    async def read_texts(self, handles: Sequence[SubagentHandle]) -> None:
        """Append the new text of each task's child run to the task's partial output."""


Lookup = Callable[[Sequence[UUID], UUID | None], Awaitable[Mapping[UUID, dict[str, Any]]]]
"""Function (ids of removed tasks, id of the calling task or ``None`` for the root) → reports.

A report has the form of a task in the result of ``poll_subagent``. The function returns reports
only about descendants of the calling task.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmOptions:
    """Options of a run's asynchronous sub-agents, and the state that they had before a crash.

    Attributes:
        run_id: the run's id, by default a new id.
        task_root: id from which the tasks' ids are derived, by default the run's id.
        listener: receives all events of the tasks.
        remaining: returns the run's remaining seconds, or ``None`` without a deadline.
        outer: accounts of the whole run, which also limit the tasks. Other code charges them.
        plugins: plugins, called before a dispatch and after a task's end.
        restored: tasks from before a crash, by id.
        waits: seconds that each wait had lasted before a crash, by (task, model call, tool call).
        cancelled: ids of tasks that were cancelled before the crash.
        lookup: finds tasks that the registry has removed; ``None``: removed tasks are not found.
        is_suspended: returns true if this process stops before the run's end, and another process
            will resume the run.
        broke: function called with the first error that must end the run, such as a bug in a hook.
        awaits: function called when a query begins to await tasks.
        remote: executes tasks as child runs; ``None``: all tasks run in this process.
        own_task: id of the task that this run executes as a child run; ``None``: no child run.
    """

    run_id: UUID | None = None
    tenant_id: UUID | None = None
    task_root: UUID | None = None
    listener: Listener = Listener()
    remaining: Callable[[], float | None] = lambda: None
    outer: tuple[Account, ...] = ()
    plugins: Sequence[Any] = ()
    restored: Mapping[UUID, RestoredTask] = field(default_factory=dict)
    waits: Mapping[tuple[Any, ...], float] = field(default_factory=dict)
    cancelled: Container[UUID] = ()
    lookup: Lookup | None = None
    is_suspended: Callable[[], bool] = lambda: False
    broke: Callable[[Exception], object] = lambda error: None
    awaits: Callable[[], object] = lambda: None
    remote: RemoteRuns | None = None
    own_task: UUID | None = None


class Swarm(Listener):
    """The asynchronous sub-agents of one run.

    Attributes:
        broken: the first error that must end the run, such as a bug in a hook.
    """

    def __init__(self, registry: SubagentRegistry, options: SwarmOptions = SwarmOptions()) -> None:
        self.registry = registry
        self.options = options
        self.run_id = options.run_id or uuid4()
        self.task_root = options.task_root or self.run_id
        self.context = SharedContext()
        self.broken: Exception | None = None
        self._parents: dict[Parent, None] = {}
        self._closed: WeakSet[Parent] = WeakSet()  # their tasks may still be in the registry
        self._plugin_calls: set[asyncio.Task[None]] = set()

    @property
    def suspended(self) -> bool:
        """True if this process stops before the run's end, and another process will resume it."""
        return self.broken is None and self.options.is_suspended()

    def handles(self) -> list[SubagentHandle]:
        known = (each for parent in self._parents for each in parent.children.values())
        return [handle for handle in known if not handle.status.is_final]

    def id_at(self, path: Path) -> UUID:
        """Return the id of the query at a path of the run's tree; the root has the run's id."""
        return task_id_at(self.task_root, path) if path else self.run_id

    def restore_file(self, task_id: UUID | None, path: str, content: str) -> None:
        """Restore a file that a task (``None``: the root) wrote before a crash."""
        private = private_folder_of(task_id or self.options.own_task)
        self.context.restore(path, content, private)

    def open(self, parent: Parent) -> None:
        """Register a query that may dispatch tasks."""
        self._parents[parent] = None
        if parent.owner is not None:
            parent.owner.scopes.append(parent)

    def closed(self, parent: Parent) -> None:
        """Unregister a query after the end of all its tasks."""
        if parent not in self._parents:
            return
        del self._parents[parent]
        self._closed.add(parent)
        if parent.owner is not None:
            parent.owner.scopes.remove(parent)

    def break_with(self, error: Exception) -> None:
        """End the run because of an error that no model may handle, such as a bug in a hook."""
        if self.broken is None and not self.suspended:
            self.broken = error
            self.options.broke(error)

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        """Pass an event to the listener; if the event is a task's end, call the plugins."""
        self.options.listener.on_event(handle, event, data)
        if self.options.plugins and handle.status.is_final and event == handle.status:
            self._call_plugins(handle)

    def refused(self, parent: Parent, data: dict[str, Any]) -> None:
        self.options.listener.refused(parent, data)

    def _call_plugins(self, handle: SubagentHandle) -> None:
        context = context_of(handle.parent)
        outcome = TaskOutcome(
            task_id=handle.task_id,
            status=handle.status,
            output=handle.final_output,
            error=handle.error,
            duration_ms=handle.duration_ms(self.registry.scheduler.now()),
        )
        call = asyncio.ensure_future(after_complete(self.options.plugins, context, outcome))
        self._plugin_calls.add(call)
        call.add_done_callback(self._plugin_calls.discard)

    async def close(self) -> None:
        """End or suspend all tasks of the run, remove them, and wait until no task runs.

        A later attempt of the run in this process then does not find the old state of the tasks.
        """
        parents = list(self._parents)
        running = {
            child.running
            for parent in parents
            for child in parent.children.values()
            if child.running is not None
        }
        for parent in parents:
            if not self.suspended:
                self.registry.end_parent(parent, "parent-ended")
        self.registry.discard([*parents, *self._closed])
        await all_done(running)
        if self._plugin_calls:
            await asyncio.wait(list(self._plugin_calls))


def context_of(parent: Parent) -> PluginContext:
    return PluginContext(
        run_id=parent.run_id,
        tenant_id=parent.tenant_id,
        parent_id=parent.parent_id,
        depth=parent.depth,
        agent=parent.agent,
    )


class TaskCall(Reservation):
    """Context of a task's model call, which holds a slot and a reservation of tokens and cost."""

    __slots__ = ("_handle", "_scheduler")

    def __init__(self, scheduler: SubagentScheduler, handle: SubagentHandle, query: Query) -> None:
        super().__init__((handle.account, *handle.parent.accounts), *size_of_call(query))
        self._scheduler = scheduler
        self._handle = handle

    async def __aenter__(self) -> Permit:
        await self._scheduler.begin_call(self._handle)
        try:
            return await super().__aenter__()
        except BaseException:
            self._scheduler.end_call(self._handle)
            raise

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, ModelError):
            limited = error.last_code in ("model_rate_limited", "model_limited")
            self._handle.was_limited = limited
        await super().__aexit__(kind, error, trace)
        self._scheduler.end_call(self._handle)


class TaskOfQuery:
    """The task to which a query and its sub-queries belong (``Query.task``)."""

    def __init__(self, swarm: Swarm, handle: SubagentHandle) -> None:
        self.swarm = swarm
        self.handle = handle

    def model_call(self, query: Query) -> TaskCall:
        return TaskCall(self.swarm.registry.scheduler, self.handle, query)

    def spent(self, usage: Usage) -> None:
        self.handle.token_usage += usage
        self.handle.spend(usage)

    def on_text(self, query: Query, text: str) -> None:
        handle = self.handle
        if handle.status.is_final or handle.suspended or query.path != handle.path:
            return
        if handle.status is SubagentStatus.RUNNING:
            self.swarm.registry.transition(handle, SubagentStatus.STREAMING)
        handle.add_text(text)
        handle.parent.listener.on_event(handle, "output_chunk", {"text": text})

    def messages(self, query: Query, *, answered: bool) -> Sequence[str]:
        handle, call = self.handle, query.model_calls + 1
        if query.path != handle.path:
            return ()
        told = {} if handle.mailbox is None else handle.mailbox.due(call)
        handle.has_answered = answered and not told
        for message_id, text in told.items():
            data = {"message_id": message_id, "call": call, "content": text}
            handle.parent.listener.on_event(handle, "message_read", data)
        return list(told.values())


@dataclass(frozen=True, slots=True)
class AsyncSubagents:
    """Data that one agent's tools for sub-agents share.

    Attributes:
        agents: the agent's sub-agents by name.
        limits: the limits of this agent's tasks.
        anonymous: true if the agent may dispatch helpers, which have no definition.
        configure: function called with each new helper.
        share_metadata: keys of a dispatch's metadata that the task's agent can read.
    """

    registry: SubagentRegistry
    agents: Mapping[str, BaseAgent]
    limits: SubagentLimits
    anonymous: bool
    configure: Callable[[BaseAgent], object]
    share_metadata: Collection[str]

    def scope(self) -> "tuple[CurrentCall, QueryScope]":
        """Return the current tool call and the scope of its query."""
        call = current_call.get()
        if call is None:
            raise InvalidInputError("this tool works only within an agent's query")
        return call, scope_of(call.query, self.registry)

    def without_agents(self) -> "AsyncSubagents":
        """Return a copy for tools that may dispatch only helpers."""
        return replace(self, agents={}, anonymous=True)

    def ancestors(self) -> Callable[[str], frozenset[str]] | None:
        """Return a function that returns a sub-agent's ancestors, or ``None`` without a graph."""
        graphs = (agent.memory_graph for agent in self.agents.values())
        return None if all(graph is None for graph in graphs) else self._ancestors

    def _ancestors(self, name: str) -> frozenset[str]:
        agent = self.agents.get(name)
        graph = None if agent is None else agent.memory_graph
        if agent is None or graph is None or agent.agent_id is None:
            return frozenset()
        ids = graph.ancestors(agent.agent_id)
        return frozenset(
            other
            for other, sibling in self.agents.items()
            if sibling.memory_graph is graph and sibling.agent_id in ids
        )


class DispatchingTool(ToolBase):
    """A tool with which an agent starts and controls tasks."""

    def __init__(self, shared: AsyncSubagents) -> None:
        self.shared = shared


class QueryScope(Parent):
    """A query that may dispatch tasks, with its files (``Query.scope``).

    Attributes:
        task_id: id of the query's task, or ``None`` for the root.
        dispatched: ids of the query's tasks, oldest first; a value is true if the query has read
            the task's outcome.
        waits: the query's unfinished waits for tasks.
    """

    def __init__(self, swarm: Swarm, query: Query) -> None:
        tools = query.agent.registered_tools
        tool = next((each for each in tools if isinstance(each, DispatchingTool)), None)
        limits = _limits_of(query, swarm.registry.limits)
        owner = query.task.handle if isinstance(query.task, TaskOfQuery) else None
        account = Account("the token budget of your tasks", limits.max_total_tokens)
        paying = swarm.options.outer if owner is None else (owner.account, *owner.parent.accounts)
        is_task = owner is not None and owner.path == query.path
        super().__init__(
            parent_id=owner.task_id if owner and is_task else swarm.id_at(query.path),
            agent=query.agent.agent_id or query.agent.agent_name,
            run_id=swarm.run_id,
            tenant_id=swarm.options.tenant_id,
            path=query.path,
            limits=limits,
            account=account,
            accounts=(account, *paying),
            listener=swarm,
            owner=owner,
            remaining=swarm.options.remaining,
            ancestors=None if tool is None else tool.shared.ancestors(),
        )
        self.swarm = swarm
        self.task_id = self.parent_id if query.path else None
        self.dispatched: dict[UUID, bool] = {}
        self.waits: set[Waiter] = set()
        self.workspace = Workspace(
            swarm.context,
            self.parent_id if query.parent is not None else swarm.options.own_task,
            self.dispatched.__contains__,
        )
        swarm.open(self)

    def id_below(self, place: tuple[int, int]) -> UUID:
        """Return the id of the task that this query dispatches at the position ``place``."""
        return task_id_at(self.task_id or self.swarm.task_root, (place,))

    async def wait(
        self,
        handles: Sequence[SubagentHandle],
        mode: Mode,
        quorum: int | None,
        timeout: float,
        gone: int = 0,
    ) -> bool:
        """Wait for tasks; see :func:`wait_for`. The query's task holds no slot during the wait."""
        if missing(ends_of(handles, gone), mode, quorum) <= 0:
            return True
        self.swarm.options.awaits()
        parked: AbstractAsyncContextManager[None] = nullcontext()
        if self.owner is not None:
            parked = self.swarm.registry.scheduler.parking(self.owner)
        async with parked:
            return await wait_for(handles, mode, quorum, timeout, self.waits, gone)

    async def close(self, error: BaseException | None = None) -> None:
        """End the query's tasks; see :class:`bottega.agents.context.QueryScopePort`.

        Raises:
            Exception: the swarm's ``broken``, if ``error`` is ``None``.
        """
        swarm = self.swarm
        if swarm.suspended:
            return  # Swarm.close waits for all tasks
        cancelled = isinstance(error, asyncio.CancelledError)
        children = list(self.children.values())
        swarm.registry.end_parent(self, "parent-cancelled" if cancelled else "parent-ended")
        await all_done({child.running for child in children if child.running})
        swarm.closed(self)
        swarm.context.forget(self.workspace.private)
        if swarm.broken is not None and error is None:
            raise swarm.broken


def _limits_of(query: Query, limits: SubagentLimits) -> SubagentLimits:
    """Return the limits of a query's tasks: the lowest limits of its agent and all callers."""
    above: Query | None = query
    while above is not None:
        for tool in above.agent.registered_tools:
            if isinstance(tool, DispatchingTool):
                limits = limits.within(tool.shared.limits)
                break
        above = above.parent
    return limits


def scope_of(query: Query, registry: SubagentRegistry) -> QueryScope:
    if isinstance(query.scope, QueryScope):
        return query.scope
    scope = QueryScope(_swarm_of(query, registry), query)
    query.scope = scope
    return scope


def known_swarm(query: Query) -> Swarm | None:
    if isinstance(query.task, TaskOfQuery):
        return query.task.swarm
    return query.recorder.swarm if isinstance(query.recorder.swarm, Swarm) else None


def _swarm_of(query: Query, registry: SubagentRegistry) -> Swarm:
    if (swarm := known_swarm(query)) is not None:
        return swarm
    if query.parent is not None:
        return scope_of(query.parent, registry).swarm
    registry.tidy()
    return Swarm(registry)
