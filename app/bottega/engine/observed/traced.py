"""A run's recorder that also makes its spans."""

from collections.abc import Awaitable, Callable
from typing import Any

from bottega.agents.hooks import AgentEvent
from bottega.agents.messages import (
    AssistantMessage,
    AssistantResponse,
    ToolCall,
    ToolResult,
    ToolStatus,
)
from bottega.agents.provider import FailedTry, ModelTarget
from bottega.agents.query import CurrentCall, Query
from bottega.agents.tools import ToolBase
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import End, Journal
from bottega.engine.observed import texts
from bottega.engine.observed.recorder import ObservedRecorder, type_of
from bottega.engine.task_rows import name_of
from bottega.errors import BottegaError
from bottega.events.types import RunStatus
from bottega.tracing import spans
from bottega.tracing.spans import Span, ids_of


def recorder_of(journal: Journal, run: ClaimedRun, **options: Any) -> ObservedRecorder:
    """Return the recorder of an attempt; it makes spans only while they are sent."""
    kind = ObservedRecorder if spans.tracer is None else TracedRecorder
    return kind(journal, run, **options)


class TracedRecorder(ObservedRecorder):
    """The recorder of a run with spans: of the attempt, its agents, model calls and tools.

    What an earlier attempt recorded has its spans there, and gets none here.
    """

    def __init__(self, journal: Journal, run: ClaimedRun, **options: Any) -> None:
        super().__init__(journal, run, **options)
        self._attempt: Span | None = None
        self._agents: dict[Query, Span] = {}
        self._model_calls: dict[Query, Span] = {}

    def began(self) -> None:
        super().began()
        run, attempt = self._run, self.journal.attempt
        name = run.agent if run.graph_name is None else run.graph_name
        about: dict[str, str | int] = {
            spans.OPERATION: "invoke_workflow",
            spans.RUN: str(run.run_id),
            spans.TENANT: run.tenant,
            spans.ATTEMPT: attempt,
        }
        if name is not None:
            about[spans.AGENT] = name
        if run.session_id is not None:
            about[spans.CONVERSATION] = run.session_id
        ids = ids_of(run.run_id, attempt, run.traceparent)
        link = None if attempt == 1 else ids_of(run.run_id, attempt - 1, run.traceparent)
        title = f"invoke_workflow {name}" if name else "invoke_workflow"
        self._attempt = spans.begin(title, spans.CONSUMER, about, ids=ids, link=link)

    def ended(self, end: End) -> None:
        super().ended(end)
        if self._attempt is not None:
            self._attempt.set({spans.RUN_STATUS: str(end.status)})
            failed = end.status is not RunStatus.COMPLETED
            self._attempt.end((end.error or {}).get("code", str(end.status)) if failed else None)

    def closed(self) -> None:
        super().closed()
        for span in (*self._model_calls.values(), *self._agents.values(), self._attempt):
            if span is not None:
                span.end()

    def query_started(self, query: Query) -> None:
        super().query_started(query)
        if self.is_replayed(query, AgentEvent.QUERY_END, None):
            return
        agent = name_of(query.agent)
        about = {spans.OPERATION: "invoke_agent", spans.AGENT: agent}
        if (task := self.tasks.id_of(query)) is not None:
            about[spans.TASK] = str(task)
        span = spans.begin(f"invoke_agent {agent}", spans.INTERNAL, about)
        if span is not None:
            self._agents[query] = span
            if span.takes_texts:
                span.set({spans.INPUT: texts.messages(query.messages, self._clean)})

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        super().query_ended(query, response)
        if (span := self._agents.pop(query, None)) is not None:
            if span.takes_texts and response.content:
                span.set({spans.OUTPUT: texts.answer(response.content, self._clean)})
            span.end(None if response.error is None else response.error_code or "agent_failed")

    def query_escaped(self, query: Query, error: BaseException) -> None:
        super().query_escaped(query, error)
        if (span := self._agents.pop(query, None)) is not None:
            span.end(_code_of(error))

    async def _ask(
        self, query: Query, invoke: Callable[[], Awaitable[AssistantMessage]]
    ) -> AssistantMessage:
        target = getattr(query.agent.provider, "target", None)
        about = {spans.OPERATION: "chat", spans.AGENT: name_of(query.agent), **_served(target)}
        title = "chat" if target is None else f"chat {target.model}"
        span = spans.begin(title, spans.CLIENT, about)
        if span is None:
            return await super()._ask(query, invoke)
        self._model_calls[query] = span
        if span.takes_texts:
            sent = query.agent.conversation_history
            span.set(texts.prompt(sent, self._clean))
        error: str | None = spans.CANCELLED
        try:
            message = await super()._ask(query, invoke)
            error = None
        except BaseException as failure:
            error = _code_of(failure)
            raise
        else:
            span.set(_answered(message))
            if span.takes_texts:
                span.set({spans.OUTPUT: texts.messages([message], self._clean)})
            return message
        finally:
            del self._model_calls[query]
            span.end(error)

    def model_try_began(self, query: Query, target: ModelTarget) -> None:
        super().model_try_began(query, target)
        if (span := self._model_calls.get(query)) is not None:
            span.set(_served(target))

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        super().model_try_failed(query, failed)
        if (span := self._model_calls.get(query)) is not None:
            span.event(spans.FAILED_TRY, {spans.ERROR: failed.error.code, "try": failed.number})

    async def _act(
        self,
        call: CurrentCall,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        key = (self.tasks.id_of(call.query), call.query.model_calls, tool_call.id)
        kind = type_of(tool)
        about = {
            spans.OPERATION: "execute_tool",
            spans.AGENT: name_of(call.query.agent),
            spans.TOOL: tool_call.name,
            spans.TOOL_CALL: tool_call.id,
            spans.TOOL_TYPE: "function" if kind == "client" else "extension",
            spans.TOOL_KIND: kind,
        }
        span = None
        if key not in self.journal.replay.ended:
            span = spans.begin(f"execute_tool {tool_call.name}", spans.CLIENT, about)
        if span is None:
            return await super()._act(call, tool_call, tool, execute)
        if span.takes_texts:
            span.set({spans.ARGUMENTS: texts.value(tool_call.arguments, self._clean)})
        error: str | None = spans.CANCELLED
        try:
            result = await super()._act(call, tool_call, tool, execute)
            error = "tool_error" if result.status is ToolStatus.ERROR else None
            if span.takes_texts:
                span.set({spans.RESULT: texts.value(result.text, self._clean)})
            return result
        except BaseException as failure:
            error = _code_of(failure)
            raise
        finally:
            span.end(error)

    def _clean(self, text: str) -> str:
        return self.journal.known.text(text)


def _served(target: ModelTarget | None) -> dict[str, str]:
    return {} if target is None else {spans.PROVIDER: target.provider, spans.MODEL: target.model}


def _answered(message: AssistantMessage) -> spans.Attributes:
    usage = message.usage
    found: dict[str, spans.AttributeValue] = {
        spans.INPUT_TOKENS: usage.input,
        spans.OUTPUT_TOKENS: usage.output,
    }
    if usage.cached:
        found[spans.CACHED_TOKENS] = usage.cached
    if usage.reasoning:
        found[spans.REASONING_TOKENS] = usage.reasoning
    if reason := message.metadata.get("finish_reason"):
        found[spans.FINISH_REASONS] = (str(reason),)
    if model := message.metadata.get("model"):
        found[spans.ANSWERED_BY] = model
    return found


def _code_of(error: BaseException) -> str:
    """Return ``error.type``: a code, or the class; never the text, which may quote anything."""
    if isinstance(error, BottegaError):
        return error.code
    return type(error).__name__ if isinstance(error, Exception) else spans.CANCELLED
