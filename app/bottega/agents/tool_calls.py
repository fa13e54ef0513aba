"""Execution of one message's tool calls. A cancelled call ends even if its tool still runs."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial

from bottega.agents.approval import as_edited
from bottega.agents.context import ToolContext, current_context
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
from bottega.agents.query import (
    RUN_AGAIN,
    CurrentCall,
    FinalAnswer,
    NextStep,
    QueriedAgent,
    Query,
    QueryFailed,
    current_call,
    fire,
)
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase, error_result, in_json, raised
from bottega.errors import FencedError, HistoryError, HookContractError

GRACE_S = 5.0
"""Seconds after which a tool call ends although its cancelled tool still runs."""

logger = logging.getLogger(__name__)


async def abandonable(tool: ToolBase, call: ToolCall) -> object:
    """Execute a call in a new task, within the tool's timeout.

    A tool that does not end within ``GRACE_S`` after its timeout or a cancellation is abandoned: no
    code waits for the tool any more.

    Raises:
        asyncio.CancelledError: the caller is cancelled, or the tool cancelled itself.
        Exception, SystemExit: the tool's error.
    """
    task = asyncio.ensure_future(_outcome(tool, call))
    try:
        await asyncio.wait([task], timeout=tool.timeout_s)
    except asyncio.CancelledError:
        await _stop_call(task, tool)
        raise
    if not task.done():
        await _stop_call(task, tool)
        if not task.done() or task.cancelled() or isinstance(task.result(), TimeoutError):
            return error_result(call, f"timed out after {tool.timeout_s:g} s", "timeout")
    result = task.result()
    if isinstance(result, BaseException):
        raise result
    return result


async def _outcome(tool: ToolBase, call: ToolCall) -> object:
    """Return the tool's result or its error; if raised, SystemExit would stop the event loop."""
    try:
        return await tool.execute(call)
    except (Exception, SystemExit) as error:
        return error


async def _stop_call(task: "asyncio.Task[object]", tool: ToolBase) -> None:
    """Cancel a tool's task, and wait at most ``GRACE_S`` until the task ends."""
    task.cancel()
    loop = asyncio.get_running_loop()
    until = loop.time() + GRACE_S
    while not task.done() and (left := until - loop.time()) > 0:
        try:
            await asyncio.wait([task], timeout=left)
        except asyncio.CancelledError:
            continue  # a second cancellation does not shorten the wait
    if not task.done():
        logger.warning(
            "the tool '%s' ignores its cancellation; nothing waits for it any more", tool.name
        )


Toolbox = Mapping[str, ToolBase]


