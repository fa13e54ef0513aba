"""Tasks as the work of agents: build the agent, query it, and turn its response into an outcome."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from bottega.agents.agent import BaseAgent
from bottega.agents.loop import FINAL_ANSWER
from bottega.agents.messages import AssistantResponse
from bottega.agents.query import QueriedAgent, Query, next_query
from bottega.errors import BudgetExhaustedError
from bottega.subagents.handle import DispatchParams, SubagentHandle, SubagentOutcome
from bottega.subagents.shared_context import folder_of
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import QueryScope, Swarm, TaskOfQuery, own_file_tools

ANONYMOUS = "subagent"
DEFAULT_INSTRUCTIONS = (
    "You carry out one task for another agent, which reads your answer and nothing else of you. "
    "Answer with what it asked for, complete and to the point."
)
CANCELLED = "somebody cancelled this task"
EMPTY = "(the task ended without a text)"


class ChildTask:
    """The task of one dispatching tool call.

    Args:
        place: (model call, index of the tool call).
        agents: the caller's sub-agents by name.
    """

    def __init__(
        self,
        scope: QueryScope,
        query: Query,
        place: tuple[int, int],
        agents: Mapping[str, BaseAgent],
    ) -> None:
        self.scope = scope
        self.query = query
        self.place = place
        self.agents = agents
        self.task_id: UUID = scope.id_below(place)

    def known(self) -> SubagentHandle | None:
        """Return the task if it was dispatched before; restore it if that was before a crash."""
        registry, parent = self.scope.swarm.registry, self.scope.parent
        if (handle := registry.get(self.task_id, parent)) is not None:
            return handle
        restored = self.scope.swarm.options.restored.get(self.task_id)
        if restored is None or parent.is_over:
            return None
        self.scope.dispatched.add(self.task_id)
        graph = self.query.agent.memory_graph
        if graph is not None:
            for publication in restored.publications:
                graph.restore(publication)
        work = self._work(restored.params)
        self.query.usage += restored.usage
        restored = replace(restored, params=self._with_model(restored.params))
        handle = registry.restore(parent, restored, work, task_id=self.task_id, place=self.place)
        if self.task_id in self.scope.swarm.options.cancelled:
            registry.cancel(self.task_id, CANCELLED)
        return handle

    def dispatch(self, params: DispatchParams) -> SubagentHandle:
        """Dispatch the task; raises as :meth:`SubagentRegistry.dispatch`."""
        registry, parent = self.scope.swarm.registry, self.scope.parent
        work = self._work(params)
        params = self._with_model(params)
        handle = registry.dispatch(parent, params, work, task_id=self.task_id, place=self.place)
        self.scope.dispatched.add(self.task_id)
        return handle

    def _with_model(self, params: DispatchParams) -> DispatchParams:
        """Set ``model`` to the provider and model of the task's agent."""
        source = self.agents.get(params.agent) if params.named else None
        provider = (source or self.query.agent).provider
        api, model = getattr(provider, "api", ""), getattr(provider, "model", "")
        return replace(params, model=f"{type(provider).__name__}/{api}/{model}")

    def _work(
        self, params: DispatchParams
    ) -> Callable[[SubagentHandle], Awaitable[SubagentOutcome]]:
        swarm, parent, limits = self.scope.swarm, self.query, self.scope.parent.limits
        source = self.agents.get(params.agent) if params.named else None

        async def work(handle: SubagentHandle) -> SubagentOutcome:
            most = limits.max_steps_per_subagent
            if source is None:
                agent = _anonymous(parent.agent, params, most)
            else:
                agent = _named(source, params, most)
            return await _ask(swarm, parent, handle, agent)

        return work


def _anonymous(parent: QueriedAgent, params: DispatchParams, most: int) -> BaseAgent:
    """Return a helper with its caller's model and parameters, but for the choice of tools."""
    return BaseAgent(
        params.instructions or DEFAULT_INSTRUCTIONS,
        provider=parent.provider,
        params=None if parent.params is None else parent.params.without_tool_choice(),
        agent_name=ANONYMOUS,
        max_iterations=most,
        tools=own_file_tools(),
    )


