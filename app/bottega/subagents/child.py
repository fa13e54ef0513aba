"""Execution of a task: the agent of the task, the agent's query, and the task's outcome."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from bottega.agents.agent import BaseAgent
from bottega.agents.messages import AgentUsage, AssistantResponse, ToolCall
from bottega.agents.provider import with_patience
from bottega.agents.query import QueriedAgent, Query, current_call, next_query
from bottega.agents.tools import ToolBase
from bottega.errors import BottegaError, BudgetExhaustedError, InvalidInputError
from bottega.subagents.handle import (
    ANONYMOUS,
    DispatchParams,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
)
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.shared_context import (
    GLOBAL,
    Workspace,
    file_tools,
    folder_of,
    private_folder_of,
)
from bottega.subagents.swarm import (
    ChildWork,
    DispatchingTool,
    QueryScope,
    Swarm,
    TaskOfQuery,
    known_swarm,
    scope_of,
)

DEFAULT_INSTRUCTIONS = (
    "You carry out one task for another agent, which reads your answer and nothing else of you. "
    "Answer with what it asked for, complete and to the point."
)
CANCELLED = "somebody cancelled this task"
EMPTY = "(the task ended without a text)"

PATIENCE_S = 30.0
"""Seconds that a sub-agent waits for an unavailable model, unless its definition sets a time."""
EXCERPT = 4_096
"""Number of characters in the head and in the tail of a long answer."""
MOST_SHOWN = 32_768
"""Maximum size in bytes of an answer that a parent's model reads as a whole."""

_MAY_PASS = frozenset(
    {
        *("model_unavailable", "model_timeout", "model_stream_broken", "model_bad_response"),
        *("model_error", "model_rate_limited"),
    }
)
"""Codes of a model's failures after which another try may succeed."""

FAN_OUT = "dispatch_subagents"


def places_of(model_call: int, index: int, tool_call: ToolCall) -> list[tuple[int, int]]:
    """Return the position (model call, index) of each task that a tool call dispatches.

    Args:
        index: index of the tool call in the model's message.
    """
    tasks = tool_call.arguments.get("tasks") if tool_call.name == FAN_OUT else None
    if not isinstance(tasks, list):
        return [(model_call, index)]
    return fan_out_places(model_call, index, len(tasks))


def fan_out_places(model_call: int, index: int, tasks: int) -> list[tuple[int, int]]:
    # Indexes of different calls never collide, because no message has 2^20 tool calls.
    return [(model_call, index + (number << 20)) for number in range(1, tasks + 1)]


