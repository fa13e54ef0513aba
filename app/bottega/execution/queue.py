"""The queue: assigns runs to workers. It never holds a run's state.

The engine is pgqueuer: its table, and its statements to add rows and to take them (by priority, one
worker per row, stale rows again). The statements that change a run's state also change its row
(``claim_run``, ``append_step``, ``hand_back``), so the two do not disagree for long. The sweep
finds runs without a row.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import structlog
from pgqueuer.adapters.drivers.asyncpg import AsyncpgPoolDriver
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment, QueryQueueBuilder
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.domain.models import Job
from pgqueuer.domain.settings import DBSettings, Durability
from pgqueuer.domain.types import QueueEntrypoint, QueueManagerId
from pgqueuer.ports.repository import EntrypointExecutionParameter
from pydantic_core import from_json

from bottega.events.listener import NotifyListener
from bottega.events.log import is_transient
from bottega.events.wakeups import background

ENGINE = DBSettings(db_schema="pgqueuer", durability=Durability.balanced)
ENTRYPOINT = "run"
_BATCH = 10
_DEQUEUE_S = 5.0
"""Longest time of one dequeue. After that, the connection is half dead, or its rows are stale."""
_ENTRYPOINTS = {QueueEntrypoint(ENTRYPOINT): EntrypointExecutionParameter(concurrency_limit=0)}

log = structlog.get_logger(__name__)

Execute = Callable[[UUID, UUID], Awaitable[None]]
"""A function that executes one run, given its tenant and its id."""


def _queries(pool: asyncpg.Pool) -> Queries:
    return Queries(
        AsyncpgPoolDriver(pool), QueryBuilderEnvironment(ENGINE), QueryQueueBuilder(ENGINE)
    )


async def sweep(pool: asyncpg.Pool) -> int:
    """Requeue unfinished runs without a live queue entry; return their number.

    It also ends runs that waited too long, fills free slots and deletes old rows, a page at a time.
    Only one process sweeps at a time; the others return 0.
    """
    lost: int = await pool.fetchval("SELECT sweep()") or 0
    if lost:
        log.warning("queue.swept", runs=lost)
    return lost


async def sweep_regularly(pool: asyncpg.Pool, every_s: float) -> None:
    """Sweep at once and then every ``every_s`` seconds, until cancelled."""
    while True:
        try:
            await sweep(pool)
        except Exception as error:
            if not is_transient(error):
                log.exception("queue.sweep_failed")
        await asyncio.sleep(every_s)


async def work(
    pool: asyncpg.Pool,
    listener: NotifyListener,
    execute: Execute,
    *,
    concurrency: int,
    takeover_s: float,
    grace_s: float,
    stop: asyncio.Event,
) -> None:
    """Take runs from the queue and execute them until ``stop`` is set.

    Then running ones have ``grace_s`` seconds to end. After that they are cancelled, which hands
    them back. While the database is away, running ones go on: the fence of each run decides who may
    write.

    Args:
        execute: its errors are logged; the run's row goes stale and is taken again.
        takeover_s: approximate time until a dead worker's runs are taken over.
    """
    taker = _Taker(pool, execute, concurrency, takeover_s, stop)
    listener.subscribe(ENGINE.channel, taker.wake)
    async with background(taker.stop_waiting):
        while not stop.is_set():
            try:
                await taker.take()
            except Exception as error:
                log.warning("queue.take_failed", error=str(error), kind=type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await stop.wait()
    if taker.executing:
        await asyncio.wait(taker.executing.values(), timeout=grace_s)
    if left := list(taker.executing.values()):
        for task in left:
            task.cancel()
        await asyncio.wait(left)


class _Taker:
    """The loop that takes runs from the queue while there is room for them."""

    def __init__(
        self,
        pool: asyncpg.Pool,
        execute: Execute,
        concurrency: int,
        takeover_s: float,
        stop: asyncio.Event,
    ) -> None:
        self._queries = _queries(pool)
        self.executing: dict[UUID, asyncio.Task[None]] = {}
        self._execute = execute
        self._concurrency = concurrency
        self._batch = max(1, min(_BATCH, concurrency // 2))  # a small one spreads the runs evenly
        # Half of the time until a heartbeat is stale, a third until the next poll.
        self._stale_after = timedelta(seconds=takeover_s / 2)
        self._poll_s = takeover_s / 3
        self._me = QueueManagerId(uuid4())
        self._stop = stop
        self._wake = asyncio.Event()

    async def stop_waiting(self) -> None:
        """Wake :meth:`take` when it is to stop."""
        await self._stop.wait()
        self._wake.set()

    def wake(self, payload: str | None) -> None:
        """Look for runs, because of a notification."""
        self._wake.set()

    async def take(self) -> None:
        """Take runs until ``stop`` is set."""
        while not self._stop.is_set():
            self._wake.clear()
            wanted = min(self._batch, self._concurrency - len(self.executing))
            if wanted > 0:
                async with asyncio.timeout(_DEQUEUE_S):
                    jobs = await self._queries.dequeue(
                        wanted, _ENTRYPOINTS, self._me, None, self._stale_after
                    )
                for job in jobs:
                    self._begin(job)
                if len(jobs) == wanted:
                    continue  # there may be more
            with contextlib.suppress(TimeoutError):
                # Jitter, so that workers do not poll at the same time.
                async with asyncio.timeout(self._poll_s * random.uniform(0.5, 1)):  # noqa: S311
                    await self._wake.wait()

    def _begin(self, job: Job) -> None:
        """Execute a run, unless it is being executed here already (its heartbeat was late)."""
        ids = from_json(job.payload or b"")
        run_id = UUID(ids["run"])
        if run_id in self.executing:
            return
        task = asyncio.ensure_future(self._execute(UUID(ids["tenant"]), run_id))
        self.executing[run_id] = task
        task.add_done_callback(lambda done: self._ended(run_id, done))

    def _ended(self, run_id: UUID, task: asyncio.Task[None]) -> None:
        if len(self.executing) == self._concurrency:
            self._wake.set()
        del self.executing[run_id]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Exception) and is_transient(error):
            log.warning("run.abandoned", run_id=str(run_id), error=str(error))
        else:
            log.error("run.abandoned", run_id=str(run_id), exc_info=error)
