"""Results of learning from a run, and feedback on it, for the API.

Outcomes: the worth of runs, and who says so. Pure.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.events.types import RunStatus
from bottega.memory.episodes.episode import Outcome
from bottega.memory.learning.insights import INSIGHT
from bottega.memory.patterns.adherence import SOURCE

_MOST = 200  # candidates, and applications
_JUDGED = (Outcome.SUCCESS, Outcome.PARTIAL, Outcome.FAILURE)

_LEARNING = text("""
SELECT l.episode_id, e.at, e.metadata -> 'insights' AS given,
    coalesce(s.label, e.outcome) AS outcome, l.status, coalesce(l.tries, 0) AS tries, l.error,
    l.updated_at, r.reflection, CASE l.status WHEN 'pending' THEN l.next_at END AS next_at
FROM (SELECT) AS one
LEFT JOIN run_learning l ON l.tenant_id = :tenant AND l.run_id = :run
LEFT JOIN episodes e ON e.tenant_id = l.tenant_id AND e.id = l.episode_id
LEFT JOIN episode_state s ON s.tenant_id = l.tenant_id AND s.episode_id = l.episode_id
LEFT JOIN episode_reflections r
    ON r.tenant_id = l.tenant_id AND r.episode_id = l.episode_id AND s.state <> 'deleted'
""")
_CANDIDATES = text("""
SELECT p.id, p.name, p.category, p.state, p.version
FROM pattern_sources s JOIN patterns p ON p.tenant_id = s.tenant_id AND p.id = s.pattern_id
WHERE s.tenant_id = :tenant AND s.episode_id = :episode ORDER BY p.id LIMIT :most
""")
_APPLICATIONS = text("""
SELECT CAST(:source AS text) || a.pattern_id AS source, a.pattern_id, p.name, a.version, a.arm,
    a.at, a.followed, a.good, jsonb_build_object(
        'name', a.baseline_name, 'rate', a.baseline_rate, 'n', a.baseline_n) AS baseline
FROM pattern_applications a JOIN patterns p ON p.tenant_id = a.tenant_id AND p.id = a.pattern_id
WHERE a.tenant_id = :tenant AND a.episode_id = :episode ORDER BY a.at, a.id LIMIT :most
""")
_STORE = text("""
INSERT INTO episode_feedback (tenant_id, run_id, outcome, score, comment, by, at)
VALUES (:tenant, :run, CAST(:outcome AS text), CAST(:score AS double precision),
        CAST(:comment AS text), CAST(:by AS text), now())
ON CONFLICT (tenant_id, run_id) DO UPDATE SET
    outcome = excluded.outcome, score = excluded.score, comment = excluded.comment,
    by = excluded.by, at = excluded.at
RETURNING outcome, score, comment, by, at
""")
_HOLD = text("SELECT hold_episode_of(:tenant, :run)")
_LABEL = text("SELECT label_episode_of(:tenant, :run)")


async def learnt(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, Any]:
    """Return an existing run's learning status, reflection, new candidates, and applications."""
    values: dict[str, Any] = {"tenant": tenant_id, "run": run_id}
    row = (await connection.execute(_LEARNING, values)).mappings().one()
    values = {"tenant": tenant_id, "episode": row["episode_id"], "most": _MOST}
    candidates = await connection.execute(_CANDIDATES, values)
    applications = await connection.execute(_APPLICATIONS, {**values, "source": SOURCE})
    reflection = row["reflection"] or {}
    return {
        "run_id": run_id,
        **{name: row[name] for name in ("status", "tries", "error", "next_at", "updated_at")},
        **{name: reflection.get(name) or [] for name in ("insights", "patterns", "failures")},
        "by": reflection.get("by"),
        "performance": reflection.get("performance") or {},
        "candidates": list(candidates.mappings()),
        "applications": [*applications.mappings(), *_insights(row)],
    }


def _insights(row: RowMapping) -> list[dict[str, Any]]:
    """Return the applications of insights: the whole run judges them."""
    good = row["outcome"] == Outcome.SUCCESS if row["outcome"] in _JUDGED else None
    same = {"pattern_id": None, "name": "", "version": 1, "followed": None, "baseline": None}
    same |= {"at": row["at"], "good": good}
    return [
        {**same, "source": f"{INSIGHT}{each['id']}", "arm": each["arm"]}
        for each in row["given"] or ()
    ]


async def give_feedback(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    by: str,
    *,
    outcome: str | None = None,
    score: float | None = None,
    comment: str | None = None,
) -> dict[str, Any]:
    """Store feedback on a finished run beside its immutable episode, in place of earlier feedback.

    The run is learned from again.

    Args:
        by: the author, as in the audit log.
        outcome: overrides the run's own.
        score: 0 to 1, the best.
    """
    where = {"tenant": tenant_id, "run": run_id}
    said = {"outcome": outcome, "score": score, "comment": comment, "by": by}
    await connection.execute(_HOLD, where)
    stored = await connection.execute(_STORE, where | said)
    await connection.execute(_LABEL, where)
    return dict(stored.mappings().one())


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
