"""The queue: assigns runs to workers. It never holds a run's state.

Its rows, in ``run_queue``, are the runs that a worker may take. The statements that change a run's
state also change its row (``accept_run``, ``take_runs``, ``append_steps``, ``hand_back``). The
sweep finds runs that no worker executes and that have no row.

A notice of a queued run names one worker, which takes it at once: the first that is not busy, so
that as few workers as the load needs execute runs, and store their steps together. The others look
a little later for what is left, in case that one is full or dead; then it counts as busy.

A full worker still takes one run of each tenant that has none in it, while :meth:`Load.reserve`
allows.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from uuid import UUID

import asyncpg
import structlog

from bottega.events.listener import NotifyListener, happens
from bottega.events.log import is_transient
from bottega.events.wakeups import background
from bottega.execution.claim import ClaimedRun, Claims
from bottega.execution.load.leases import Load, lease_s

CHANNEL = "bottega_queue"
_BATCH = 20
_LOOK_S = 0.5
"""Longest time until a worker looks for runs that another one was to take."""
_FRUITLESS_S = 0.05
"""Pause of a full worker between looks for other tenants' runs that find none."""
_TURN_S = 0.01
"""Pause of a busy worker before it takes more, so that others come first."""

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
    load: Load,
    *,
    poll_s: float,
    grace_s: float,
    stop: asyncio.Event,
) -> None:
    """Take runs from the queue and execute them until ``stop`` is set.

    Then running ones have ``grace_s`` seconds to end. After that they are cancelled, which hands
    them back. If the database is away, running ones go on: the fence of each decides who may write.

    Args:
        execute: its errors are logged; the sweep queues the run again.
        load: of this worker; its lease reports it, too.
        poll_s: longest time between two looks into the queue; notices are faster.
    """
    taker = _Taker(claims, execute, load, poll_s, stop)
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
    load.stop()
    await claims.leave()
    if taker.executing:
        await asyncio.wait(taker.executing.values(), timeout=grace_s)
    if left := list(taker.executing.values()):
        for task in left:
            task.cancel()
        await asyncio.wait(left)


class _Others:
    """Looks of a full worker for runs of tenants that have none in it.

    Attributes:
        wanted: whether there may be some.
        instead: the worker that should have taken them, if the look is for it.
        rested: false for a moment after a look that found none.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.instead: str | None = None
        self.rested = True

    def want(self, instead: str | None) -> None:
        """Order a look; one for no other worker finds the newest runs, too."""
        if not self.wanted or instead is None:
            self.instead = instead
        self.wanted = True

    def rest(self, wake: Callable[[], None]) -> None:
        """Order no look for a moment."""
        self.rested = False

        def end() -> None:
            self.rested = True
            wake()

        asyncio.get_running_loop().call_later(_FRUITLESS_S, end)


class _Taker:
    """The loop that takes runs from the queue while there is room for them."""

    def __init__(
        self, claims: Claims, execute: Execute, load: Load, poll_s: float, stop: asyncio.Event
    ) -> None:
        self.executing: dict[tuple[UUID, int], asyncio.Task[None]] = {}
        self._claims = claims
        self._execute = execute
        self._poll_s = poll_s
        self._stop = stop
        self._load = load
        self._tenants: Counter[UUID] = Counter()
        self._wanted = False
        self._instead: str | None = None
        self._others = _Others()
        self._left_to: str | None = None
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
        else:
            self._left_to = payload
            if self._timer is None:
                self._look_later()

    def _look_later(self) -> None:
        """Look for what the worker that was named last leaves, and for no newer runs."""
        instead, self._left_to = self._left_to, None
        # Jitter, so that workers do not look at the same time.
        wait_s = _LOOK_S * random.uniform(0.8, 1)  # noqa: S311
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(wait_s, self._look_instead, instead)

    def _look_instead(self, instead: str | None) -> None:
        self._timer = None
        if self._left_to is not None:  # runs that came meanwhile are too new for this look
            self._look_later()
        self._look_on(instead)

    def _look_on(self, instead: str | None) -> None:
        if not self._wanted:
            self._instead = instead
        self._want(instead)

    def _look(self) -> None:
        self._instead = None
        self._want(None)

    def _want(self, instead: str | None) -> None:
        self._wanted = True
        self._others.want(instead)
        self._wake.set()

    async def take(self) -> None:
        """Take runs until ``stop`` is set."""
        self._look()
        while not self._stop.is_set():
            self._wake.clear()
            room = self._load.room(len(self.executing))
            if self._wanted and room > 0:
                instead = self._look_now()
                spare = self._load.spare(len(self.executing))
                runs, more = await self._claims.take(min(_BATCH, room), spare, instead)
                if more:
                    self._look_on(instead)
                self._load.begin(len(runs))
                for run in runs:
                    self._begin(run)
                if more and len(runs) >= spare:
                    await asyncio.sleep(_TURN_S)
            elif room <= 0 and self._others.wanted and self._others.rested:
                await self._take_of_others()
            elif not await happens(self._wake, self._poll_s * random.uniform(0.5, 1)):  # noqa: S311
                self._look()

    async def _take_of_others(self) -> None:
        """Take a run of each tenant without one here, although all places are taken."""
        self._others.wanted = False
        if reserve := self._load.reserve(len(self.executing)):
            most, instead = min(_BATCH, reserve), self._others.instead
            runs, _ = await self._claims.take(most, 0, instead, self._tenants.keys())
            for run in runs:
                self._begin(run)
            if runs:
                self._others.want(instead)
                await asyncio.sleep(_TURN_S)
            else:
                self._others.rest(self._wake.set)

    def _look_now(self) -> str | None:
        """Answer all notices so far by the look that follows; return whom it replaces."""
        self._wanted = self._others.wanted = False
        if self._timer is not None and self._instead is None:
            self._timer.cancel()
            self._timer = self._left_to = None
        return self._instead

    def _begin(self, run: ClaimedRun) -> None:
        key = run.run_id, run.attempt
        task = self.executing[key] = asyncio.ensure_future(self._execute(run))
        self._tenants[run.tenant_id] += 1
        task.add_done_callback(lambda done: self._ended(run.tenant_id, key, done))

    def _ended(self, tenant_id: UUID, key: tuple[UUID, int], task: asyncio.Task[None]) -> None:
        del self.executing[key]
        self._tenants[tenant_id] -= 1
        if not self._tenants[tenant_id]:
            del self._tenants[tenant_id]
        if self._wanted:
            self._others.want(None)
            self._wake.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Exception) and is_transient(error):
            log.warning("run.abandoned", run_id=str(key[0]), error=str(error))
        else:
            log.error("run.abandoned", run_id=str(key[0]), exc_info=error)
