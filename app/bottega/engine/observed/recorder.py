"""A run's recorder that also writes the service's log and counts for its metrics."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import structlog

from bottega import metrics, trace_context
from bottega.agents.messages import ToolCall, ToolResult, ToolStatus
from bottega.agents.query import CurrentCall, Query
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import End, Journal
from bottega.engine.recorder import JournalRecorder
from bottega.mcp.tool import McpTool
from bottega.tools.http import HttpTool
from bottega.tools.people import AskUser, ClientTool
from bottega.trace_context import Trace

log = structlog.get_logger(__name__)

_TYPES: dict[type[ToolBase], str] = {
    SubAgentWrapper: "subagent",
    HttpTool: "http",
    McpTool: "mcp",
    ClientTool: "client",
    AskUser: "ask_user",
}


class ObservedRecorder(JournalRecorder):
    """The recorder of a run in this worker."""

    def __init__(self, journal: Journal, run: ClaimedRun, **options: Any) -> None:
        super().__init__(journal, run, **options)
        self._run = run

    def began(self) -> None:
        """Log that this attempt begins; its trace goes with what it sends."""
        trace_context.current.set(Trace.of(self._run.traceparent, self._run.tracestate))
        attempt = self.journal.attempt
        if attempt == 1:
            log.info("run.started")
        else:
            log.info("run.resumed", attempt=attempt)

    def ended(self, end: End) -> None:
        """Log and count the end of the run, which is stored."""
        metrics.runs.labels(end.status, self._run.mode).inc()
        if self.journal.episode_recorder is not None:
            metrics.episodes_stored.inc()
        say = log.info if end.error is None else log.warning
        say("run.ended", status=str(end.status), error=end.error)

    def closed(self) -> None:
        """Note that this attempt is over, whether its run has ended or not."""

    def query_started(self, query: Query) -> None:
        """Name the task in all log lines of the query."""
        if query.path:
            structlog.contextvars.bind_contextvars(**about(self._run, self.tasks.id_of(query)))
        super().query_started(query)

    async def _act(
        self,
        call: CurrentCall,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        outcome = "cancelled"
        try:
            result = await super()._act(call, tool_call, tool, execute)
            outcome = "error" if result.status is ToolStatus.ERROR else "ok"
            return result
        finally:
            metrics.tool_calls.labels(type_of(tool), outcome).inc()


def about(run: ClaimedRun, task_id: UUID | None = None) -> dict[str, str | None]:
    """Return the fields of all log lines of a run; a task of it has its id there instead."""
    trace_id = trace_context.trace_id(run.traceparent)
    return {
        "run_id": str(run.run_id),
        "tenant": run.tenant,
        "task_id": None if task_id is None else str(task_id),
        "trace_id": trace_id,
    }


def type_of(tool: ToolBase | None) -> str:
    """Return the name of a tool's type; ``unknown``: the model called one that does not exist."""
    if tool is None:
        return "unknown"
    return next((name for kind, name in _TYPES.items() if isinstance(tool, kind)), "builtin")
