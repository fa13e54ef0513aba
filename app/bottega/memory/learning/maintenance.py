"""Maintenance of a tenant's memory, each night and on demand.

A job is a row with six stages in order. A worker claims it with a lease. If the worker dies, the
next one continues after the last finished stage. Each stage is idempotent, also after a partial
execution, so no stage stores its position.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from bottega import metrics
from bottega.clock import Clock, monotonic, utcnow
from bottega.db.engine import acting_as
from bottega.errors import BottegaError
from bottega.leased_work import LeasedWork
from bottega.memory.learning import jobs
from bottega.memory.learning.jobs import Job, LostJobError

POLL_S = 60.0

_TENANTS = 50
_MOST_TRIES = 8
_LONGEST_PAUSE_S = 1800.0
_HAND_BACK_S = 2.0

log = structlog.get_logger(__name__)

_CLAIM = "SELECT tenant_id, id FROM claim_due_memory_jobs($1, $2)"
_NEXT = "SELECT next_memory_job_s()"
_TO_MAINTAIN = "SELECT tenants_to_maintain($1, $2) AS id"

Counts = Mapping[str, Any]
"""Counts of a stage, as JSON; of bounded size."""
Stages = Mapping[str, Callable[[Job], Awaitable[Counts]]]
"""Idempotent work by name, in order."""


Nights = Callable[[datetime], tuple[datetime, datetime]]
"""Schedule: the last due time up to a moment, and the first one after it."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Worker for maintenance jobs. Any number of processes may run at a time.

    Attributes:
        stages: the counts of the last one are the job's report.
        nights: the schedule for all tenants; ``None``: on demand only.
        lease_s: seconds after which another worker takes the job of a dead one.
        first_pause_s: seconds before the first retry; doubled for each further one.
    """

    pool: asyncpg.Pool
    stages: Stages
    nights: Nights | None = None
    lease_s: float = 60.0
    first_pause_s: float = 10.0
    now: Clock = utcnow

    async def begin_nights(self) -> float:
        """Order a job for each tenant without one since the last due time, at most one page.

        Several missed nights lead to one job. Return the seconds until the next night."""
        if self.nights is None:
            return float("inf")
        now = self.now()
        tick, then = self.nights(now)
        rows = await self.pool.fetch(_TO_MAINTAIN, tick, _TENANTS)
        ordered = False
        for row in rows:
            async with acting_as(self.pool, row["id"]) as connection:
                ordered |= (await jobs.order(connection, row["id"], "nightly", tick))[1]
        if rows:
            return 0.0 if ordered else POLL_S
        return max(0.0, (then - now).total_seconds())

    async def work(self) -> float:
        """Do the job that has been due longest; return the seconds until the next is due."""
        limits = (self.lease_s, 1)
        work = LeasedWork(
            pool=self.pool, claim=_CLAIM, limits=limits, next_s=_NEXT, do=self._work_on
        )
        return await work.do_due()

    async def _work_on(self, tenant_id: UUID, claimed: Sequence[asyncpg.Record]) -> None:
        (row,) = claimed
        async with acting_as(self.pool, tenant_id) as connection:
            job = await jobs.get(connection, tenant_id, row["id"])
        said = {"tenant_id": str(job.tenant_id), "job_id": str(job.id)}
        try:
            await self._do(job)
        except LostJobError:
            log.info("maintenance.lost", **said)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_HAND_BACK_S):
                    await self._put_off(job, 0.0, job.error)
            raise
        except Exception as error:
            known = isinstance(error, (BottegaError, OSError, asyncpg.PostgresError))
            (log.warning if known else log.exception)(
                "maintenance.failed", **said, error=str(error)
            )
            why = str(error) if known else "an internal error; the worker's log says more"
            pause_s = min(_LONGEST_PAUSE_S, self.first_pause_s * 2.0 ** (job.tries - 1))
            with contextlib.suppress(LostJobError):
                if job.tries >= _MOST_TRIES:
                    await self._end(job, why)
                else:
                    await self._put_off(job, pause_s, why)
        else:
            log.info("maintenance.done", **said)

    async def _do(self, job: Job) -> None:
        """Do the remaining stages of a job."""
        if job.tries > _MOST_TRIES:
            await self._end(job, job.error or "each worker that held the job died")
            return
        for number, (name, work) in enumerate(
            [*self.stages.items()][job.stage :], start=job.stage + 1
        ):
            began = monotonic()
            counts = await self._held(job, work(job))
            spent: dict[str, Any] = {"ms": round(1000 * (monotonic() - began))}
            if number == len(self.stages):
                await self._end(job, report=counts, stage=number, progress={name: spent})
            else:
                progress = {name: {**counts, **spent}}
                await jobs.write(
                    self.pool, job, stage=number, progress=progress, wait_s=self.lease_s
                )
                job = replace(job, stage=number, progress={**job.progress, **progress}, error=None)

    async def _held(self, job: Job, stage: Awaitable[Counts]) -> Counts:
        """Do a stage, and renew the job's lease meanwhile."""
        working = asyncio.ensure_future(stage)
        try:
            while True:
                done, _ = await asyncio.wait({working}, timeout=self.lease_s / 3)
                if done:
                    return working.result()
                with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    await jobs.write(self.pool, job, error=job.error, wait_s=self.lease_s)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _put_off(self, job: Job, seconds: float, error: str | None) -> None:
        """Release a job until it is due again in so many seconds."""
        await jobs.write(self.pool, job, error=error, wait_s=seconds)
        metrics.learning_jobs.labels("put_off" if error is None else "failed_try").inc()

    async def _end(self, job: Job, error: str | None = None, **changes: Any) -> None:
        """End a job as done, or as failed if there is an error."""
        status = "done" if error is None else "failed"
        await jobs.write(self.pool, job, error=error, status=status, **changes)
        metrics.learning_jobs.labels(status).inc()
