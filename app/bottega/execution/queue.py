"""The queue: assigns runs to workers. It never holds a run's state.

Its rows, in ``run_queue``, are the runs that a worker may take. The statements that change a run's
state also change its row (``accept_run``, ``take_runs``, ``append_steps``, ``hand_back``). The
sweep finds runs that no worker executes and that have no row.

A notice of a queued run names one worker, which takes it at once. The others look a little later,
in case that one is full or dead. So a run costs one take, however many workers there are.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from uuid import UUID

import asyncpg
import structlog

from bottega.events.listener import NotifyListener, happens
from bottega.events.log import is_transient
from bottega.events.wakeups import background
from bottega.execution.claim import ClaimedRun, Claims
from bottega.execution.leases import lease_s

CHANNEL = "bottega_queue"
_BATCH = 20
_LOOK_S = 0.5
"""Longest time until a worker looks for runs that another one was to take."""

log = structlog.get_logger(__name__)

Execute = Callable[[ClaimedRun], Awaitable[None]]
"""A function that executes one claimed run."""


async def sweep(pool: asyncpg.Pool, takeover_s: float) -> int:
    """Queue unfinished runs again that no live worker executes; return their number.

    It also ends runs that waited too long, fills free slots and deletes old rows, a page at a time.
    Return 0 if another process is sweeping or has just swept.
    """
    lost: int = await pool.fetchval("SELECT sweep($1)", lease_s(takeover_s)) or 0
    if lost:
        log.warning("queue.swept", runs=lost)
    return lost


async def sweep_regularly(pool: asyncpg.Pool, takeover_s: float) -> None:
    """Sweep at once and then three times in ``takeover_s`` seconds, until cancelled."""
    while True:
        try:
            await sweep(pool, takeover_s)
        except Exception as error:
            if not is_transient(error):
                log.exception("queue.sweep_failed")
        await asyncio.sleep(takeover_s / 3)


async def work(
    listener: NotifyListener,
    claims: Claims,
    execute: Execute,
    *,
    concurrency: int,
    poll_s: float,
    grace_s: float,
    stop: asyncio.Event,
    resting: Callable[[], int] = lambda: 0,
) -> None:
    """Take runs from the queue and execute them until ``stop`` is set.

    Then running ones have ``grace_s`` seconds to end. After that they are cancelled, which hands
    them back. If the database is away, running ones go on: the fence of each decides who may write.

    Args:
        execute: its errors are logged; the sweep queues the run again.
        poll_s: longest time between two looks into the queue; notices are faster.
        resting: returns the number of runs here that only wait for other runs; as many more may
            run beside them, so that those get a place.
    """
    taker = _Taker(claims, execute, concurrency, poll_s, stop, resting)
    listener.subscribe(CHANNEL, taker.notice)
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
        claims: Claims,
        execute: Execute,
        concurrency: int,
        poll_s: float,
        stop: asyncio.Event,
        resting: Callable[[], int],
    ) -> None:
        self.executing: dict[tuple[UUID, int], asyncio.Task[None]] = {}
        self._claims = claims
        self._execute = execute
        self._concurrency = concurrency
        self._poll_s = poll_s
        self._stop = stop
        self._resting = resting
        self._wanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    async def stop_waiting(self) -> None:
        """Wake :meth:`take` when it is to stop."""
        await self._stop.wait()
        self._wake.set()

    def notice(self, payload: str | None) -> None:
        """Look for runs: at once, or a little later if the notice names another worker."""
        if payload in (None, "", str(self._claims.worker_id)):
            self._look()
        elif self._timer is None:
            # Jitter, so that workers do not look at the same time.
            wait_s = _LOOK_S * random.uniform(0.8, 1)  # noqa: S311
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self._wanted = True
        self._wake.set()

    async def take(self) -> None:
        """Take runs until ``stop`` is set."""
        self._look()
        while not self._stop.is_set():
            self._wake.clear()
            room = self._concurrency - len(self.executing) + self._resting()
            if self._wanted and room > 0:
                self._look_now()
                runs, more = await self._claims.take(min(_BATCH, room))
                if more:
                    self._look()
                for run in runs:
                    self._begin(run)
            elif not await happens(self._wake, self._poll_s * random.uniform(0.5, 1)):  # noqa: S311
                self._wanted = True

    def _look_now(self) -> None:
        """Answer all notices so far by the look that follows."""
        self._wanted = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, run: ClaimedRun) -> None:
        key = run.run_id, run.attempt
        task = self.executing[key] = asyncio.ensure_future(self._execute(run))
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[UUID, int], task: asyncio.Task[None]) -> None:
        if self._wanted:
            self._wake.set()
        del self.executing[key]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Exception) and is_transient(error):
            log.warning("run.abandoned", run_id=str(key[0]), error=str(error))
        else:
            log.error("run.abandoned", run_id=str(key[0]), exc_info=error)
