"""The run queue in a worker. ``db/sql/queue.sql`` decides which run is next.

Claim: :class:`RunClaimer` claims due runs for free places, and executes the runs. It claims

- after a notification with this worker's id,
- after the end of a run, if this worker was nearly full or the run's tenant has due runs,
- when this process has queued a run and has just ended runs (:meth:`RunClaimer.claims_own`),
- 10 ms after a claim that left due runs for this worker,
- every ``POLL_S`` s while it listens, and after reports that find due runs: signals may be lost.

Fence: each write of a claimed run has the run's attempt. If a worker has lost a run, the database's
answer to the worker's next write or report says so, and the worker stops the run.

Lease: :class:`bottega.engine.workers.WorkerLease` reports the runs of this worker. The reports have
their own thread, so a long computation in the event loop does not delay them.

Takeover: processes sweep; a worker sweeps if a report says that a sweep is due. A worker without a
lease loses its runs. Before a worker shuts down, the worker hands back its runs.

Fair: the database shares a worker's places among tenants. So each claim tells the database the
tenants of this worker's runs, and the tenants of the runs that ended here in the last second.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from uuid import UUID

import asyncpg

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.engine.claim import ClaimedRun, ClaimReader, hand_back
from bottega.events.listener import happens
from bottega.logger import Logger
from bottega.services import background

POLL_S = 2.0
_MOST = 20  # maximum number of runs of a claim
_CLAIM_S = 3.0  # timeout; after 5 s, a sweep queues the runs of a claim again
_PAUSE_S = 0.005  # seconds from the end of a run to the next claim: several ends cause one claim
_RECENT_S = 1.0  # seconds for which p_ended of claim() names the tenant of a run that has ended
_CLAIM = "SELECT c.*, claimed_run(c.tenant, c.run) AS claim FROM claim($1, $2, $3, $4, $5) AS c"

logger = Logger(__name__)


async def sweep(pool: asyncpg.Pool, lease_s: float) -> int:
    """Call the SQL function ``sweep``, then maintain the database.

    Return how many runs were queued; 0 if a different process sweeps or has just swept.
    """
    count: int | None = await pool.fetchval("SELECT sweep($1)", lease_s)
    if count:
        logger.warning("queue.swept", runs=count)
    if count is not None:
        try:
            await pool.execute("SELECT do_upkeep()")
        except Exception as error:  # takeovers must not depend on the upkeep
            logger.warning("queue.upkeep_failed", error=str(error), kind=type(error).__name__)
    return count or 0


async def sweep_regularly(
    pool: asyncpg.Pool, lease_s: float, due: asyncio.Event | None = None
) -> None:
    """Sweep at once, and whenever ``due`` is set; without ``due``, four times in each lease."""
    while True:
        await sweep(pool, lease_s)
        if due is None:
            await asyncio.sleep(lease_s / 4)
        else:
            await due.wait()
            due.clear()


class RunClaimer:
    """Object that claims runs for this worker's free places, and executes these runs.

    Args:
        execute: executes one run. Returns true if the run's tenant may have more due runs. An error
            is logged and, unless it is transient, counts as a crash of the run.
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
        self._ended: dict[UUID, float] = {}  # when a tenant's last run ended here
        self._wake = asyncio.Event()
        self.poll_s = POLL_S  # infinite while the worker does not listen

    def notice(self, payload: str | None) -> None:
        """Claim at once if the payload is this worker's id or ``None`` (signals may be lost)."""
        if payload in (None, str(self.worker_id)):
            self._wake.set()

    def claims_own(self) -> bool:
        """Claim at once if runs have just ended here; false: a worker needs a signal to claim."""
        ended_lately = any(at > monotonic() - _RECENT_S for at in self._ended.values())
        if claims := ended_lately and not self._is_nearly_full():
            self._wake.set()
        return claims

    def _is_nearly_full(self) -> bool:
        return len(self._active) >= self._places() * 4 // 5  # the last fifth: see queue.sql

    async def run(self, stop: asyncio.Event) -> None:
        async def wake_at_stop() -> None:
            await stop.wait()
            self._wake.set()

        async with background(wake_at_stop):
            while not stop.is_set():
                self._wake.clear()
                pause_s = POLL_S
                try:
                    pause_s = 2 * _PAUSE_S if await self._claim() else self.poll_s
                except Exception as error:  # a sweep finds runs of a failed claim
                    logger.warning("queue.claim_failed", error=repr(error))
                await happens(self._wake, pause_s * random.uniform(0.8, 1.2))  # noqa: S311

    async def finish(self, grace_s: float) -> None:
        """Wait ``grace_s`` seconds for runs to end. Then cancel, and so hand back, the rest."""
        if self._active:
            await asyncio.wait(self._active, timeout=grace_s)
        for task in (tasks := list(self._active)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _claim(self) -> bool:
        """Claim and begin runs. Return true if this worker may soon claim more runs."""
        tenants = [run.tenant_id for run in self._active.values()]
        places, began = self._places(), monotonic()
        self._ended = {tenant: at for tenant, at in self._ended.items() if at > began - _RECENT_S}
        async with asyncio.timeout(_CLAIM_S):
            rows = await self._pool.fetch(
                _CLAIM, self.worker_id, _MOST, places, tenants, list(self._ended), timeout=_CLAIM_S
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
        was_full = self._is_nearly_full()
        self._ended[self._active.pop(task).tenant_id] = monotonic()
        failed = task.cancelled() or task.exception() is not None
        if was_full or failed or task.result():
            asyncio.get_running_loop().call_later(_PAUSE_S, self._wake.set)

    async def _carry_out(self, run: ClaimedRun) -> bool:
        try:
            return await self._execute(run)
        except Exception as error:
            logger.exception("run.abandoned", run_id=str(run.run_id))
            if not is_transient(error):  # after a transient error, the sweep queues the run again
                await hand_back(self._pool, run, "crash")
            return True
