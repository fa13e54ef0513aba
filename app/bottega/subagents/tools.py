"""The tools ``dispatch_subagent``, ``poll_subagent`` and ``await_subagent``."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bottega.agents.agent import BaseAgent
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.query import CurrentCall, current_call
from bottega.agents.shared_memory import awareness_message
from bottega.agents.tools import error_result, explain, success_result
from bottega.errors import CycleError, InvalidInputError, SubagentRefusedError
from bottega.subagents.child import ANONYMOUS, ChildTask, as_id, find, report
from bottega.subagents.file_tools import file_tools
from bottega.subagents.handle import DispatchParams, Mode, SubagentHandle
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import (
    DispatchRequest,
    Refused,
    Skip,
    before_dispatch,
    checked_metadata,
)
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.shared_context import Workspace
from bottega.subagents.swarm import DispatchingTool, QueryScope, context_of, scope_of

TaskIds = Annotated[
    list[Annotated[str, Field(max_length=100)]],
    Field(min_length=1, max_length=50, description="Ids that dispatch_subagent answered."),
]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DispatchArguments(_Arguments):
    prompt: str = Field(min_length=1, max_length=10_000, description="What the task is to do.")
    instructions: str | None = Field(
        default=None, max_length=5_000, description="How it is to work: its system message."
    )
    agent: str | None = Field(default=None, max_length=64)
    priority: int = Field(default=5, ge=1, le=10, description="1 goes first, 10 last.")
    timeout_ms: int | None = Field(default=None, ge=5_000, le=600_000)
    token_budget: int | None = Field(default=None, ge=1, description="Tokens it may spend.")
    metadata: Annotated[dict[str, Any], AfterValidator(checked_metadata)] = Field(
        default_factory=dict
    )


class PollArguments(_Arguments):
    task_ids: TaskIds
    include_partial_output: bool = True
    max_partial_output_length: int = Field(default=2_000, ge=0, le=10_000)


class AwaitArguments(_Arguments):
    task_id: str | None = Field(default=None, max_length=100)
    task_ids: TaskIds | None = None
    mode: Literal["all", "any", "quorum"] = "all"
    quorum: int | None = Field(default=None, ge=1, le=50, description="How many, in that mode.")
    timeout_ms: int = Field(default=300_000, ge=1_000, le=600_000)


class AsyncSubagents:
    """State shared by an agent's three tools.

    Attributes:
        agents: the agent's sub-agents by name.
        limits: the agent's own limits.
    """

    def __init__(
        self,
        registry: SubagentRegistry,
        agents: Mapping[str, BaseAgent],
        limits: SubagentLimits,
    ) -> None:
        self.registry = registry
        self.agents = dict(agents)
        self.limits = limits

    def scope(self) -> tuple[CurrentCall, QueryScope]:
        """Return the running tool call and the scope of its query."""
        call = current_call.get()
        if call is None:
            raise InvalidInputError("this tool works only within an agent's query")
        return call, scope_of(call.query, self.registry)

    def workspace(self) -> Workspace:
        return self.scope()[1].workspace

    def ancestors(self) -> Callable[[str], frozenset[str]] | None:
        """See :meth:`DispatchingTool.ancestors`."""
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


def use_async_subagents(
    agent: BaseAgent,
    registry: SubagentRegistry,
    agents: Iterable[BaseAgent] | Mapping[str, BaseAgent] = (),
    *,
    limits: SubagentLimits | None = None,
) -> None:
    """Register the sub-agent tools and the file tools on an agent.

    Args:
        agents: sub-agents that it may name in a dispatch. Their names are the keys of a mapping,
            else ``agent_id`` or ``agent_name``. Each needs a description.
        limits: limits of its tasks; by default the registry's.

    Raises:
        InvalidInputError: ``missing_description``; ``duplicate_tool``: the agent has a tool of one
            of these names, or synchronous sub-agents.
        CycleError: the agent is a direct or indirect sub-agent of one of ``agents``.
    """
    if not isinstance(agents, Mapping):
        agents = {child.agent_id or child.agent_name: child for child in agents}
    if agent.subagents:
        raise InvalidInputError(
            f"{agent.agent_name} has synchronous sub-agents; it cannot have asynchronous ones too",
            code="duplicate_tool",
        )
    for name, child in agents.items():
        if not child.description:
            raise InvalidInputError(
                f"the sub-agent '{name}' needs a description: the model decides by it when to call",
                code="missing_description",
            )
        if path := child.path_to(agent):
            names = [member.agent_id or member.agent_name for member in (agent, *path)]
            raise CycleError(names, what="sub-agent")
    shared = AsyncSubagents(registry, agents, limits or registry.limits)
    files = file_tools(shared.workspace)
    for tool in (DispatchTool(shared), PollTool(shared), AwaitTool(shared), *files):
        agent.register_tool(tool)
    if agent.memory_graph is not None:
        ids = {child.agent_id: name for name, child in agents.items() if child.agent_id}
        if message := awareness_message(agent.memory_graph, ids):
            agent.conversation_history.insert(1, message)


class _SubagentTool(DispatchingTool):
    timeout_s = None
    idempotent = True
    local = True

    def __init__(self, shared: AsyncSubagents) -> None:
        self.shared = shared
        self.limits = shared.limits

    def ancestors(self) -> Callable[[str], frozenset[str]] | None:
        return self.shared.ancestors()


class DispatchTool(_SubagentTool):
    name = "dispatch_subagent"

    def __init__(self, shared: AsyncSubagents) -> None:
        super().__init__(shared)
        self.subagents = tuple(shared.agents.values())
        known = "".join(f"\n- {name}: {a.description}" for name, a in shared.agents.items())
        self.description = (
            "Starts a task that runs beside you, and answers its task_id at once. Dispatch several "
            "in one message to run them in parallel; then poll_subagent, or await_subagent." + (
                f" Without an agent, a helper like you does it. Agents:{known}" if known else ""
            )
        )  # fmt: skip

    def create_schema(self) -> dict[str, Any]:
        schema = _schema(DispatchArguments)
        if self.shared.agents:
            schema["properties"]["agent"] = {"type": "string", "enum": list(self.shared.agents)}
        else:
            del schema["properties"]["agent"]
        return schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = DispatchArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        if arguments.agent is not None and arguments.agent not in self.shared.agents:
            names = ", ".join(self.shared.agents) or "none"
            return error_result(tool_call, f"there is no agent '{arguments.agent}'; use: {names}")
        call, scope = self.shared.scope()
        child = self._child(call, scope, tool_call)
        if (handle := child.known()) is None:
            decided = (
                await self._decided(scope, arguments) if scope.swarm.options.plugins else arguments
            )
            if isinstance(decided, Skip):
                skipped = {"status": "skipped", "result": decided.result}
                return success_result(tool_call, skipped)
            if isinstance(decided, Refused):
                return error_result(tool_call, decided.detail)
            try:
                handle = child.dispatch(_params(decided, arguments))
            except SubagentRefusedError as error:
                return success_result(tool_call, {"error": error.detail, **error.about})
        return success_result(tool_call, _dispatched(handle, self.shared.registry))

    def replayed(self, tool_call: ToolCall) -> None:
        call, scope = self.shared.scope()
        self._child(call, scope, tool_call).known()

    def _child(self, call: CurrentCall, scope: QueryScope, tool_call: ToolCall) -> ChildTask:
        return ChildTask(
            scope, call.query, (call.query.model_calls, call.index), self.shared.agents
        )

    async def _decided(
        self, scope: QueryScope, arguments: DispatchArguments
    ) -> DispatchRequest | Skip | Refused:
        request = DispatchRequest(
            prompt=arguments.prompt,
            instructions=arguments.instructions,
            agent=arguments.agent,
            priority=arguments.priority,
            metadata=arguments.metadata,
        )
        return await before_dispatch(scope.swarm.options.plugins, context_of(scope.parent), request)


def _params(
    request: DispatchRequest | DispatchArguments, arguments: DispatchArguments
) -> DispatchParams:
    return DispatchParams(
        prompt=request.prompt,
        agent=arguments.agent or ANONYMOUS,
        named=arguments.agent is not None,
        instructions=request.instructions,
        priority=request.priority,
        timeout=None if arguments.timeout_ms is None else arguments.timeout_ms / 1000,
        token_budget=arguments.token_budget,
        metadata=request.metadata,
    )


def _dispatched(handle: SubagentHandle, registry: SubagentRegistry) -> dict[str, Any]:
    position = handle.queue_position
    answer = {"task_id": str(handle.task_id), "status": "queued", "queue_position": position}
    if (start := registry.scheduler.estimated_start_ms(position)) is not None:
        answer["estimated_start_ms"] = start
    return answer


class PollTool(_SubagentTool):
    name = "poll_subagent"
    description = "Says how tasks are doing, with what they wrote so far. Never waits."

    def create_schema(self) -> dict[str, Any]:
        return _schema(PollArguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = PollArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        _, scope = self.shared.scope()
        longest = arguments.max_partial_output_length if arguments.include_partial_output else 0
        return success_result(tool_call, await report(scope, arguments.task_ids, longest))


class AwaitTool(_SubagentTool):
    name = "await_subagent"
    description = (
        "Waits until a task, or all, any or a quorum of several, are over, and answers what they "
        "found. When timeout_ms is over first, they go on, and you may await them again."
    )

    def create_schema(self) -> dict[str, Any]:
        return _schema(AwaitArguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = AwaitArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        ids = list(arguments.task_ids or ())
        ids += [arguments.task_id] if arguments.task_id is not None else []
        if not ids:
            return error_result(tool_call, "invalid arguments: give task_id or task_ids")
        call, scope = self.shared.scope()
        if problem := _bad_quorum(arguments, len(ids)):
            return error_result(tool_call, problem)
        found = {each: find(scope, each) for each in ids}
        known = [handle for handle in found.values() if handle]
        gone = sum(not handle and as_id(each) in scope.dispatched for each, handle in found.items())
        key = (scope.task_id, call.query.model_calls, tool_call.id)
        seconds = max(0.0, arguments.timeout_ms / 1000 - scope.swarm.options.waits.get(key, 0.0))
        mode: Mode = arguments.mode
        met = await scope.wait(known, mode, arguments.quorum, seconds, gone)
        answer = await report(scope, ids, 0)
        status = "done" if met else "pending"
        if len(ids) == 1:
            status = answer["tasks"][0]["status"]
        answer = {"status": status, "wait_timed_out": not met, "tasks": answer["tasks"]}
        return success_result(tool_call, answer)


def _bad_quorum(arguments: AwaitArguments, tasks: int) -> str | None:
    if arguments.mode != "quorum":
        return None
    if arguments.quorum is None or arguments.quorum > tasks:
        return f"invalid arguments: quorum must say how many of the {tasks} tasks, at least 1"
    return None


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema without titles, which would only cost tokens."""
    schema = model.model_json_schema()
    for field in schema["properties"].values():
        field.pop("title", None)
    del schema["title"]
    return schema
