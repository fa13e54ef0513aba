"""The lease of a worker: it renews it, names the runs that it executes, and learns which it lost.

With it the worker reports whether it is busy: then others are named for new runs.

This happens in a thread with its own event loop and connection. So a busy main loop (a long fold, a
tool that computes) does not make runs look abandoned.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol
from uuid import UUID

import structlog

from bottega.clock import monotonic
from bottega.db.sessions import ListenSession
from bottega.events.listener import Connect, keep_connected

log = structlog.get_logger(__name__)

_RENEW = "SELECT renew_lease($1, $2, $3, $4, $5, $6) AS id"
_WINDOW_S = 0.5
_STRAINED_ABOVE, _RESTED_BELOW = 0.85, 0.7
_MOST_AT_ONCE = 20


class Held(NamedTuple):
    """A run that a worker executes."""

    tenant_id: UUID
    run_id: UUID
    attempt: int


class Holder(Protocol):
    """Executor of the runs that a lease is for."""

    def held(self) -> Sequence[Held]:
        """Return the runs that are executed here; called in another thread."""

    def lose(self, run: Held) -> None:
        """Stop a run that ended or that another worker has."""


def lease_s(takeover_s: float) -> float:
    """Return the seconds that a lease holds, for a takeover within ``takeover_s`` seconds."""
    return takeover_s / 2


def is_strained(was: bool, share: float) -> bool:
    """Return true if a worker that uses this share of a core should get no new runs.

    Args:
        was: the last answer; one that was strained must rest first.
    """
    return share > (_RESTED_BELOW if was else _STRAINED_ABOVE)


def spare_of(runs: int, places: int, begun: int, usual: int, *, strained: bool) -> int:
    """Return the number of new runs that a worker should get before others do.

    It gets as many as it has places for: few workers store many steps together. At once it gets few
    more than usual, since its use of the core is known only afterwards.

    Args:
        runs: under way here.
        begun: runs that began in this half second.
        usual: those that began in the one before, and did not strain it.
    """
    burst = max(_MOST_AT_ONCE, 2 * usual) - begun
    return 0 if strained else max(0, min(places - runs, burst))


class Load:
    """Load of this worker; made and measured in the thread of its event loop.

    Args:
        places: number of runs that it may execute, without the reserve.
        resting: returns the number of runs here that only wait for other runs; as many more may
            run beside them, so that those get a place. Called in the event loop's thread only.
    """

    def __init__(self, places: int, resting: Callable[[], int] = lambda: 0) -> None:
        self._places = places
        self._count_resting, self._resting = resting, 0
        self._loop = asyncio.get_running_loop()
        self._since, self._cpu_s = monotonic(), time.thread_time()
        self._begun = self._usual = 0
        self._strained = False
        self._is_asked = self._is_stopped = False

    def room(self, runs: int) -> int:
        """Return the number of runs that may begin beside so many."""
        self._resting = self._count_resting()
        return self._places - runs + self._resting

    def reserve(self, runs: int) -> int:
        """Return the number of runs that may begin beyond all places, of tenants without one here.

        So no tenant that fills a worker, for instance with tools that hang, keeps all others out.
        """
        return max(0, self.room(runs) + (self._places + 1) // 2)

    def begin(self, runs: int) -> None:
        """Count runs that begin."""
        self._begun += runs

    def spare(self, runs: int) -> int:
        """Measure; return the number of new runs that this worker should get before others do."""
        now, cpu_s = monotonic(), time.thread_time()
        if (took_s := now - self._since) >= _WINDOW_S:
            self._strained = is_strained(self._strained, (cpu_s - self._cpu_s) / took_s)
            self._usual = 0 if self._strained else self._begun
            self._since, self._cpu_s, self._begun = now, cpu_s, 0
        self._resting = self._count_resting()
        return self._spare(runs)

    def stop(self) -> None:
        """Count as busy from now on: this worker takes no more runs."""
        self._is_stopped = True

    def is_busy(self, runs: int) -> bool:
        """Return true if others should get new runs; called regularly in the lease's thread.

        It is true, too, if the event loop has stood still since the last call.
        """
        stands_still, self._is_asked = self._is_asked, True
        self._loop.call_soon_threadsafe(self._answer)
        return self._is_stopped or stands_still or self._spare(runs) == 0

    def _spare(self, runs: int) -> int:
        left = runs - self._resting
        return spare_of(left, self._places, self._begun, self._usual, strained=self._strained)

    def _answer(self) -> None:
        self._is_asked = False
        self.spare(0)


@asynccontextmanager
async def leases(
    connect: Connect,
    worker_id: UUID,
    holder: Holder,
    takeover_s: float,
    load: Load,
) -> AsyncIterator[None]:
    """Renew the lease of this worker during the block.

    Args:
        worker_id: of this process; a new process is another worker.
        load: of this worker; the lease reports it.
    """
    ours = asyncio.get_running_loop()

    every_s = lease_s(takeover_s) / 3

    async def renew(connection: ListenSession) -> None:
        while True:
            runs = holder.held()
            parts = [list(part) for part in zip(*runs, strict=True)] or [[], [], []]
            about = worker_id, lease_s(takeover_s), *parts, load.is_busy(len(runs))
            rows = await connection.fetch(_RENEW, *about, timeout=every_s)
            alive = {row["id"] for row in rows}
            for run in runs:
                if run.run_id not in alive:
                    ours.call_soon_threadsafe(holder.lose, run)
            await asyncio.sleep(every_s)

    loop = asyncio.new_event_loop()
    renewing = loop.create_task(_keep(connect, renew, every_s))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(loop):
            loop.run_until_complete(renewing)

    thread = threading.Thread(target=run, name="leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(renewing.cancel)
        await asyncio.to_thread(thread.join)


async def _keep(
    connect: Connect, renew: Callable[[ListenSession], Awaitable[None]], longest_s: float
) -> None:
    while True:
        try:
            await keep_connected(connect, renew, longest_s)
        except Exception:
            log.exception("leases.broken")
        await asyncio.sleep(1)
