"""Stages of a tenant's maintenance job."""

import asyncpg

from bottega.clock import Clock, utcnow
from bottega.db.engine import acting_as
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.memory.learning.discovery import Discovery
from bottega.memory.learning.evolution import refine, validate_all
from bottega.memory.learning.indexes import IndexMaintenance
from bottega.memory.learning.jobs import Job
from bottega.memory.learning.maintenance import Counts, MaintenanceStage
from bottega.memory.learning.reports import Reports
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.rows import notify_change


def stages_of(
    pool: asyncpg.Pool,
    tending: EpisodeMaintenance,
    patterns: PatternCache,
    discovery: Discovery,
    indices: IndexMaintenance,
    reports: Reports,
    now: Clock = utcnow,
) -> tuple[MaintenanceStage, ...]:
    """Return the stages, in order; ``now`` decides the age of episodes."""

    async def care(job: Job) -> Counts:
        """Maintain indexes, and have matchers rebuilt."""
        done = await indices.care()
        async with acting_as(pool, job.tenant_id) as connection:
            await notify_change(connection, job.tenant_id)
        return done

    return (
        MaintenanceStage("episodes", lambda job: tending.tend(job.tenant_id, now())),
        MaintenanceStage("mining", lambda job: discovery.discover(job.tenant_id)),
        MaintenanceStage("validation", lambda job: validate_all(patterns, job.tenant_id)),
        MaintenanceStage("refinement", lambda job: refine(patterns, job.tenant_id)),
        MaintenanceStage("indices", care),
        MaintenanceStage("report", reports.of),
    )
