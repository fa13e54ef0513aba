"""Outcomes: the worth of runs, and who says so. Pure."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from bottega.events.types import RunStatus

OutcomeValue = Literal["UNKNOWN", "SUCCESS", "PARTIAL", "FAILURE", "CANCELLED"]
OutcomeSource = Literal["feedback", "eval", "check"]

_BY_STATUS: Mapping[str, OutcomeValue] = {
    RunStatus.FAILED: "FAILURE",
    RunStatus.TIMEOUT: "FAILURE",
    RunStatus.CANCELLED: "CANCELLED",
}


class RunOutcome(NamedTuple):
    """The outcome of a run; ``source`` is ``None`` if nobody judged it."""

    value: OutcomeValue
    source: OutcomeSource | None = None


def outcome_of(status: str, feedback: OutcomeValue | None, passed: bool | None) -> RunOutcome:
    """Return a run's outcome: feedback counts first, then its agent's checks.

    A completed run that nobody judged is ``UNKNOWN``.

    Args:
        passed: whether all checks passed; ``None``: there are none, or they are not decided.
    """
    if feedback is not None:
        return RunOutcome(feedback, "feedback")
    if passed is not None:
        return RunOutcome("SUCCESS" if passed else "FAILURE", "check")
    return RunOutcome(_BY_STATUS.get(status, "UNKNOWN"))


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``outcome`` and ``success_check`` of a run's row, as the API shows them.

    Args:
        row: with ``feedback_outcome`` and the columns of ``run_checks`` after ``check_``; both are
            missing in the row of a run that was just accepted.
    """
    outcome = outcome_of(row["status"], row.get("feedback_outcome"), row.get("check_passed"))
    check = None
    if row.get("check_status") is not None:
        check = {name: row[f"check_{name}"] for name in OF_CHECK}
    return {"outcome": outcome._asdict(), "success_check": check}


OF_CHECK = ("status", "passed", "results", "reason", "error", "tries", "updated_at")
