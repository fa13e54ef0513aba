"""Feedback on runs, stored beside the immutable episode."""

from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.memory.episodes.rows import CHANNEL

_STORE = text("""
INSERT INTO episode_feedback (tenant_id, run_id, outcome, score, comment, by, at)
VALUES (:tenant, :run, CAST(:outcome AS text), CAST(:score AS double precision),
        CAST(:comment AS text), CAST(:by AS text), now())
ON CONFLICT (tenant_id, run_id) DO UPDATE SET
    outcome = excluded.outcome, score = excluded.score, comment = excluded.comment,
    by = excluded.by, at = excluded.at
RETURNING outcome, score, comment, by, at
""")
# Searches use the outcome by feedback; without one that of the run.
_COUNT = [
    text(f"""
UPDATE {table} f SET outcome = coalesce(CAST(:outcome AS text), e.outcome)
FROM episodes e
WHERE e.tenant_id = :tenant AND e.run_id = :run
  AND f.tenant_id = e.tenant_id AND f.episode_id = e.id
  AND f.outcome <> coalesce(CAST(:outcome AS text), e.outcome)
""")  # noqa: S608 (constant names)
    for table in ("episode_search", "episode_vectors")
]

_HOLD = text("""
SELECT hold_episodes(ARRAY(SELECT id FROM episodes WHERE tenant_id = :tenant AND run_id = :run))
""")
# Members of a consolidated episode have equal outcomes: separate it if one changes.
_SEPARATE = text("""
SELECT dissolve_episodes(ARRAY[c.id])
FROM episodes e
JOIN episode_state s ON s.tenant_id = e.tenant_id AND s.episode_id = e.id
JOIN episodes c ON c.tenant_id = e.tenant_id AND c.id = s.consolidated_into
WHERE e.tenant_id = :tenant AND e.run_id = :run
  AND c.outcome <> coalesce(CAST(:outcome AS text), e.outcome)
""")
# Requeues learning: the feedback decides whether the run's patterns helped.
_LEARN_AGAIN = text("""
UPDATE run_learning SET status = 'pending', tries = 0, next_at = now(), error = NULL,
    updated_at = now()
WHERE tenant_id = :tenant AND run_id = :run
""")
_TELL = text("SELECT pg_notify(:channel, '')")


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
    for statement in (_SEPARATE, *_COUNT):
        await connection.execute(statement, where | {"outcome": feedback.outcome})
    await connection.execute(_LEARN_AGAIN, where)
    await connection.execute(_TELL, {"channel": CHANNEL})
    return dict(stored.mappings().one())