class ChildTask:
    """A task that a tool call dispatches, and the work of this task.

    Args:
        place: position of the task: (model call, index of the tool call).
        agents: the caller's sub-agents by name.
        configure: function called with each new helper (an anonymous sub-agent).
    """

    __slots__ = ("agents", "configure", "place", "query", "scope", "task_id")

    def __init__(
        self,
        scope: QueryScope,
        query: Query,
        place: tuple[int, int],
        agents: Mapping[str, BaseAgent],
        configure: Callable[[BaseAgent], object] = lambda helper: None,
    ) -> None:
        self.scope = scope
        self.query = query
        self.place = place
        self.agents = agents
        self.configure = configure
        self.task_id: UUID = scope.id_below(place)

    def known(self) -> SubagentHandle | None:
        """Return the task if it exists; if it was dispatched before a crash, restore it first."""
        swarm, parent = self.scope.swarm, self.scope
        if (handle := swarm.registry.get(self.task_id, parent)) is not None:
            return handle
        restored = swarm.options.restored.get(self.task_id)
        if restored is None or parent.is_over:
            return None
        self.scope.dispatched[self.task_id] = restored.received
        graph = self.query.agent.memory_graph
        if graph is not None:
            for publication in restored.publications:
                graph.restore(publication)
        self.query.usage += restored.usage
        if restored.outcome is not None:
            keep_answer(swarm, self.task_id, restored.outcome)
        handle = swarm.registry.restore(
            parent, restored, self, task_id=self.task_id, place=self.place
        )
        if self.task_id in swarm.options.cancelled:
            swarm.registry.cancel(self.task_id, CANCELLED)
        return handle

    def dispatch(self, params: DispatchParams, files: Mapping[str, str]) -> SubagentHandle:
        """Dispatch the task; after an error, the task's folder is empty.

        Args:
            files: texts of the task's input files, by path.

        Raises:
            InvalidInputError: a file is refused: ``bad_path``, ``bad_content`` or ``too_large``.
            SubagentRefusedError: see :meth:`SubagentRegistry.dispatch`.
        """
        swarm, parent = self.scope.swarm, self.scope
        try:
            for path, content in files.items():
                swarm.context.write(self._input(path), content)
            params.is_remote = self._is_spread(params)
            handle = swarm.registry.dispatch(
                parent, params, self, task_id=self.task_id, place=self.place
            )
        except BottegaError:
            swarm.context.forget(folder_of(self.task_id))
            raise
        self.scope.dispatched[self.task_id] = False
        return handle

    def give_again(self, files: Mapping[str, str]) -> None:
        """Write a restored task's input files again, except files that exist."""
        context = self.scope.swarm.context
        paths = context.list(folder_of(self.task_id))
        for path, content in files.items():
            if (path := self._input(path)) not in paths:
                context.restore(path, content)

    def _input(self, path: str) -> str:
        return f"{folder_of(self.task_id)}/input/{path.removeprefix('/')}"

    def _is_spread(self, params: DispatchParams) -> bool:
        """Return true (a child run) if a new task is simple and its parent has many tasks."""
        parent, swarm = self.scope, self.scope.swarm
        if swarm.options.remote is None or parent.here < parent.limits.spread_above:
            return False
        if parent.ancestors is not None or params.retries:
            return False
        return (params.agent is None or is_leaf(self.agents[params.agent])) and (
            sum(map(len, self._files().values())) <= 64_000  # maximum number of characters
        )

    def _files(self) -> dict[str, str]:
        return self.scope.swarm.context.texts(GLOBAL, folder_of(self.task_id))

    async def __call__(self, handle: SubagentHandle) -> SubagentOutcome:
        """Execute the task: query a new agent for each try, until success or the last retry."""
        if handle.is_remote:
            return await self._do_as_child_run(handle)
        swarm, tries = self.scope.swarm, 1
        try:
            outcome, calls = await self._try(handle, tries, 0)
            while (
                _is_retried(outcome)
                and tries <= handle.retries
                and not swarm.options.is_suspended()
            ):
                tries += 1
                handle.partial_output, handle.was_limited = "", False
                if handle.mailbox is not None:
                    handle.mailbox.again()
                retried = {"attempt": tries, "reason": outcome.error}
                handle.parent.listener.on_event(handle, "retried", retried)
                outcome, calls = await self._try(handle, tries, calls)
            keep_answer(swarm, handle.task_id, outcome)
            return outcome
        finally:
            swarm.context.forget(private_folder_of(handle.task_id))

    async def _try(
        self, handle: SubagentHandle, tries: int, calls: int
    ) -> tuple[SubagentOutcome, int]:
        """Query a new agent for one try; add the agent's usage to the parent's query.

        Args:
            calls: number of model calls of earlier tries.

        Returns:
            The outcome, and the number of model calls of all tries so far.
        """
        agent = self._new_agent(handle)
        query = Query(
            agent=agent,
            messages=(),
            recorder=self.query.recorder,
            parent=self.query,
            path=handle.path,
            model_calls=calls,
            earlier_calls=calls,
            tries=tries,
            task=TaskOfQuery(self.scope.swarm, handle),
        )
        token = next_query.set(query)
        try:
            question = first_message(handle.task_id, handle.prompt, handle.shared)
            outcome = outcome_of(await agent.execute_query_async(question))
        except BudgetExhaustedError:
            raise
        except Exception as error:
            if error is query.escaped:
                self.scope.swarm.break_with(error)
            outcome = SubagentOutcome.failed("task_failed", f"{type(error).__name__}: {error}")
        finally:
            next_query.reset(token)  # otherwise the context variable would keep the agent in memory
            self.query.usage += query.usage
        return outcome, query.model_calls

    def _new_agent(self, handle: SubagentHandle) -> BaseAgent:
        most = self.scope.limits.max_steps_per_subagent
        if handle.agent is not None:
            return copy_for_task(self.agents[handle.agent], handle.instructions, most)
        helper = helper_of(self.query.agent, handle.instructions, most)
        self.configure(helper)
        return helper

    async def _do_as_child_run(self, handle: SubagentHandle) -> SubagentOutcome:
        swarm, caller = self.scope.swarm, self.query.agent
        remote = swarm.options.remote
        assert remote is not None

        def pay(usage: AgentUsage) -> None:
            self.query.usage += usage
            handle.token_usage += usage.tokens
            handle.spend(usage)

        work = ChildWork(
            agent=handle.agent or caller.agent_id or caller.agent_name,
            is_helper=handle.agent is None,
            instructions=handle.instructions,
            question=first_message(handle.task_id, handle.prompt, handle.shared),
            most_steps=self.scope.limits.max_steps_per_subagent,
            files=self._files(),
        )
        try:
            end = await remote.do(handle, work, pay)
        except BudgetExhaustedError:
            raise
        except Exception as error:
            swarm.break_with(error)
            raise
        for path, content in end.files.items():
            try:
                swarm.context.write(path, content)
            except InvalidInputError as error:  # the run has too many files
                warning = {"code": "file_not_kept", "message": f"{path}: {error.detail}"}
                handle.parent.listener.on_event(handle, "warning", warning)
        keep_answer(swarm, handle.task_id, end.outcome)
        return end.outcome


