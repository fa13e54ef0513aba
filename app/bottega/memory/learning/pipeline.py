"""Stages of a tenant's maintenance job."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg

from bottega.clock import Clock, utcnow
from bottega.db.engine import acting_as
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.learning import evolution
from bottega.memory.learning.discovery import Discovery
from bottega.memory.learning.indexes import IndexMaintenance
from bottega.memory.learning.jobs import Job
from bottega.memory.learning.maintenance import Counts, MaintenanceStage
from bottega.memory.learning.reports import Reports
from bottega.memory.patterns.cache import PatternCache

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
_TELL_MATCHERS = "SELECT pg_notify('bottega_patterns', $1)"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Builds the stages.

    Attributes:
        now: clock for the age of episodes.
    """

    pool: asyncpg.Pool
    memory: EpisodicMemory
    tending: EpisodeMaintenance
    patterns: PatternCache
    discovery: Discovery
    indices: IndexMaintenance
    reports: Reports
    now: Clock = utcnow

    def stages(self) -> tuple[MaintenanceStage, ...]:
        return (
            MaintenanceStage("episodes", self._tend),
            MaintenanceStage("mining", self._mine),
            MaintenanceStage("validation", self._validate),
            MaintenanceStage("refinement", self._refine),
            MaintenanceStage("indices", self._care),
            MaintenanceStage("report", self.reports.of),
        )

    async def _tend(self, job: Job) -> Counts:
        return await self.tending.tend(job.tenant_id, self.now())

    async def _mine(self, job: Job) -> Counts:
        return await self.discovery.discover(job.tenant_id)

    async def _validate(self, job: Job) -> Counts:
        return await evolution.validate_all(self.patterns, job.tenant_id)

    async def _refine(self, job: Job) -> Counts:
        """End reviews, merge equal patterns, and deprecate those of low value."""
        return await evolution.refine(self.patterns, job.tenant_id)

    async def _care(self, job: Job) -> Counts:
        """Maintain indexes, have matchers rebuilt, and warm the cache."""
        done: dict[str, Any] = await self.indices.care()
        await self.pool.execute(_TELL_MATCHERS, str(job.tenant_id))
        return done | {"warmed": await self._warm(job.tenant_id)}

    async def _warm(self, tenant_id: UUID) -> int:
        """Load the most read episodes into the cache of this process."""
        async with acting_as(self.pool, tenant_id) as connection:
            rows = await connection.fetch(_MOST_READ, tenant_id, _WARMED)
        return await self.memory.warm(tenant_id, [row["episode_id"] for row in rows])
