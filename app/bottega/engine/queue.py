"""The run queue as a worker uses it; ``db/sql/queue.sql`` says which run is next.

Claim: :class:`RunClaimer` claims due runs for the free places of this worker, and executes them. It
claims

- after a notification that names this worker,
- after the end of a run, if this worker was nearly full or the run's tenant has due runs,
- when this process queues runs, if runs ended in this worker lately,
- at once, if the last claim left due runs,
- every ``POLL_S`` s, because a notification may be lost.

Fence: each write of a claimed run names the run's attempt. A worker that lost a run learns this
from the answer to its next write or report, and stops the run.

Lease: :class:`bottega.engine.workers.WorkerLease` reports which runs this worker executes. It has a
thread of its own, so that a long computation in the event loop does not delay the report.

Takeover: every process sweeps. A worker without a lease loses its runs; a worker that shuts down
hands them back first.

Fair: the database shares the places among tenants. For this, a claim names the tenant of each run
that this worker holds, and each tenant of whom a run ended in this worker in the last second.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from uuid import UUID

import asyncpg
import structlog

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.engine.claim import ClaimedRun, ClaimReader, hand_back
from bottega.events.listener import happens
from bottega.services import background

POLL_S = 2.0
_MOST = 20
_CLAIM_S = 3.0
"""Longest time of a claim, in seconds. A run is lost if no report names it 5 s after its claim."""
_PAUSE_S = 0.005
"""Time, in seconds, in which all runs that end lead to a single claim."""
_RECENT_S = 1.0
"""Seconds after a run's end in which claims name its tenant; its runs are counted again then."""
_CLAIM = "SELECT c.*, claimed_run(c.tenant, c.run) AS claim FROM claim($1, $2, $3, $4, $5) AS c"

logger = structlog.get_logger(__name__)


async def sweep(pool: asyncpg.Pool, lease_s: float) -> int:
    """Queue runs again that no live worker executes; return their number.

    The sweep also ends runs whose time is over, and does the database's upkeep, a page at a time.
    Return 0 if another process is sweeping or has just swept.
    """
    lost: int | None = await pool.fetchval("SELECT sweep($1)", lease_s)
    if lost:
        logger.warning("queue.swept", runs=lost)
    if lost is not None:
        try:
            await pool.execute("SELECT do_upkeep()")
        except Exception as error:  # the takeover of runs must not depend on this
            logger.warning("queue.upkeep_failed", error=str(error), kind=type(error).__name__)
    return lost or 0


async def sweep_regularly(pool: asyncpg.Pool, lease_s: float) -> None:
    """Sweep at once and then four times in each lease, until cancelled."""
    while True:
        await sweep(pool, lease_s)
        await asyncio.sleep(lease_s / 4)


class RunClaimer:
    """Claims runs for this worker's free places, and executes them.

    Args:
        execute: executes one run; returns false if its tenant has no due runs afterwards. An error
            is logged and counts as a crash of the run.
        places: returns the number of this worker's places.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        worker_id: UUID,
        reader: ClaimReader,
        execute: Callable[[ClaimedRun], Awaitable[bool]],
        places: Callable[[], int],
    ) -> None:
        self._pool, self.worker_id, self._reader = pool, worker_id, reader
        self._execute, self._places = execute, places
        self._active: dict[asyncio.Task[bool], ClaimedRun] = {}
        self._ended: dict[UUID, float] = {}
        self._wake = asyncio.Event()

    def notice(self, payload: str | None) -> None:
        """Claim at once if a notification names this worker; ``None``: one may have been lost."""
        if payload in (None, str(self.worker_id)):
            self._wake.set()

    def claims_own(self) -> bool:
        """Claim due runs soon if runs ended here lately and places are free; return true if so.

        So this worker itself goes on with the next runs of a batch whose runs it executed.
        """
        ended_lately = any(at > monotonic() - _RECENT_S for at in self._ended.values())
        if claims := ended_lately and len(self._active) < self._places() * 4 // 5:
            self._wake.set()
        return claims

    async def run(self, stop: asyncio.Event) -> None:
        """Claim and execute runs until ``stop`` is set."""

        async def wake_at_stop() -> None:
            await stop.wait()
            self._wake.set()

        async with background(wake_at_stop):
            while not stop.is_set():
                self._wake.clear()
                pause_s = POLL_S
                try:
                    pause_s = 2 * _PAUSE_S if await self._claim() else POLL_S
                except Exception as error:  # the sweep finds claimed runs that no report names
                    logger.warning("queue.claim_failed", error=repr(error))
                await happens(self._wake, pause_s * random.uniform(0.8, 1.2))  # noqa: S311

    async def finish(self, grace_s: float) -> None:
        """Give the runs ``grace_s`` seconds to end; then cancel and so hand back the others."""
        if self._active:
            await asyncio.wait(self._active, timeout=grace_s)
        for task in (left := list(self._active)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _claim(self) -> bool:
        """Claim and begin some runs; return true if this worker may claim more at once."""
        held = [run.tenant_id for run in self._active.values()]
        places, began = self._places(), monotonic()
        self._ended = {of: at for of, at in self._ended.items() if at > began - _RECENT_S}
        async with asyncio.timeout(_CLAIM_S):
            rows = await self._pool.fetch(
                _CLAIM, self.worker_id, _MOST, places, held, list(self._ended), timeout=_CLAIM_S
            )
            runs = await self._reader.read([row for row in rows if row["run"] is not None])
        if runs:
            metrics.claim_duration.observe(monotonic() - began)
        for run in runs:
            task = asyncio.ensure_future(self._carry_out(run))
            self._active[task] = run
            task.add_done_callback(self._end)
        return any(row["more"] for row in rows)

    def _end(self, task: asyncio.Task[bool]) -> None:
        was_full = len(self._active) >= self._places() * 4 // 5
        self._ended[self._active.pop(task).tenant_id] = monotonic()
        if was_full or task.cancelled() or task.exception() or task.result():
            asyncio.get_running_loop().call_later(_PAUSE_S, self._wake.set)

    async def _carry_out(self, run: ClaimedRun) -> bool:
        """Execute a run; if that fails, leave it to the next attempt."""
        try:
            return await self._execute(run)
        except Exception as error:
            logger.exception("run.abandoned", run_id=str(run.run_id))
            if not is_transient(error):  # else the sweep queues the run, as no report names it now
                await hand_back(self._pool, run, "crash")
            return True
