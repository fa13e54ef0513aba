"""Stages of a tenant's maintenance job, and the report that the last one returns.

Every report is bounded in size, however large the tenant's memory is.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from bottega.clock import Clock, utcnow
from bottega.db.driver import decoded
from bottega.db.engine import acting_as
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.memory.learning.discovery import discover
from bottega.memory.learning.evolution import refine, validate_all
from bottega.memory.learning.indexes import maintain_indexes
from bottega.memory.learning.jobs import Job
from bottega.memory.learning.maintenance import Counts, Stages
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.rows import notify_change
from bottega.objects import Objects

_DAYS = 30
MOST = 200
"""Most validations in a report; the rest is only counted."""


def _by(name: str, table: str, where: str = "true", value: str = "count(*)") -> str:
    """Return SQL for an object: a value for each group of a tenant's rows, by its name."""
    return f"""(
        SELECT coalesce(jsonb_object_agg(name, value), '{{}}') FROM (
            SELECT {name} AS name, {value} AS value FROM {table}
            WHERE tenant_id = $1 AND {where} GROUP BY 1) counted)"""  # noqa: S608 (constant texts)


_BODIES = "jsonb_build_object('bodies', count(*), 'bytes', coalesce(sum(bytes), 0))"
_TRIED = "jsonb_build_object('count', count(*), 'good', count(*) FILTER (WHERE good))"
_DAY = "(created_at AT TIME ZONE 'UTC')::date::text"
_COUNTED = f"""
SELECT jsonb_build_object(
    'episodes', jsonb_build_object(
        'stored', (SELECT count(*) FROM episode_state WHERE tenant_id = $1),
        'by_state', {_by("state", "episode_state")},
        'searchable_by_outcome', {_by("outcome", "episode_search")}),
    'storage', jsonb_build_object(
        'database', (SELECT {_BODIES} FROM episode_bodies
                     WHERE tenant_id = $1 AND object_key IS NULL),
        'objects', (SELECT {_BODIES} FROM episode_bodies
                    WHERE tenant_id = $1 AND object_key IS NOT NULL)),
    'patterns', jsonb_build_object(
        'by_state', {_by("state", "patterns")},
        'discovered_by_day', {_by(_DAY, "patterns", "origin ? 'mined' AND created_at >= $2")},
        'applications', {_by("arm", "pattern_applications", "at >= $2", _TRIED)}),
    'learning', {_by("status", "run_learning")})
"""  # noqa: S608
# Judgements of all patterns but the deprecated ones, the most promising first.
_VALIDATIONS = """
SELECT id, name, category, state, version, verdict, applications AS n, success_rate AS rate,
       p_value AS p, e_value AS e, confidence, baseline, validated_at,
       id::text = ANY ($3) AS promoted
FROM patterns WHERE tenant_id = $1 AND verdict IS NOT NULL AND state <> 'DEPRECATED'
ORDER BY e_value DESC, id LIMIT $2
"""
_VALIDATED = """
SELECT count(*) FROM patterns WHERE tenant_id = $1 AND verdict IS NOT NULL AND state <> 'DEPRECATED'
"""


def stages_of(
    pool: asyncpg.Pool,
    episodes: EpisodeMaintenance,
    patterns: PatternCache,
    objects: Objects,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    now: Clock = utcnow,
) -> Stages:
    """Return the stages.

    Args:
        connect: opens a connection as :data:`bottega.memory.learning.indexes.ROLE`.
        now: the time that decides the age of episodes.
    """

    async def care(job: Job) -> Counts:
        """Maintain indexes, and have matchers rebuilt."""
        done = await maintain_indexes(connect)
        async with acting_as(pool, job.tenant_id) as connection:
            await notify_change(connection, job.tenant_id)
        return done

    return {
        "episodes": lambda job: episodes.tend(job.tenant_id, now()),
        "mining": lambda job: discover(pool, objects, patterns, job.tenant_id),
        "validation": lambda job: validate_all(patterns, job.tenant_id),
        "refinement": lambda job: refine(patterns, job.tenant_id),
        "indices": care,
        "report": lambda job: _report(pool, job, now()),
    }


async def _report(pool: asyncpg.Pool, job: Job, now: datetime) -> dict[str, Any]:
    """Return the report of a job whose other stages are done."""
    promoted = job.progress.get("validation", {}).get("promoted", {}).get("patterns", ())
    since = now - timedelta(days=_DAYS)
    async with acting_as(pool, job.tenant_id) as connection:
        counted = await connection.fetchval(_COUNTED, job.tenant_id, since)
        judged = await connection.fetch(_VALIDATIONS, job.tenant_id, MOST, [*promoted])
        count = await connection.fetchval(_VALIDATED, job.tenant_id)
    items = [{**row, "baseline": decoded(row["baseline"])} for row in judged]
    return {
        "at": now,
        **decoded(counted),
        "validations": {"count": count, "items": items},
        "stages": dict(job.progress),
    }