def _named(source: BaseAgent, params: DispatchParams, most: int) -> BaseAgent:
    """Return a fresh copy of an agent: tasks share no state with their parent or each other."""
    agent = source.fresh_copy()
    agent.max_iterations = min(agent.max_iterations, most)
    known = {tool.name for tool in agent.registered_tools}
    agent.registered_tools += [tool for tool in own_file_tools() if tool.name not in known]
    if params.instructions:
        own = agent.system_message
        message = own.model_copy(update={"content": f"{own.content}\n\n{params.instructions}"})
        agent.system_message = message
        agent.conversation_history[:1] = [message]
    return agent


async def _ask(
    swarm: Swarm, parent: Query, handle: SubagentHandle, agent: BaseAgent
) -> SubagentOutcome:
    """Query the agent as part of the parent's query; add its usage to the parent's."""
    query = Query(
        agent=agent,
        messages=(),
        recorder=parent.recorder,
        parent=parent,
        path=handle.path,
        task=TaskOfQuery(swarm, handle),
    )
    token = next_query.set(query)
    try:
        response = await agent.execute_query_async(first_message(handle.task_id, handle.prompt))
    except BudgetExhaustedError:
        raise
    except Exception as error:
        if error is query.escaped:
            swarm.break_with(error)
        text = f"{type(error).__name__}: {error}"
        return SubagentOutcome(SubagentStatus.FAILED, error=text, error_code="task_failed")
    finally:
        next_query.reset(token)  # otherwise the task's context keeps its agent in memory
        swarm.forget_files(handle.task_id)
        parent.usage += query.usage
    return outcome_of(response)


def first_message(task_id: UUID, prompt: str) -> str:
    """Return the query of a task's agent: its prompt, and the places of its files."""
    return (
        f"{prompt}\n\nYour own folder is {folder_of(task_id)}/ "
        "(input, output, scratch); /global/ is for reading."
    )


def outcome_of(response: AssistantResponse) -> SubagentOutcome:
    if not response.is_answer:
        return SubagentOutcome(
            SubagentStatus.FAILED,
            error=response.error,
            error_code=response.error_code or "agent_failed",
            stop_reason=response.stop_reason,
        )
    return SubagentOutcome(
        SubagentStatus.COMPLETED,
        output=response.content or EMPTY,
        stop_reason=response.stop_reason,
    )


def find(scope: QueryScope, task_id: str) -> SubagentHandle | None:
    """Return the task of this id if it is a descendant of the calling query."""
    known = as_id(task_id)
    return None if known is None else scope.swarm.registry.get(known, scope.parent)


async def report(scope: QueryScope, ids: Sequence[str], longest_partial: int) -> dict[str, Any]:
    """Build the result of ``poll_subagent``; mark the caller's finished tasks as received."""
    now = scope.swarm.registry.scheduler.now()
    views: dict[str, dict[str, Any] | None] = {}
    for each in ids:
        handle = find(scope, each)
        views[each] = None if handle is None else _view(handle, now, longest_partial)
        if handle is not None and handle.status.is_final and handle.parent is scope.parent:
            handle.received = True
    if scope.swarm.options.lookup is not None and None in views.values():
        await _look_up(scope, views)
    tasks = [
        view or {"task_id": each, "status": "not_found", "error": "no task of yours has this id"}
        for each, view in views.items()
    ]
    counts = {str(status): 0 for status in SubagentStatus} | {"not_found": 0}
    for view in tasks:
        counts[view["status"]] += 1
    return {"tasks": tasks, "summary": {"total": len(tasks), **counts}}


async def _look_up(scope: QueryScope, views: dict[str, dict[str, Any] | None]) -> None:
    """Fill in collected tasks from the stored records."""
    assert scope.swarm.options.lookup is not None
    gone = {task: each for each, view in views.items() if view is None and (task := as_id(each))}
    if not gone:
        return
    for task, view in (await scope.swarm.options.lookup(list(gone), scope.task_id)).items():
        views[gone[task]] = view


def as_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _view(handle: SubagentHandle, now: float, longest_partial: int) -> dict[str, Any]:
    view: dict[str, Any] = {"task_id": str(handle.task_id), "status": str(handle.status)}
    if longest_partial and handle.partial_output and handle.final_output is None:
        view["partial_output"] = handle.partial_output[-longest_partial:]
    if handle.final_output is not None:
        view["final_output"] = handle.final_output
        if handle.stop_reason not in (None, FINAL_ANSWER):
            view["stop_reason"] = handle.stop_reason
    if handle.error is not None:
        view["error"] = handle.error
    view["duration_ms"] = handle.duration_ms(now)
    view["token_usage"] = handle.token_usage.to_dict()
    return view
