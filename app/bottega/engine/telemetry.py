"""Telemetry for operators: log lines, metrics and spans of runs, and gauges of a worker's load.

Spans follow OpenTelemetry's GenAI conventions. Texts in spans are cut and have no secrets.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol
from uuid import UUID

from bottega import metrics, trace_context
from bottega.agents.hooks import AgentEvent
from bottega.agents.messages import (
    AssistantMessage,
    AssistantResponse,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
)
from bottega.agents.provider import FailedTry, ModelTarget
from bottega.agents.query import CurrentCall, Query
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase
from bottega.engine.async_tasks import SubagentRuntime
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import End, RunObserver, name_of
from bottega.engine.recorder import JournalRecorder
from bottega.errors import BottegaError
from bottega.events.types import RunStatus
from bottega.logger import Logger, bind_context
from bottega.mcp.client import McpTool
from bottega.subagents.handle import SubagentStatus
from bottega.subagents.telemetry import Totals
from bottega.tools.http import HttpTool
from bottega.tools.people import AskUser, ClientTool
from bottega.trace_context import Trace
from bottega.tracing import spans
from bottega.tracing.spans import Span, ids_of


class ModelBreakerCount(Protocol):
    """Object that counts the open circuit breakers of the models that a worker calls."""

    def open_breakers(self) -> int:
        """Return the number of circuit breakers of models that are not closed."""


_TASK_COUNTERS = {
    "subagent.dispatch.count": metrics.subagents_dispatched,
    "subagent.dispatch.rejected": metrics.subagents_rejected,
    "subagent.token.usage": metrics.subagent_tokens,
    "subagent.circuit_breaker.open": metrics.subagent_breakers_opened,
    "subagent.gc.collected": metrics.subagents_collected,
    **{
        f"subagent.status.{status}": metrics.subagents_ended.labels(status)
        for status in SubagentStatus
        if status.is_final
    },
}
_TASK_TIMES = {
    "subagent.completion.duration_ms": metrics.subagent_duration,
    "subagent.queue.wait_ms": metrics.subagent_queue_wait,
}


class MeasuredTotals(Totals):
    """Totals of tasks. Each change also updates the metrics."""

    def count(self, name: str, value: int = 1, **attributes: str) -> None:
        super().count(name, value, **attributes)
        counter = _TASK_COUNTERS[name]
        (counter.labels(**attributes) if attributes else counter).inc(value)

    def observe(self, name: str, value: float) -> None:
        super().observe(name, value)
        _TASK_TIMES[name].observe(value / 1000)


@asynccontextmanager
async def measured(runtime: SubagentRuntime, models: ModelBreakerCount) -> AsyncIterator[None]:
    """During the block, report the worker's tasks and open circuit breakers as metrics."""
    registry, scheduler = runtime.registry, runtime.registry.scheduler

    def refresh() -> None:
        states = {
            "running": scheduler.in_use,
            "parked": scheduler.parked,
            "queued": registry.queued_count,
        }
        for state, count in states.items():
            metrics.subagents.labels(state).set(count)
        metrics.subagent_queue_depth.set(registry.queued_count)
        metrics.subagents_active.set(registry.active_count)
        metrics.subagent_pool_size.set(scheduler.capacity)
        metrics.subagent_pool_utilization.set(scheduler.in_use / max(1, scheduler.capacity))
        of_tasks = sum(
            each["state"] != "closed" for _, each in scheduler.circuits.open(scheduler.now())
        )
        metrics.breakers_open.set(of_tasks + models.open_breakers())

    key = object()
    metrics.refreshers[key] = refresh
    try:
        yield
    finally:
        del metrics.refreshers[key]


logger = Logger(__name__)

_TYPES: dict[type[ToolBase], str] = {
    SubAgentWrapper: "subagent",
    HttpTool: "http",
    McpTool: "mcp",
    ClientTool: "client",
    AskUser: "ask_user",
}


class RunLog(RunObserver):
    """Observer that writes log lines and metrics of a run in this worker."""

    def __init__(self, recorder: JournalRecorder, run: ClaimedRun) -> None:
        self._recorder = recorder
        self._run = run

    def began(self) -> None:
        """Log the beginning of the attempt. Set the trace context of the attempt's requests."""
        trace_context.current.set(Trace.of(self._run.traceparent, self._run.tracestate))
        attempt = self._run.attempt
        if attempt == 1:
            logger.info("run.started")
        else:
            logger.info("run.resumed", attempt=attempt)

    def ended(self, end: End) -> None:
        metrics.runs.labels(end.status, self._run.mode).inc()
        if (episode := self._recorder.journal.episode) is not None:
            metrics.episodes_stored.inc()
            if episode.recorder.decided:
                metrics.verdicts.labels("approval").inc()
        say = logger.info if end.error is None else logger.warning
        say("run.ended", status=str(end.status), error=end.error)

    def query_started(self, query: Query) -> None:
        """Add the task's id to all later log lines of the query."""
        if query.path:
            task_id = self._recorder.tasks.id_of(query)
            bind_context(**about(self._run, task_id))

    def tool_call_ended(
        self, call: CurrentCall, tool: ToolBase | None, outcome: ToolResult | BaseException
    ) -> None:
        ended = "cancelled"
        if isinstance(outcome, ToolResult):
            ended = "error" if outcome.status is ToolStatus.ERROR else "ok"
        metrics.tool_calls.labels(type_of(tool), ended).inc()


