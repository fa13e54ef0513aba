"""Carry out the tool calls of one message (spec page 1, A3 and A5)."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial

from bottega.agents.current import CurrentCall, current_call
from bottega.agents.events import QueryFailed, fire
from bottega.agents.hooks import AgentEvent, HookDecision
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    StandardMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
)
from bottega.agents.recording import Query
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase, error_result
from bottega.errors import FencedError, HistoryError, HookContractError

Toolbox = Mapping[str, ToolBase]


async def answer_calls(
    query: Query, message: AssistantMessage, tools: Toolbox, deferred: list[StandardMessage]
) -> tuple[ToolResult, ...]:
    """Append ``message`` and the answers to its calls to the history; answer with the results.

    However it ends, each call then has one answer in the history, in order.

    Args:
        deferred: messages that hooks injected before, to be placed after the answers.
    """
    calls = _Calls(query, message, tools)
    history = query.agent.conversation_history
    history.append(message)
    try:
        await calls.carry_out()
        for index in range(len(message.tool_calls)):
            await calls.append(index)
    finally:
        calls.close()
        history.extend(deferred)
        for later in calls.deferred:
            history.extend(later)
        results = tuple(calls.appended)
        query.tool_results += results
        query.usage += AgentUsage(tool_calls=len(results))
    return results


class _Calls:
    """The calls of one message on their way to their answers.

    Attributes:
        deferred: per call, what hooks injected while it was open.
        appended: the answers that stand in the history.
    """

    def __init__(self, query: Query, message: AssistantMessage, tools: Toolbox) -> None:
        self.query = query
        self.calls = message.tool_calls
        self.tools = tools
        self.results: list[ToolResult | None] = [None] * len(self.calls)
        self.deferred: list[list[StandardMessage]] = [[] for _ in self.calls]
        self.appended: list[ToolResult] = []

    async def carry_out(self) -> None:
        """Carry the calls out: side by side, but for those that wait for others."""
        if len(self.calls) == 1:
            await self._one(0)
            return
        waits = waiting_for([self.tools.get(call.name) for call in self.calls])
        tasks: list[asyncio.Task[None]] = []
        for index in range(len(self.calls)):
            tasks.append(asyncio.create_task(self._after(index, waits[index], tasks)))
        await all_or_none(tasks)

    async def _after(
        self, index: int, others: Sequence[int], tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        if others:
            await asyncio.wait([tasks[other] for other in others])
        await self._one(index)

    async def _one(self, index: int) -> None:
        """Carry out one call, with the hooks around it."""
        asked = call = self.calls[index]
        query = self.query
        hooks = query.agent.hooks
        on = partial(fire, query, deferred=self.deferred[index])
        skipped: ToolResult | None = None
        if AgentEvent.BEFORE_TOOL_EXECUTION in hooks:
            outcome = await on(AgentEvent.BEFORE_TOOL_EXECUTION, call, tool_call=call)
            if outcome.decision is HookDecision.STOP:
                skipped = outcome.value
            else:
                call = outcome.value
                if call.id != asked.id:
                    call = call.model_copy(update={"id": asked.id})
        result = paired(await self._recorded(index, call, skipped), asked)
        if AgentEvent.AFTER_TOOL_EXECUTION in hooks:
            outcome = await on(
                AgentEvent.AFTER_TOOL_EXECUTION, result, tool_call=call, tool_result=result
            )
            result = outcome.value
        if result.status is ToolStatus.ERROR and AgentEvent.ON_TOOL_ERROR in hooks:
            outcome = await on(
                AgentEvent.ON_TOOL_ERROR,
                result,
                tool_call=call,
                tool_result=result,
                error=result.error,
            )
            result = outcome.value
        self.results[index] = paired(result, asked)

    async def _recorded(self, index: int, call: ToolCall, skipped: ToolResult | None) -> ToolResult:
        tool = self.tools.get(call.name)

        def execute() -> Awaitable[ToolResult]:
            return _given(skipped) if skipped else execute_tool(tool, call, self.tools)

        token = current_call.set(CurrentCall(self.query, index, call.id))
        try:
            return await self.query.recorder.tool_call(self.query, call, tool, execute)
        finally:
            current_call.reset(token)

    async def append(self, index: int) -> None:
        """Append the answer to a call to the history, after BEFORE_HISTORY_UPDATE."""
        result = self.results[index]
        assert result is not None
        if AgentEvent.BEFORE_HISTORY_UPDATE in self.query.agent.hooks:
            outcome = await fire(
                self.query,
                AgentEvent.BEFORE_HISTORY_UPDATE,
                result,
                tool_result=result,
                deferred=self.deferred[index],
            )
            result = paired(outcome.value, self.calls[index])
        self._append(result)

    def _append(self, result: ToolResult) -> None:
        self.appended.append(result)
        self.query.agent.conversation_history.append(
            ToolMessage(content=result.text, tool_results=(result,))
        )

    def close(self) -> None:
        """Answer the calls that an error or a cancellation left open."""
        for index in range(len(self.appended), len(self.calls)):
            self._append(self.results[index] or error_result(self.calls[index], "interrupted"))


async def _given(result: ToolResult) -> ToolResult:
    return result


def paired(result: ToolResult, call: ToolCall) -> ToolResult:
    """The result as the answer to ``call``, whatever id and name its maker gave it."""
    if result.tool_call_id == call.id and result.tool_name == call.name:
        return result
    return result.model_copy(update={"tool_call_id": call.id, "tool_name": call.name})


async def execute_tool(tool: ToolBase | None, call: ToolCall, tools: Toolbox) -> ToolResult:
    """Execute one call. What goes wrong in the tool is an ERROR result for the model to read."""
    if tool is None:
        names = ", ".join(tools) or "none"
        return error_result(call, f"there is no tool '{call.name}'; you may use: {names}")
    if call.malformed is not None:
        return error_result(call, f"the arguments are no JSON object: {call.malformed[:200]}")
    limit = asyncio.timeout(tool.timeout_s)
    try:
        async with limit:
            result: object = await tool.execute(call)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error_result(call, "the tool cancelled itself")
    except (Exception, SystemExit) as error:
        if must_escape(tool, error):
            raise
        if limit.expired() and isinstance(error, TimeoutError):
            return error_result(call, f"timed out after {tool.timeout_s:g} s")
        return error_result(call, f"{type(error).__name__}: {error}")
    if isinstance(result, ToolResult):
        return result
    return error_result(call, f"the tool answered {type(result).__name__}, which is no ToolResult")


def must_escape(tool: ToolBase, error: BaseException) -> bool:
    """Whether an error ends the query: a lost run, a bug in a hook, or what ended a sub-agent's."""
    return isinstance(tool, SubAgentWrapper) or isinstance(
        error, FencedError | HookContractError | HistoryError
    )