async def answer_calls(
    query: Query, message: AssistantMessage, tools: Toolbox, deferred: list[StandardMessage]
) -> tuple[ToolResult, ...]:
    """Execute a message's calls; append the message and the answers to the history.

    Even after an error, the history has one answer for each call, in the calls' order.

    Args:
        deferred: messages that hooks injected earlier; the history gets them after the answers.

    Returns:
        The results of the calls, in order.
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
    """The running calls of one message.

    Attributes:
        deferred: the messages that hooks injected, per call.
        appended: the answers that are already in the history.
    """

    def __init__(self, query: Query, message: AssistantMessage, tools: Toolbox) -> None:
        self.query = query
        self.calls = message.tool_calls
        self.tools = tools
        self.results: list[ToolResult | None] = [None] * len(self.calls)
        self.deferred: list[list[StandardMessage]] = [[] for _ in self.calls]
        self.appended: list[ToolResult] = []

    async def carry_out(self) -> None:
        """Execute the calls concurrently, each after the calls that :func:`waiting_for` returns."""
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
        token = current_call.set(CurrentCall(self.query, index, call.id))
        try:
            if skipped or tool is None or call.malformed is not None:
                return await self._executed(call, tool, skipped)
            if not (approval := tool.needed_approval(call)):
                return await self._approved(call, tool)
            decision = await self.query.recorder.decision(self.query, call, approval)
            if denied := decision.result(call):
                return await self._executed(call, None, denied)
            if (arguments := decision.arguments) is None:
                return await self._approved(call, tool)
            edited = call.model_copy(update={"arguments": arguments})
            return as_edited(await self._approved(edited, tool))
        finally:
            current_call.reset(token)

    async def _approved(self, call: ToolCall, tool: ToolBase) -> ToolResult:
        if not (interrupt := tool.interrupt(call)):
            return await self._executed(call, tool, None)
        decision = await self.query.recorder.decision(self.query, call, interrupt)
        return await self._executed(call, None, decision.result(call))

    async def _executed(
        self, call: ToolCall, tool: ToolBase | None, given: ToolResult | None
    ) -> ToolResult:
        def execute() -> Awaitable[ToolResult]:
            return _given(given) if given else self._in_context(tool, call)

        return await self.query.recorder.tool_call(self.query, call, tool, execute)

    async def _in_context(self, tool: ToolBase | None, call: ToolCall) -> ToolResult:
        context = context_of(self.query, call)
        token = current_context.set(context)
        try:
            result = await execute_tool(tool, call, self.tools)
        finally:
            current_context.reset(token)
            context.cancel.cancel()
        if not context.annotations or result.status is ToolStatus.ERROR:
            return result
        given = {**result.annotations, **context.annotations}
        return result.model_copy(update={"annotations": given})

    async def append(self, index: int) -> None:
        """Run the hooks of BEFORE_HISTORY_UPDATE on an answer; append the answer to the history."""
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
        self.query.agent.conversation_history.append(ToolMessage.answering(result))

    def close(self) -> None:
        """Append an answer for each call that has none because of an error or a cancellation."""
        for index in range(len(self.appended), len(self.calls)):
            self._append(self.results[index] or error_result(self.calls[index], "interrupted"))


def context_of(query: Query, call: ToolCall) -> ToolContext:
    recorder = query.recorder
    name = query.agent.agent_id or query.agent.agent_name
    return ToolContext(name, recorder.caller, recorder.task_id(query), call.id)


async def _given(result: ToolResult) -> ToolResult:
    return result


def paired(result: ToolResult, call: ToolCall) -> ToolResult:
    """Set the id and tool name of ``call`` on a result."""
    if result.tool_call_id == call.id and result.tool_name == call.name:
        return result
    return result.model_copy(update={"tool_call_id": call.id, "tool_name": call.name})


async def execute_tool(tool: ToolBase | None, call: ToolCall, tools: Toolbox) -> ToolResult:
    """Execute one call; return an error of the tool as an ERROR result for the model."""
    if tool is None:
        names = ", ".join(tools) or "none"
        text = f"there is no tool '{call.name}'; you may use: {names}"
        return error_result(call, text, "unknown_tool")
    if call.malformed is not None:
        text = f"the arguments are not a JSON object: {call.malformed[:200]}"
        return error_result(call, text, "invalid_arguments")
    try:
        own = isinstance(tool, SubAgentWrapper) or tool.local
        result = await (tool.execute(call) if own else abandonable(tool, call))
        if isinstance(result, ToolResult):
            return in_json(result)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error_result(call, "the tool cancelled itself")
    except (Exception, SystemExit) as error:
        if must_escape(tool, error):
            raise
        return raised(call, error)
    return error_result(call, f"the tool returned {type(result).__name__}, not a ToolResult")


def must_escape(tool: ToolBase, error: BaseException) -> bool:
    """Return true if an error ends the query: an outdated attempt, a bug, a sub-agent's error."""
    return isinstance(tool, SubAgentWrapper) or isinstance(
        error, FencedError | HookContractError | HistoryError
    )


def waiting_for(tools: Sequence[ToolBase | None]) -> list[list[int]]:
    """Return, for each call of a message, the indexes of the calls that must end first.

    A sub-agent waits for its ancestors in the graph. A stateful sub-agent also waits for its own
    previous call, so that its history grows in the order of the calls.
    """
    places: dict[SubAgentWrapper, list[int]] = {}
    for index, tool in enumerate(tools):
        if isinstance(tool, SubAgentWrapper):
            places.setdefault(tool, []).append(index)
    upstream = {
        tool: [index for other in places if _leads_to(other, tool) for index in places[other]]
        for tool in places
    }
    last: dict[int, int] = {}  # the key is id(agent), because several tools may have one agent
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
    graph, agent_id = then.agent.memory_graph, then.agent.agent_id
    return (
        graph is not None
        and graph is first.agent.memory_graph
        and agent_id is not None
        and first.agent.agent_id in graph.ancestors(agent_id)
    )


async def all_or_none(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks. If a task fails or the caller is cancelled, stop the other tasks.

    Raises:
        Exception: the error of the task that comes first in ``tasks``. ``QueryFailed`` is raised
            only if no task has raised a different error.
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
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            continue  # a second cancellation does not end the wait, because every task must stop
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieve the error, so that asyncio does not log the error


def after_tools(agent: QueriedAgent, results: Sequence[ToolResult]) -> NextStep:
    """Return a loop's next step after tool results.

    If a result is an error, the query continues, so that the model can correct the call.
    """
    if any(result.status is ToolStatus.ERROR for result in results):
        return RUN_AGAIN
    for result in results:
        if result.tool_name in agent.exit_on_success:
            return FinalAnswer(AssistantMessage(content=result.text), "exit_on_success")
    if not agent.agent_comment:
        text = "\n".join(result.text for result in results)
        return FinalAnswer(AssistantMessage(content=text), "tool_results")
    return RUN_AGAIN