def about(run: ClaimedRun, task_id: UUID | None = None) -> dict[str, str | None]:
    """Return the fields that all log lines of a run or of a task have."""
    trace_id = trace_context.trace_id(run.traceparent)
    return {
        "run_id": str(run.run_id),
        "tenant": run.tenant,
        "task_id": None if task_id is None else str(task_id),
        "trace_id": trace_id,
    }


def type_of(tool: ToolBase | None) -> str:
    """Return the name of a tool's type; ``unknown`` for a call of a tool that does not exist."""
    if tool is None:
        return "unknown"
    return next((name for kind, name in _TYPES.items() if isinstance(tool, kind)), "builtin")


MOST_MESSAGES = 50
"""Maximum number of a prompt's messages in a span. The newest messages are used."""
LONGEST = 8192
"""Maximum number of characters of a text in a span."""

Clean = Callable[[str], str]


def prompt(sent: Sequence[StandardMessage], clean: Clean) -> dict[str, str]:
    rules = [each for each in sent if isinstance(each, SystemMessage) and not each.is_context]
    history = [each for each in sent if each not in rules]
    attributes = {spans.INPUT: messages(history[-MOST_MESSAGES:], clean)}
    if rules:
        parts = [_text(each.content, clean) for each in rules]
        attributes[spans.INSTRUCTIONS] = json.dumps(parts, ensure_ascii=False)
    return attributes


def messages(history: Sequence[StandardMessage], clean: Clean) -> str:
    parts = [{"role": each.role, "parts": _parts(each, clean)} for each in history[-MOST_MESSAGES:]]
    return json.dumps(parts, ensure_ascii=False)


def answer(content: str, clean: Clean) -> str:
    parts = [{"role": "assistant", "parts": [_text(content, clean)]}]
    return json.dumps(parts, ensure_ascii=False)


def value(found: Any, clean: Clean) -> str:
    """Return a text or any other value (as JSON), without secrets and cut to a limited length."""
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    return clean(text)[:LONGEST]


def _parts(message: StandardMessage, clean: Clean) -> list[dict[str, Any]]:
    if isinstance(message, ToolMessage) and message.tool_results:
        return [
            {
                "type": "tool_call_response",
                "id": each.tool_call_id,
                "response": value(each.text, clean),
            }
            for each in message.tool_results
        ]
    parts: list[dict[str, Any]] = [_text(message.content, clean)] if message.content else []
    if isinstance(message, AssistantMessage):
        for call in message.tool_calls:
            arguments = value(call.arguments, clean)
            about = {"type": "tool_call", "id": call.id, "name": call.name}
            parts.append({**about, "arguments": arguments})
    return parts


def _text(content: str, clean: Clean) -> dict[str, Any]:
    return {"type": "text", "content": clean(content)[:LONGEST]}


def observe(recorder: JournalRecorder, run: ClaimedRun) -> None:
    """Add observers that log and count an attempt, and make spans if spans are exported."""
    recorder.journal.observers.append(RunLog(recorder, run))
    if spans.tracer is not None:
        recorder.journal.observers.append(RunSpans(recorder, run))


