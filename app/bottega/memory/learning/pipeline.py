"""Stages of a tenant's maintenance job."""

import asyncpg

from bottega.clock import Clock, utcnow
from bottega.db.engine import acting_as
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.learning.discovery import Discovery
from bottega.memory.learning.evolution import refine, validate_all
from bottega.memory.learning.indexes import IndexMaintenance
from bottega.memory.learning.jobs import Job
from bottega.memory.learning.maintenance import Counts, MaintenanceStage
from bottega.memory.learning.reports import Reports
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.rows import notify_change

_WARMED = 100

# Recent episodes with the most accesses.
_MOST_READ = """
SELECT episode_id FROM (
    SELECT x.episode_id, x.at, s.access_count
    FROM (SELECT episode_id, at FROM episode_search WHERE tenant_id = $1
          ORDER BY at DESC, episode_id DESC LIMIT 5000) x
    JOIN episode_state s ON s.tenant_id = $1 AND s.episode_id = x.episode_id
    WHERE s.access_count > 0 AND s.state IN ('active', 'mature')) read
ORDER BY access_count DESC, at DESC, episode_id LIMIT $2
"""


def stages_of(
    pool: asyncpg.Pool,
    memory: EpisodicMemory,
    tending: EpisodeMaintenance,
    patterns: PatternCache,
    discovery: Discovery,
    indices: IndexMaintenance,
    reports: Reports,
    now: Clock = utcnow,
) -> tuple[MaintenanceStage, ...]:
    """Return the stages, in order; ``now`` decides the age of episodes."""

    async def care(job: Job) -> Counts:
        """Maintain indexes, have matchers rebuilt, and load the most read episodes."""
        done = await indices.care()
        async with acting_as(pool, job.tenant_id) as connection:
            await notify_change(connection, job.tenant_id)
            rows = await connection.fetch(_MOST_READ, job.tenant_id, _WARMED)
        warmed = await memory.warm(job.tenant_id, [row["episode_id"] for row in rows])
        return done | {"warmed": warmed}

    return (
        MaintenanceStage("episodes", lambda job: tending.tend(job.tenant_id, now())),
        MaintenanceStage("mining", lambda job: discovery.discover(job.tenant_id)),
        MaintenanceStage("validation", lambda job: validate_all(patterns, job.tenant_id)),
        MaintenanceStage("refinement", lambda job: refine(patterns, job.tenant_id)),
        MaintenanceStage("indices", care),
        MaintenanceStage("report", reports.of),
    )
