"""Baselines: success rates without a pattern.

All functions run in a transaction of the tenant (:func:`bottega.db.engine.acting_as`).
"""

from collections.abc import Sequence
from uuid import UUID

import asyncpg

from bottega.memory.patterns.application_rows import latest
from bottega.memory.patterns.pattern import OF_RUN, Arm, Baseline, Features, Pattern
from bottega.memory.patterns.rows import GIVEN_ARMS

_TASKS = 200
"""Newest tasks, or observations, that count."""
_MOST_RUNS = 1_000
"""Newest similar tasks that are searched: most may have been given the pattern."""

# Skips consolidated episodes: they do not record which members were given the pattern.
_LIKE = """
SELECT p.id, count(*) AS n, count(*) FILTER (WHERE l.outcome = 'SUCCESS') AS good
FROM unnest($2::uuid[]) AS p(id) CROSS JOIN LATERAL (
    SELECT t.outcome FROM (
        SELECT s.episode_id, s.outcome, s.at FROM episode_search s
        WHERE s.tenant_id = $1 AND s.task_type {task_type} AND s.domain {domain}
          AND s.trust >= 2 AND s.outcome NOT IN ('CANCELLED', 'UNKNOWN') AND s.instances = 1
        ORDER BY s.at DESC LIMIT $7) t
    WHERE NOT EXISTS (
        SELECT FROM pattern_applications a
        WHERE a.tenant_id = $1 AND a.episode_id = t.episode_id AND a.pattern_id = p.id
          AND a.arm = ANY ($5))
    ORDER BY t.at DESC LIMIT $6) l
GROUP BY p.id
"""
_NOT_GIVEN = sorted(arm.value for arm in Arm if arm not in GIVEN_ARMS)


async def of(
    connection: asyncpg.Connection, tenant_id: UUID, patterns: Sequence[Pattern], features: Features
) -> dict[UUID, Baseline]:
    """Return the baseline of each pattern for a task.

    A pattern judged by the whole run is compared with the newest tasks of the same type and domain
    that were not given it; others with their own controls. The rates are smoothed towards 0.5, as
    if 10 more tasks had been half successful.
    """
    found = {each.key: Baseline() for each in patterns}
    of_run = [each.key for each in patterns if each.category in OF_RUN]
    others = [each.key for each in patterns if each.category not in OF_RUN]
    if of_run:
        kind = {name: features.get(name) for name in ("task_type", "domain")}
        statement = _LIKE.format(
            task_type="IS NULL AND $3::text IS NULL" if kind["task_type"] is None else "= $3",
            domain="IS NULL AND $4::text IS NULL" if kind["domain"] is None else "= $4",
        )
        rows = await connection.fetch(
            statement, tenant_id, of_run, *kind.values(), GIVEN_ARMS, _TASKS, _MOST_RUNS
        )
        found |= {row["id"]: _baseline("like_tasks", row["good"], row["n"]) for row in rows}
    if others:
        tallies = await latest(connection, tenant_id, others, _TASKS, _NOT_GIVEN)
        found |= {key: _baseline("controls", each.good, each.n) for key, each in tallies.items()}
    return found


def _baseline(name: str, good: int, n: int) -> Baseline:
    return Baseline(name, (5 + good) / (10 + n), n)
