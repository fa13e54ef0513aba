"""The tools ``dispatch_subagent`` and ``dispatch_subagents``."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from bottega.agents.messages import AssistantMessage, ToolCall, ToolResult
from bottega.agents.query import CurrentCall
from bottega.agents.tools import error_result, explain, success_result
from bottega.errors import InvalidInputError, SubagentRefusedError
from bottega.subagents.child import ANONYMOUS, FAN_OUT, ChildTask, places_of
from bottega.subagents.handle import DispatchParams, SubagentHandle
from bottega.subagents.plugins import DispatchRequest, Refused, Skip, before_dispatch
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import QueryScope, context_of
from bottega.subagents.tools.arguments import (
    LAST_PRIORITY,
    USUAL_PRIORITY,
    DispatchArguments,
    FanOutArguments,
    schema_of,
)
from bottega.subagents.tools.shared import AsyncSubagents, SubagentTool

Answer = dict[str, Any]


class DispatchTool(SubagentTool):
    name = "dispatch_subagent"

    def __init__(self, shared: AsyncSubagents) -> None:
        super().__init__(shared)
        self.subagents = tuple(shared.agents.values())
        known = "".join(f"\n- {name}: {a.description}" for name, a in shared.agents.items())
        helper = " Without an agent, a helper like you does it." if shared.anonymous else ""
        self.description = (
            "Starts a task that runs beside you, and answers its task_id at once; then "
            "poll_subagent, or await_subagent." + (f"{helper} Agents:{known}" if known else "")
        )

    def create_schema(self) -> dict[str, Any]:
        schema = schema_of(DispatchArguments)
        if self.shared.agents:
            schema["properties"]["agent"] = {"type": "string", "enum": list(self.shared.agents)}
        else:
            del schema["properties"]["agent"]
        if not self.shared.anonymous:
            schema["required"].append("agent")
        return schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        call, scope = self.shared.scope()
        place = places_of(call.query.model_calls, call.index, tool_call)[0]
        try:
            started = await self.dispatch(call, scope, place, tool_call.arguments)
        except InvalidInputError as error:
            return error_result(tool_call, error.detail, error.code)
        return success_result(tool_call, self.answer_of(started, call))

    def replayed(self, tool_call: ToolCall) -> None:
        call, scope = self.shared.scope()
        places = places_of(call.query.model_calls, call.index, tool_call)
        for place, asked in zip(places, self._asked(tool_call), strict=True):
            child = self._child(call, scope, place)
            if child.known() is not None:
                child.give_again(asked.get("input") or {})

    def _asked(self, tool_call: ToolCall) -> Sequence[Mapping[str, Any]]:
        """Return the arguments of the tasks that a call asks for."""
        return [tool_call.arguments]

    async def dispatch(
        self, call: CurrentCall, scope: QueryScope, place: tuple[int, int], asked: Any
    ) -> SubagentHandle | Answer:
        """Dispatch one task; return it, or what the model reads instead.

        Raises:
            InvalidInputError: the arguments are wrong, or a guard refuses the task.
        """
        arguments = self._valid(asked)
        child = self._child(call, scope, place)
        if (handle := child.known()) is None:
            decided = await _decided(scope, arguments)
            if isinstance(decided, Skip):
                return {"status": "skipped", "result": decided.result}
            if isinstance(decided, Refused):
                raise InvalidInputError(decided.detail)
            await child.give(arguments.input)
            try:
                handle = child.dispatch(_params(decided, arguments, self.shared.share_metadata))
            except SubagentRefusedError as error:
                child.take_back()
                return {"error": error.detail, **error.about}
        else:
            child.give_again(arguments.input)
        return handle

    def _valid(self, asked: Any) -> DispatchArguments:
        try:
            arguments = DispatchArguments.model_validate(asked)
        except ValidationError as error:
            raise InvalidInputError(explain(error)) from None
        names = ", ".join(self.shared.agents) or "none"
        if arguments.agent is None and not self.shared.anonymous:
            raise InvalidInputError(f"name one of your agents in 'agent': {names}")
        if arguments.agent is not None and arguments.agent not in self.shared.agents:
            raise InvalidInputError(f"there is no agent '{arguments.agent}'; use: {names}")
        return arguments

    def _child(self, call: CurrentCall, scope: QueryScope, place: tuple[int, int]) -> ChildTask:
        return ChildTask(scope, call.query, place, self.shared.agents, self.shared.configure)

    def answer_of(self, started: SubagentHandle | Answer, call: CurrentCall) -> Answer:
        """Return what the model reads of a task that it dispatched by this call."""
        if not isinstance(started, SubagentHandle):
            return started
        scheduler = self.shared.registry.scheduler
        is_queued = started.status is SubagentStatus.QUEUED
        is_known = is_queued and started.priority <= _best_to_come(call)
        return {
            "task_id": str(started.task_id),
            "status": str(started.status),
            "queue_position": started.queue_position if is_queued else None,
            "estimated_start_ms": scheduler.estimated_start_ms(started) if is_known else None,
        }


class FanOutTool(DispatchTool):
    name = "dispatch_subagents"

    def __init__(self, shared: AsyncSubagents) -> None:
        super().__init__(shared)
        self.subagents = ()
        self.description = (
            "Starts several tasks in one call, as dispatch_subagent does. Answers for each its "
            "task_id, or the error for which it was not started; the others start all the same."
        )

    def create_schema(self) -> dict[str, Any]:
        schema = schema_of(FanOutArguments)
        schema["properties"]["tasks"]["items"] = super().create_schema()
        return schema

    def _asked(self, tool_call: ToolCall) -> Sequence[Mapping[str, Any]]:
        tasks = tool_call.arguments.get("tasks")
        return tasks if isinstance(tasks, list) else [{}]

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            tasks = FanOutArguments.model_validate(tool_call.arguments).tasks
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        call, scope = self.shared.scope()
        places = places_of(call.query.model_calls, call.index, tool_call)
        each_one = (self._one(call, scope, *each) for each in zip(places, tasks, strict=True))
        if scope.swarm.options.plugins:
            started = await asyncio.gather(*each_one)
        else:  # without a pause: none has begun before all are queued
            started = [await one for one in each_one]
        answers = [self.answer_of(each, call) for each in started]
        numbered = [{"index": index, **answer} for index, answer in enumerate(answers)]
        return success_result(tool_call, {"tasks": numbered})

    async def _one(
        self, call: CurrentCall, scope: QueryScope, place: tuple[int, int], asked: Any
    ) -> SubagentHandle | Answer:
        try:
            return await self.dispatch(call, scope, place, asked)
        except InvalidInputError as error:
            return {"error": error.detail}


def _best_to_come(call: CurrentCall) -> int:
    """Return the best priority of the tasks that later calls of the same message dispatch."""
    history = call.query.agent.conversation_history
    message = next((each for each in reversed(history) if isinstance(each, AssistantMessage)), None)
    later = [] if message is None else message.tool_calls[call.index + 1 :]
    asked: list[Any] = []
    for other in later:
        if other.name == DispatchTool.name:
            asked.append(other.arguments)
        elif other.name == FAN_OUT and isinstance(tasks := other.arguments.get("tasks"), list):
            asked += tasks
    given = (each.get("priority", USUAL_PRIORITY) for each in asked if isinstance(each, dict))
    return min((each for each in given if isinstance(each, int)), default=LAST_PRIORITY)


async def _decided(
    scope: QueryScope, arguments: DispatchArguments
) -> DispatchRequest | Skip | Refused:
    request = DispatchRequest(
        prompt=arguments.prompt,
        instructions=arguments.instructions,
        agent=arguments.agent,
        priority=arguments.priority,
        metadata=arguments.metadata,
    )
    if not scope.swarm.options.plugins:
        return request
    return await before_dispatch(scope.swarm.options.plugins, context_of(scope.parent), request)


def _params(
    request: DispatchRequest, arguments: DispatchArguments, share_metadata: Collection[str]
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
        retries=arguments.retries,
        shared=tuple(key for key in share_metadata if key in request.metadata),
    )
