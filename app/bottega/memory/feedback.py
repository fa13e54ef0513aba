"""What people say a run's result was worth: beside its episode, which never changes."""

from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.errors import ConflictError
from bottega.memory.rows import CHANNEL

_STORE = text("""
INSERT INTO episode_feedback (tenant_id, run_id, outcome, score, comment, by, at)
SELECT e.tenant_id, e.run_id, CAST(:outcome AS text), CAST(:score AS double precision),
       CAST(:comment AS text), CAST(:by AS text), now()
FROM episodes e JOIN episode_state s ON s.tenant_id = e.tenant_id AND s.episode_id = e.id
WHERE e.tenant_id = :tenant AND e.run_id = :run AND s.state <> 'deleted'
ON CONFLICT (tenant_id, run_id) DO UPDATE SET
    outcome = excluded.outcome, score = excluded.score, comment = excluded.comment,
    by = excluded.by, at = excluded.at
RETURNING outcome, score, comment, by, at
""")
# What is searched says what counts; the run's own word again once the last feedback has none.
_COUNT = [
    text(f"""
UPDATE {table} f SET outcome = coalesce(CAST(:outcome AS text), e.outcome)
FROM episodes e
WHERE e.tenant_id = :tenant AND e.run_id = :run
  AND f.tenant_id = e.tenant_id AND f.episode_id = e.id
  AND f.outcome <> coalesce(CAST(:outcome AS text), e.outcome)
""")  # noqa: S608 (a name of ours)
    for table in ("episode_search", "episode_vectors")
]

_HOLD = text("""
SELECT hold_episodes(ARRAY(SELECT id FROM episodes WHERE tenant_id = :tenant AND run_id = :run))
""")
# Those that became one ended alike: one that did not goes its own way again.
_SEPARATE = text("""
SELECT dissolve_episodes(ARRAY[c.id])
FROM episodes e
JOIN episode_state s ON s.tenant_id = e.tenant_id AND s.episode_id = e.id
JOIN episodes c ON c.tenant_id = e.tenant_id AND c.id = s.consolidated_into
WHERE e.tenant_id = :tenant AND e.run_id = :run
  AND c.outcome <> coalesce(CAST(:outcome AS text), e.outcome)
""")
# What came of the patterns that it was given is what the last word says.
_LEARN_AGAIN = text("""
UPDATE run_learning SET status = 'pending', tries = 0, next_at = now(), error = NULL,
    updated_at = now()
WHERE tenant_id = :tenant AND run_id = :run
""")
_TELL = text("SELECT pg_notify(:channel, '')")


@dataclass(frozen=True, slots=True)
class Feedback:
    """What somebody says. ``None`` is nothing.

    Attributes:
        outcome: counts instead of the run's own.
        score: 0 to 1, which is best.
    """

    outcome: str | None = None
    score: float | None = None
    comment: str | None = None


async def give(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, feedback: Feedback, by: str
) -> dict[str, Any]:
    """Store what somebody says of a run that is over, instead of what was said before.

    Args:
        by: who says it, as in the audit log.

    Raises:
        ConflictError: ``no_episode``: the run left none, or it was deleted.
    """
    where = {"tenant": tenant_id, "run": run_id}
    await connection.execute(_HOLD, where)
    stored = await connection.execute(_STORE, where | asdict(feedback) | {"by": by})
    row = stored.mappings().one_or_none()
    if row is None:
        raise ConflictError(
            f"run {run_id} has no episode that feedback could count for: its memory was not "
            "'full', or the episode was deleted",
            code="no_episode",
        )
    for statement in (_SEPARATE, *_COUNT):
        await connection.execute(statement, where | {"outcome": feedback.outcome})
    await connection.execute(_LEARN_AGAIN, where)
    await connection.execute(_TELL, {"channel": CHANNEL})
    return dict(row)
