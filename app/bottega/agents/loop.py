"""The loop that answers one query: model calls and tool calls, until there is a final answer."""

import asyncio
import logging
from collections.abc import Sequence
from functools import cached_property

from bottega.agents.hooks import AgentEvent, HookDecision, HookOutcome
from bottega.agents.messages import (
    AssistantMessage,
    AssistantResponse,
    HumanMessage,
    StandardMessage,
    check_history,
    with_distinct_ids,
    without_calls,
)
from bottega.agents.output import OUTPUT_INVALID, Objection, OutputCheck, unmet
from bottega.agents.provider import LLMProvider, Permit, ToolSchema
from bottega.agents.query import (
    RUN_AGAIN,
    Ending,
    FinalAnswer,
    NextStep,
    PendingAnswer,
    Query,
    QueryFailed,
    RunAgain,
    delta_listener,
    ending_of,
    fire,
    options_of,
    stop_reason_of,
)
from bottega.agents.shared_memory import inject_shared_memory, publish_answer
from bottega.agents.tool_calls import after_tools, answer_calls
from bottega.agents.tools import ToolBase
from bottega.errors import BottegaError, ModelError, is_internal


def sent_to(query: Query, *, answered: bool) -> tuple[list[StandardMessage], list[StandardMessage]]:
    """Return two lists: the users' new messages; the same messages plus those of the parent agent.

    Args:
        answered: true if the query has an answer that becomes final unless a new message arrives.
    """
    inbox, task = query.recorder.inbox, query.task
    of_users = [] if inbox is None else list(inbox.due(query, answered=answered))
    texts = () if task is None else task.messages(query, answered=answered)
    return of_users, [*of_users, *(HumanMessage(content=text) for text in texts)]


logger = logging.getLogger(__name__)

FINAL_ANSWER = "final_answer"
HOOK_STOP = "hook_stop"
PROVIDER_FAILED = "provider_failed"
MAX_ITERATIONS = "max_iterations"
_NOT_FROM_TOOLS = (FINAL_ANSWER, HOOK_STOP, Ending.LENGTH)
"""Stop reasons of answers that are no copies of tool results."""