def is_leaf(agent: BaseAgent) -> bool:
    """Return true if an agent has no sub-agents and no graph, and never waits for people."""
    return agent.memory_graph is None and not any(
        tool.subagents
        or tool.approval is not None
        or isinstance(tool, DispatchingTool)
        or type(tool).interrupt is not ToolBase.interrupt
        for tool in agent.registered_tools
    )


def helper_of(parent: QueriedAgent, instructions: str | None, most: int) -> BaseAgent:
    """Return a helper that has the caller's model and parameters, except ``tool_choice``."""
    return BaseAgent(
        instructions or DEFAULT_INSTRUCTIONS,
        provider=with_patience(parent.provider, PATIENCE_S),
        params=None if parent.params is None else parent.params.without_tool_choice(),
        agent_name=ANONYMOUS,
        max_iterations=most,
        tools=own_file_tools(),
    )


def copy_for_task(source: BaseAgent, instructions: str | None, most: int) -> BaseAgent:
    """Return a copy of ``source``. The copy and ``source`` share no state.

    Args:
        instructions: text that is added to the instructions of ``source``.
        most: maximum number of the copy's model calls.
    """
    agent = source.fresh_copy()
    agent.max_iterations = min(agent.max_iterations, most)
    tool_names = {tool.name for tool in agent.registered_tools}
    agent.registered_tools += [tool for tool in own_file_tools() if tool.name not in tool_names]
    if instructions:
        own = agent.system_message
        message = own.model_copy(update={"content": f"{own.content}\n\n{instructions}"})
        agent.system_message = message
        agent.conversation_history[:1] = [message]
    return agent


def _is_retried(outcome: SubagentOutcome) -> bool:
    code = outcome.error_code or ""
    return outcome.status is SubagentStatus.FAILED and (
        code in _MAY_PASS
        or not (code.startswith("model_") or code in ("budget_exhausted", "max_iterations"))
    )


def first_message(task_id: UUID, prompt: str, shared: Mapping[str, Any]) -> str:
    """Return the first message to a task's agent: the prompt, metadata, and paths of folders."""
    about = f"\n\nMetadata: {json.dumps(shared, ensure_ascii=False)}" if shared else ""
    return (
        f"{prompt}{about}\n\nYour own folder is {folder_of(task_id)}/ "
        "(input, output, scratch); /global/ is for reading."
    )


def excerpt(output: str) -> dict[str, Any]:
    """Return the head and tail of a long answer, and the answer's size."""
    return {"head": output[:EXCERPT], "tail": output[-EXCERPT:], "bytes": len(output.encode())}


def is_long(output: str) -> bool:
    return len(output) * 4 > MOST_SHOWN and len(output.encode()) > MOST_SHOWN


def answer_file(task_id: UUID) -> str:
    return f"{folder_of(task_id)}/final_output.md"


def keep_answer(swarm: Swarm, task_id: UUID, outcome: SubagentOutcome) -> None:
    """Write a long answer to a file for the parent, in memory: the log already has the answer."""
    if outcome.output is not None and is_long(outcome.output):
        swarm.context.restore(answer_file(task_id), outcome.output)


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


def _registry_of(query: Query) -> SubagentRegistry | None:
    swarm = query.scope.swarm if isinstance(query.scope, QueryScope) else known_swarm(query)
    if swarm is not None:
        return swarm.registry
    tools = query.agent.registered_tools
    return next((tool.shared.registry for tool in tools if isinstance(tool, DispatchingTool)), None)


@functools.cache
def own_file_tools() -> tuple[ToolBase, ...]:
    """Return the file tools; each tool call uses the files of the calling query."""

    def workspace() -> Workspace:
        call = current_call.get()
        if call is not None and (registry := _registry_of(call.query)) is not None:
            return scope_of(call.query, registry).workspace
        raise InvalidInputError("this tool works only within a query with asynchronous sub-agents")

    return file_tools(workspace)
