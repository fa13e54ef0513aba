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

from bottega.clock import Clock, monotonic, utcnow
from bottega.db.engine import acting_as
from bottega.errors import BottegaError
from bottega.leased_work import LeasedWork
from bottega.memory.learning import jobs
from bottega.memory.learning.jobs import Job, LostJobError

POLL_S = 60.0

_LEASE_S = 60.0
_TENANTS = 50
_MOST_TRIES = 8
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 1800.0
_HAND_BACK_S = 2.0

log = structlog.get_logger(__name__)

_CLAIM = "SELECT tenant_id, id FROM claim_due_memory_jobs($1, $2)"
_NEXT = "SELECT next_memory_job_s()"
_TO_MAINTAIN = "SELECT tenants_to_maintain($1, $2) AS id"

Counts = Mapping[str, Any]
"""Counts of a stage, as JSON; of bounded size."""


@dataclass(frozen=True, slots=True)
class MaintenanceStage:
    """Stage of a maintenance job; ``work`` must be idempotent."""

    name: str
    work: Callable[[Job], Awaitable[Counts]]


@dataclass(frozen=True, slots=True)
class Nights:
    """Schedule: the last due time up to a moment, and the first one after it."""

    previous: Callable[[datetime], datetime]
    next: Callable[[datetime], datetime]


class Maintenance:
    """Worker for maintenance jobs.

    :meth:`begin_nights` and :meth:`work` do what is due, and return the seconds until the next
    work. Any number of processes may run at a time.

    Args:
        stages: in order; the counts of the last one are the job's report.
        nights: the schedule for all tenants; ``None``: on demand only.
        lease_s: seconds after which another worker takes the job of a dead one.
        first_pause_s: seconds before the first retry; doubled for each further one.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        stages: Sequence[MaintenanceStage],
        *,
        nights: Nights | None = None,
        lease_s: float = _LEASE_S,
        first_pause_s: float = _FIRST_PAUSE_S,
        now: Clock = utcnow,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pool = pool
        self._stages = stages
        self._nights = nights
        self._lease_s = lease_s
        self._first_pause_s = first_pause_s
        self._now = now
        self._clock = clock
        self._work = LeasedWork(
            pool=pool, claim=_CLAIM, limits=(lease_s, 1), next_s=_NEXT, do=self._work_on
        )

    async def order(self, tenant_id: UUID) -> UUID:
        """Enqueue a maintenance job for a tenant, or return the open one."""
        async with acting_as(self._pool, tenant_id) as connection:
            return (await jobs.order(connection, tenant_id))[0]

    async def begin_nights(self) -> float:
        """Order a job for each tenant without one since the last due time, at most one page.

        Several missed nights lead to one job."""
        if self._nights is None:
            return float("inf")
        now = self._now()
        tick = self._nights.previous(now)
        rows = await self._pool.fetch(_TO_MAINTAIN, tick, _TENANTS)
        ordered = False
        for row in rows:
            async with acting_as(self._pool, row["id"]) as connection:
                ordered |= (await jobs.order(connection, row["id"], "nightly", tick))[1]
        if rows:
            return 0.0 if ordered else POLL_S
        return max(0.0, (self._nights.next(now) - now).total_seconds())

    async def work(self) -> float:
        """Claim the job that has been due longest, and do its stages."""
        return await self._work.do_due()

    async def _work_on(self, tenant_id: UUID, claimed: Sequence[asyncpg.Record]) -> None:
        (row,) = claimed
        async with acting_as(self._pool, tenant_id) as connection:
            job = await jobs.get(connection, tenant_id, row["id"])
        said = {"tenant_id": str(job.tenant_id), "job_id": str(job.id)}
        try:
            await self._do(job)
        except LostJobError:
            log.info("maintenance.lost", **said)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_HAND_BACK_S):
                    await jobs.put_off(self._pool, job, 0.0, job.error)
            raise
        except Exception as error:
            known = isinstance(error, (BottegaError, OSError, asyncpg.PostgresError))
            (log.warning if known else log.exception)(
                "maintenance.failed", **said, error=str(error)
            )
            await self._fail(job, error if known else None)
        else:
            log.info("maintenance.done", **said)

    async def _do(self, job: Job) -> None:
        """Do the remaining stages of a job."""
        if job.tries > _MOST_TRIES:  # each worker that held it died
            error = job.error or "each worker that held the job died"
            await jobs.end(self._pool, job, error=error)
            return
        for number in range(job.stage, len(self._stages)):
            stage = self._stages[number]
            began = self._clock()
            counts = await self._held(job, stage)
            spent: dict[str, Any] = {"ms": round(1000 * (self._clock() - began))}
            if number + 1 == len(self._stages):
                progress = {stage.name: spent}
                await jobs.end(self._pool, job, report=counts, stage=number + 1, progress=progress)
            else:
                progress = {stage.name: {**counts, **spent}}
                await jobs.carry_on(self._pool, job, number + 1, progress, self._lease_s)
                job = replace(job, stage=number + 1, progress={**job.progress, **progress})

    async def _held(self, job: Job, stage: MaintenanceStage) -> Counts:
        """Do a stage, and renew the job's lease meanwhile."""
        working = asyncio.ensure_future(stage.work(job))
        try:
            while True:
                done, _ = await asyncio.wait({working}, timeout=self._lease_s / 3)
                if done:
                    return working.result()
                with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    held = await jobs.renew(self._pool, job, self._lease_s)
                    if not held:
                        raise LostJobError
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _fail(self, job: Job, error: BaseException | None) -> None:
        """Schedule a retry, or end the job as failed after too many tries."""
        why = "an internal error; the worker's log says more" if error is None else str(error)
        with contextlib.suppress(LostJobError):
            if job.tries >= _MOST_TRIES:
                await jobs.end(self._pool, job, error=why)
            else:
                pause_s = self._first_pause_s * 2.0 ** (job.tries - 1)
                await jobs.put_off(self._pool, job, min(_LONGEST_PAUSE_S, pause_s), why)
