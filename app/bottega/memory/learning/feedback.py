"""Feedback on runs, stored beside the immutable episode."""

from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

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


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of a user; ``None`` means no answer.

    Attributes:
        outcome: overrides the run's own.
        score: 0 to 1, the best.
    """

    outcome: str | None = None
    score: float | None = None
    comment: str | None = None


async def give(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, feedback: Feedback, by: str
) -> dict[str, Any]:
    """Store feedback on a finished run, in place of earlier feedback; learn again from its episode.

    Args:
        by: the author, as in the audit log.
    """
    where = {"tenant": tenant_id, "run": run_id}
    await connection.execute(_HOLD, where)
    stored = await connection.execute(_STORE, where | asdict(feedback) | {"by": by})
    await connection.execute(_LABEL, where)
    return dict(stored.mappings().one())