class QueryLoop:
    """The loop that answers one query.

    Args:
        query: a new query; its messages are not in the history yet.
    """

    def __init__(self, query: Query, provider: LLMProvider) -> None:
        self.query = query
        self.agent = query.agent
        self.provider = provider
        self._before = tuple(self.agent.conversation_history)
        self._withheld: list[StandardMessage] = []
        self._pending = PendingAnswer()
        self._counts_from, self._last_text = 0, ""
        self._checked_history: list[StandardMessage] = []
        self._tools: list[ToolBase] = []
        self._toolbox: dict[str, ToolBase] = {}
        self._schemas: tuple[ToolSchema, ...] = ()
        self._messages: Sequence[StandardMessage] = ()

    @cached_property
    def _output(self) -> OutputCheck:
        return OutputCheck(self.agent.output)

    async def run(self) -> AssistantResponse:
        """Run the query.

        Raises:
            HookContractError, HistoryError: a hook or other code around the agent has a bug.
            asyncio.CancelledError: the query was cancelled; the hooks of QUERY_END have run.
            Exception: any error of the recorder.
        """
        query = self.query
        self.agent.conversation_history.extend(query.messages)
        try:
            try:
                query.recorder.query_started(query)
                response = await self._closed(await self._response())
            except BaseException as error:
                if query.scope is not None:
                    await query.scope.close(error)
                self.agent.usage += query.usage
                await self._abandoned(error)
                raise
            self.agent.usage += query.usage
            response = await self._ended(response)
            query.recorder.query_ended(query, response)
        except BaseException as error:
            query.recorder.query_escaped(query, error)
            raise
        return response

    async def _closed(self, response: AssistantResponse) -> AssistantResponse:
        """Stop the work that the query started; add the usage of this work to the response."""
        if self.query.scope is None:
            return response
        await self.query.scope.close()
        return response.model_copy(update={"usage": self.query.usage})

    async def _response(self) -> AssistantResponse:
        try:
            return await self._iterate()
        except QueryFailed as failure:
            return self._failed(failure)

    async def _ended(self, response: AssistantResponse) -> AssistantResponse:
        if AgentEvent.QUERY_END not in self.agent.hooks:
            return response
        try:
            outcome = await fire(self.query, AgentEvent.QUERY_END, response, error=response.error)
        except QueryFailed as failure:
            return self._failed(failure)
        ended: AssistantResponse = outcome.value
        return ended

    async def _abandoned(self, error: BaseException) -> None:
        """Run the hooks of QUERY_END for a query without a response; log the hooks' errors."""
        cancelled = isinstance(error, asyncio.CancelledError)
        text = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
        try:
            await fire(self.query, AgentEvent.QUERY_END, error=text)
        except Exception:
            logger.exception("a hook on query_end failed; the query had failed before: %s", text)

    async def _iterate(self) -> AssistantResponse:
        step = await self._begin()
        while True:
            if isinstance(step, FinalAnswer):
                if not self._take_late_messages(step):
                    return await self._finish(step)
            elif not self._take_messages() and self._is_last:
                return await self._exhausted()
            self.query.iteration += 1
            step = await self._step()

    @property
    def _is_last(self) -> bool:
        """True in the last allowed iteration; a user's message restarts the count of iterations."""
        return self.query.iteration - self._counts_from >= self.agent.max_iterations

    def _take_messages(self, *before: StandardMessage, answered: bool = False) -> bool:
        """Add ``before`` and the new messages to the history; return false if it added none."""
        query = self.query
        if self._pending.kept:
            return False
        of_users, messages = sent_to(query, answered=answered)
        if not messages:
            return False
        self._counts_from = query.iteration if of_users else self._counts_from + 1
        query.messages += tuple(messages)
        self.agent.conversation_history += [*before, *messages]
        return True

    def _take_late_messages(self, answer: FinalAnswer) -> bool:
        """Take messages that arrived before the answer is final; return true if there are any."""
        self._pending = PendingAnswer()  # a hook may have ended the query during a continuation
        before = [without_calls(answer.message)] if answer.reason in _NOT_FROM_TOOLS else []
        return self._take_messages(*before, *answer.deferred, answered=True)

    async def _begin(self) -> NextStep:
        await self.query.recorder.add_recalled(self.query)
        if AgentEvent.QUERY_START in self.agent.hooks:
            outcome = await fire(self.query, AgentEvent.QUERY_START)
            if outcome.decision is HookDecision.STOP:
                return FinalAnswer(outcome.value, HOOK_STOP)
        return RUN_AGAIN

    async def _step(self) -> NextStep:
        query, agent = self.query, self.agent
        if agent.memory_graph is not None and not query.memory_pulled:
            inject_shared_memory(query)
            if agent.recall is not None and (recalled := await agent.recall.inject(query)):
                query.recorder.recalled(query, recalled)
        if AgentEvent.BEFORE_LLM_CALL in agent.hooks:
            outcome = await fire(query, AgentEvent.BEFORE_LLM_CALL)
            if outcome.decision is HookDecision.STOP:
                return FinalAnswer(outcome.value, HOOK_STOP)
        message = await self._next_message()
        deferred: list[StandardMessage] = []
        if AgentEvent.AFTER_LLM_CALL in agent.hooks:
            outcome = await self._reviewed(AgentEvent.AFTER_LLM_CALL, message, deferred)
            message = with_distinct_ids(outcome.value)
            if outcome.decision is HookDecision.RETRY:
                return self._send_back(message, deferred)
            if outcome.decision is HookDecision.STOP:
                return FinalAnswer(message, HOOK_STOP, deferred)
        if (cut := ending_of(message)) is not None:
            return await self._unfinished(message, cut, deferred)
        if not message.tool_calls:
            return await self._settle(FinalAnswer(self._whole(message), FINAL_ANSWER, deferred))
        self._pending = PendingAnswer()
        if message.content:
            self._last_text = message.content
        results = await answer_calls(query, message, self._toolbox, deferred)
        step = after_tools(agent, results)
        return step if isinstance(step, RunAgain) else await self._settle(step)

    async def _reviewed(
        self, event: AgentEvent, message: AssistantMessage, deferred: list[StandardMessage]
    ) -> HookOutcome:
        try:
            return await fire(
                self.query, event, message, assistant_message=message, deferred=deferred
            )
        except QueryFailed:
            self.agent.conversation_history += deferred
            raise

    async def _next_message(self) -> AssistantMessage:
        """Compose the prompt, get the model's next message and count the message's usage.

        The recorder replays a recorded answer, or calls :meth:`_invoke`.

        Raises:
            QueryFailed: the model or its provider failed.
            HistoryError: a model's API would refuse the history.
        """
        query, agent = self.query, self.agent
        self._check_history()
        self._take_tools()
        self._messages = agent.conversation_history
        if agent.memory is not None:
            self._messages = agent.memory.compose(query, self._schemas)
            self._take_tools()  # compose() may add a tool
        query.model_calls += 1
        try:
            message = await query.recorder.model_call(query, self._invoke)
        except ModelError as error:
            reason = stop_reason_of(error.code)
            raise QueryFailed(error.detail, error.code, reason) from error
        query.usage = query.usage.plus(message.usage, model_calls=1)
        if query.task is not None:
            query.task.spent(message.usage)
        await query.recorder.wait_turn(query)
        return with_distinct_ids(message)

    def _take_tools(self) -> None:
        """Refresh the query's tools. A tool of the agent hides a memory tool of the same name."""
        memory = self.agent.memory
        if memory is None or not memory.tools:
            tools = self.agent.registered_tools
        else:
            names = {tool.name for tool in self.agent.registered_tools}
            more = [tool for tool in memory.tools if tool.name not in names]
            tools = [*self.agent.registered_tools, *more]
        if tools != self._tools:
            self._tools = list(tools)
            self._toolbox = {tool.name: tool for tool in self._tools}
            self._schemas = tuple(tool.schema for tool in self._tools)

    def _check_history(self) -> None:
        history, checked = self.agent.conversation_history, self._checked_history
        check_history(history, len(checked) if history[: len(checked)] == checked else 0)
        self._checked_history = list(history)

    async def _invoke(self, permit: Permit | None) -> AssistantMessage:
        """Call the provider with the current prompt; convert its errors to ``ModelError``.

        Raises:
            ModelError: the provider failed.
            BottegaError: an internal error.
        """
        params = self.agent.params
        if params is not None and not self._keeps_tool_choice():
            params = params.without_tool_choice()
        options = options_of(self.query, params, permit)
        on_delta = delta_listener(self.query)
        try:
            message: object = await self.provider.invoke(
                self._messages, self._schemas, options=options, on_delta=on_delta
            )
        except Exception as error:
            if isinstance(error, ModelError) or is_internal(error):
                raise
            code = error.code if isinstance(error, BottegaError) else PROVIDER_FAILED
            raise ModelError(f"{type(error).__name__}: {error}", code=code) from error
        if not isinstance(message, AssistantMessage):
            text = f"the provider returned {type(message).__name__}, not an AssistantMessage"
            raise ModelError(text, code=PROVIDER_FAILED)
        return message

    def _keeps_tool_choice(self) -> bool:
        """Return true if this call has tools and ``tool_choice`` applies to the call."""
        is_first = self.query.model_calls == self.query.earlier_calls + 1
        return bool(self._schemas) and (is_first or self.agent.tool_choice_scope == "all")

    async def _settle(self, answer: FinalAnswer) -> NextStep:
        message, reason, deferred = answer.message, answer.reason, list(answer.deferred)
        if (objection := await self._objection(message.content)) is not None:
            if reason in _NOT_FROM_TOOLS:
                self._send_back(message, deferred)
            return self._object(objection, message)
        if AgentEvent.BEFORE_FINAL_RESPONSE in self.agent.hooks:
            outcome = await self._reviewed(AgentEvent.BEFORE_FINAL_RESPONSE, message, deferred)
            message = outcome.value
            if outcome.decision is HookDecision.RETRY:
                return self._send_back(message, deferred)
            if outcome.decision is HookDecision.STOP:
                reason = HOOK_STOP
        return FinalAnswer(message, reason, deferred)

    async def _objection(self, text: str) -> Objection | None:
        query, agent = self.query, self.agent
        if agent.tool_policy and (missing := unmet(agent.tool_policy, query.tool_results)):
            return Objection("tool_policy", missing, missing, is_final=self._is_last)
        found = await self._output.objection(text)
        return found and found._replace(is_final=found.is_final or self._is_last)

    def _object(self, objection: Objection, message: AssistantMessage) -> RunAgain:
        code, error, answer, is_final = objection
        self.query.recorder.answer_rejected(self.query, code, error)
        if is_final and code == OUTPUT_INVALID:
            raise QueryFailed(error, code, code, message.content)
        if is_final:
            raise QueryFailed(error, code)
        self.agent.conversation_history.append(HumanMessage(content=answer, metadata={code: True}))
        return RUN_AGAIN

    async def _unfinished(
        self, message: AssistantMessage, ending: Ending, deferred: list[StandardMessage]
    ) -> NextStep:
        history, on_length = self.agent.conversation_history, self.agent.on_length
        if ending is Ending.LENGTH and self._pending.repeats(message):
            return await self._settle(FinalAnswer(self._whole(message), FINAL_ANSWER, deferred))
        if self._output.schema is not None:  # the model cannot continue a cut-off JSON value
            accepts = on_length == "accept" and await self._output.accepts(message.content)
            on_length = "accept" if accepts else "fail"
        if ending is Ending.LENGTH and on_length == "accept" and message.content.strip():
            if not message.tool_calls:
                return await self._settle(FinalAnswer(self._whole(message), str(ending), deferred))
        elif not self._is_last and (more := self._pending.nudge(message, ending, on_length)):
            history += [*more[:-1], *deferred, more[-1]]
            return RUN_AGAIN
        history += [without_calls(message), *deferred]
        content = message.content
        if ending is not Ending.REFUSAL:
            content = self._pending.joined(message).content
        raise QueryFailed(ending.text, ending.code, str(ending), content)

    def _whole(self, message: AssistantMessage) -> AssistantMessage:
        """Join an answer's parts; remove the parts, and requests to continue, from the history."""
        pending, self._pending = self._pending, PendingAnswer()
        if pending.kept:
            kept = set(map(id, pending.kept))
            history = self.agent.conversation_history
            history[:] = [each for each in history if id(each) not in kept]
        return pending.joined(message)

    def _send_back(
        self, rejected: AssistantMessage, deferred: Sequence[StandardMessage]
    ) -> RunAgain:
        rejected = without_calls(rejected)
        self._withheld.append(rejected)
        self.agent.conversation_history += [rejected, *deferred]
        return RUN_AGAIN

    async def _finish(self, answer: FinalAnswer) -> AssistantResponse:
        message, reason, deferred = answer
        if (objection := await self._output.objection(message.content)) is not None:
            raise QueryFailed(objection.error, OUTPUT_INVALID, OUTPUT_INVALID, message.content)
        message = self._output.json_in(without_calls(message))
        history = self.agent.conversation_history
        if reason in _NOT_FROM_TOOLS:
            history.append(message)
        history += deferred
        if self.agent.memory_graph is not None:
            self._withheld.append(message)
            await publish_answer(
                self.query, message.content, before=self._before, withheld=self._withheld
            )
        return AssistantResponse(
            content=message.content,
            output_json=self._output.value,
            tool_results=self.query.tool_results,
            usage=self.query.usage,
            stop_reason=reason,
        )

    async def _exhausted(self) -> AssistantResponse:
        if AgentEvent.ON_MAX_ITERATIONS in self.agent.hooks:
            outcome = await fire(self.query, AgentEvent.ON_MAX_ITERATIONS)
            if outcome.decision is HookDecision.STOP:
                return await self._finish(FinalAnswer(outcome.value, HOOK_STOP))
        text = f"no final answer within {self.agent.max_iterations} iteration(s)"
        if self._last_text and not await self._output.accepts(self._last_text):
            text += ", and the text so far does not fit the schema of the answer"
            return self._failed(QueryFailed(text, OUTPUT_INVALID, OUTPUT_INVALID, self._last_text))
        return self._failed(QueryFailed(text, MAX_ITERATIONS, MAX_ITERATIONS, self._last_text))

    def _failed(self, failure: QueryFailed) -> AssistantResponse:
        return AssistantResponse(
            content=failure.content,
            tool_results=self.query.tool_results,
            error=failure.text,
            error_code=failure.code,
            usage=self.query.usage,
            stop_reason=failure.reason,
            output_json=self._output.value if failure.reason == MAX_ITERATIONS else None,
        )