class RunSpans(RunObserver):
    """Observer that makes spans of an attempt, its agents, model calls and tool calls.

    Replayed work gets no spans, because an earlier attempt has made these spans.
    """

    def __init__(self, recorder: JournalRecorder, run: ClaimedRun) -> None:
        self._recorder = recorder
        self._run = run
        self._attempt: Span | None = None
        self._agents: dict[Query, Span] = {}
        self._model_calls: dict[Query, Span] = {}
        self._tool_calls: dict[CurrentCall, Span] = {}

    def began(self) -> None:
        run, attempt = self._run, self._run.attempt
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
        if self._attempt is not None:
            self._attempt.set({spans.RUN_STATUS: str(end.status)})
            failed = end.status is not RunStatus.COMPLETED
            code = str(end.status) if end.error is None else end.error["code"]
            self._attempt.end(code if failed else None)

    def closed(self) -> None:
        for span in (*self._model_calls.values(), *self._agents.values(), self._attempt):
            if span is not None:
                span.end()

    def query_started(self, query: Query) -> None:
        if self._recorder.is_replayed(query, AgentEvent.QUERY_END, None):
            return
        agent = name_of(query.agent)
        about = {spans.OPERATION: "invoke_agent", spans.AGENT: agent}
        if (task := self._recorder.tasks.id_of(query)) is not None:
            about[spans.TASK] = str(task)
        span = spans.begin(f"invoke_agent {agent}", spans.INTERNAL, about)
        if span is not None:
            self._agents[query] = span
            if span.takes_texts:
                span.set({spans.INPUT: messages(query.messages, self._clean)})

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        if (span := self._agents.pop(query, None)) is not None:
            if span.takes_texts and response.content:
                span.set({spans.OUTPUT: answer(response.content, self._clean)})
            span.end(None if response.error is None else response.error_code or "agent_failed")

    def query_escaped(self, query: Query, error: BaseException) -> None:
        if (span := self._agents.pop(query, None)) is not None:
            span.end(_code_of(error))

    def model_call_began(self, query: Query, target: ModelTarget | None, started: int) -> None:
        about = {spans.OPERATION: "chat", spans.AGENT: name_of(query.agent), **_served(target)}
        title = "chat" if target is None else f"chat {target.model}"
        if (span := spans.begin(title, spans.CLIENT, about)) is not None:
            self._model_calls[query] = span
            if span.takes_texts:
                span.set(prompt(query.agent.conversation_history, self._clean))

    def model_try_began(self, query: Query, target: ModelTarget) -> None:
        if (span := self._model_calls.get(query)) is not None:
            span.set(_served(target))

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        if (span := self._model_calls.get(query)) is not None:
            span.event(spans.FAILED_TRY, {spans.ERROR: failed.error.code, "try": failed.number})

    def model_call_ended(self, query: Query, outcome: AssistantMessage | BaseException) -> None:
        if (span := self._model_calls.pop(query, None)) is None:
            return
        if isinstance(outcome, BaseException):
            span.end(_code_of(outcome))
            return
        span.set(_answered(outcome))
        if span.takes_texts:
            span.set({spans.OUTPUT: messages([outcome], self._clean)})
        span.end()

    def tool_call_began(self, call: CurrentCall, made: ToolCall, tool: ToolBase | None) -> None:
        if self._recorder.known_call(call.query, made).ended is not None:
            return
        kind = type_of(tool)
        about = {
            spans.OPERATION: "execute_tool",
            spans.AGENT: name_of(call.query.agent),
            spans.TOOL: made.name,
            spans.TOOL_CALL: made.id,
            spans.TOOL_TYPE: "function" if kind == "client" else "extension",
            spans.TOOL_KIND: kind,
        }
        if (span := spans.begin(f"execute_tool {made.name}", spans.CLIENT, about)) is not None:
            self._tool_calls[call] = span
            if span.takes_texts:
                span.set({spans.ARGUMENTS: value(made.arguments, self._clean)})

    def tool_call_ended(
        self, call: CurrentCall, tool: ToolBase | None, outcome: ToolResult | BaseException
    ) -> None:
        if (span := self._tool_calls.pop(call, None)) is None:
            return
        if isinstance(outcome, BaseException):
            span.end(_code_of(outcome))
            return
        if span.takes_texts:
            span.set({spans.RESULT: value(outcome.text, self._clean)})
        span.end("tool_error" if outcome.status is ToolStatus.ERROR else None)

    def _clean(self, text: str) -> str:
        return self._recorder.journal.known.text(text)


def _served(target: ModelTarget | None) -> dict[str, str]:
    return {} if target is None else {spans.PROVIDER: target.provider, spans.MODEL: target.model}


def _answered(message: AssistantMessage) -> spans.Attributes:
    usage = message.usage
    attributes: dict[str, spans.AttributeValue] = {
        spans.INPUT_TOKENS: usage.input,
        spans.OUTPUT_TOKENS: usage.output,
    }
    if usage.cached:
        attributes[spans.CACHED_TOKENS] = usage.cached
    if usage.reasoning:
        attributes[spans.REASONING_TOKENS] = usage.reasoning
    if reason := message.metadata.get("finish_reason"):
        attributes[spans.FINISH_REASONS] = (str(reason),)
    if model := message.metadata.get("model"):
        attributes[spans.ANSWERED_BY] = model
    return attributes


def _code_of(error: BaseException) -> str:
    """Return ``error.type``: a code or class name, but no text, which could contain any data."""
    if isinstance(error, BottegaError):
        return error.code
    return type(error).__name__ if isinstance(error, Exception) else spans.CANCELLED