def waiting_for(tools: Sequence[ToolBase | None]) -> list[list[int]]:
    """Per call of a message, the calls that must be over before it starts.

    A sub-agent waits for those from which a path of the graph leads to it, and a stateful one for
    the call to itself before, so that its history grows in the order of the calls. Costs a look
    per pair of different tools, however often each is called.
    """
    places: dict[SubAgentWrapper, list[int]] = {}
    for index, tool in enumerate(tools):
        if isinstance(tool, SubAgentWrapper):
            places.setdefault(tool, []).append(index)
    upstream = {
        tool: [index for other in places if _leads_to(other, tool) for index in places[other]]
        for tool in places
    }
    last: dict[int, int] = {}  # by agent, which may be a tool under several names
    waits: list[list[int]] = []
    for index, tool in enumerate(tools):
        others: list[int] = []
        if isinstance(tool, SubAgentWrapper):
            others = upstream[tool]
            if not tool.stateless:
                before = last.get(id(tool.agent))
                others = others if before is None else [*others, before]
            last[id(tool.agent)] = index
        waits.append(others)
    return waits


def _leads_to(first: SubAgentWrapper, then: SubAgentWrapper) -> bool:
    """Whether a path of the graph leads from one sub-agent to another."""
    graph, agent_id = then.agent.memory_graph, then.agent.agent_id
    return (
        graph is not None
        and graph is first.agent.memory_graph
        and agent_id is not None
        and first.agent.agent_id in graph.ancestors(agent_id)
    )


async def all_or_none(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks; if one fails or the caller is cancelled, first stop the others.

    Raises:
        Exception: the first task's that failed, in order, a query's own failure coming last.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _stop(tasks)
    if any(task.cancelled() for task in tasks) and not any(
        not task.cancelled() and task.exception() for task in tasks
    ):
        raise asyncio.CancelledError
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
    for error in errors:
        if not isinstance(error, QueryFailed):
            raise error
    if errors:
        raise errors[0]


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks and return only when none of them runs any more."""
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            continue  # cancelled again meanwhile; it will end soon, and may not leave them behind
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, or asyncio would complain that nobody looked
