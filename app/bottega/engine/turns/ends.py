"""Ends of runs."""

from uuid import UUID

import structlog

from bottega.agents.messages import AgentUsage, AssistantResponse
from bottega.engine.journal import End
from bottega.errors import BottegaError
from bottega.events.types import RunStatus

logger = structlog.get_logger(__name__)


def end_of(response: AssistantResponse, answer_seq: int | None) -> End:
    """Return the end of a run from the root's response. Pure."""
    if not response.is_answer:
        failure = response.error or ""
        error = {"code": response.error_code or "agent_failed", "message": failure}
        return End(
            RunStatus.FAILED,
            output=response.content or None,
            error=error,
            stop_reason=response.stop_reason,
            usage=response.usage,
        )
    return End(
        RunStatus.COMPLETED,
        output=response.content,
        output_json=response.output_json,
        stop_reason=response.stop_reason,
        usage=response.usage,
        answer_seq=answer_seq,
    )


def broken(
    error: Exception, run_id: UUID, usage: AgentUsage, *, timeout_s: float | None = None
) -> End:
    """Return the end of a run that raised an error.

    Args:
        timeout_s: the time that it had, if that is over.
    """
    if timeout_s is not None and isinstance(error, TimeoutError):
        detail = f"the run took longer than its timeout_s of {timeout_s:g} s"
        return End(RunStatus.TIMEOUT, error={"code": "timeout", "message": detail}, usage=usage)
    if isinstance(error, BottegaError):
        failure = {"code": error.code, "message": error.detail}
        return End(RunStatus.FAILED, error=failure, usage=usage)
    logger.error("run.broken", run_id=str(run_id), exc_info=error)
    detail = "an internal error ended the run; the worker's log says more"
    return End(RunStatus.FAILED, error={"code": "internal", "message": detail}, usage=usage)
