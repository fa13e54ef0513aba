"""Leased work: each row of a table is work with a due time, and the first free worker does it.

To claim due rows, a worker sets the rows' due time to the end of the lease. The worker then does
the work of these rows without an open transaction, and stores the results. If the worker dies,
another worker claims the rows at the end of the lease.

- :class:`LeasedWork` claims due rows and does their work. The SQL function ``claim_due`` gives each
  tenant its turn. A process works on a limited number of a tenant's rows at a time, so a row whose
  work hangs delays only rows of the same tenant.
- :class:`WorkLoop` calls a function when a NOTIFY arrives, at the next due time, and regularly,
  because a NOTIFY may be lost. The function then asks the database which rows are due.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from uuid import UUID

import asyncpg

from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.errors import DatabaseAwayError, ModelError, UnavailableError
from bottega.events.listener import NotifyListener
from bottega.logger import Logger

_MOST = 64
"""Maximum number of rows in one claim, so that work begins before all rows are claimed."""

_CLAIM = "SELECT * FROM claim_due($1, $2, $3, $4, $5, $6, $7)"
_NEXT = "SELECT next_due_s($1, $2)"

log = Logger(__name__)


class WorkLoop:
    """A loop that calls ``act`` at the start, at each wake-up, and at each due time.

    If a service is down, the loop pauses: first 1 s, then twice as long each time, up to 60 s.

    Args:
        channel: notifications on this channel wake the loop; see :func:`wake_on_notify`.
        act: a function that does the due work and returns the seconds until more work is due.
            ``act`` raises ``ModelError`` or ``UnavailableError`` if a service is down.
        poll_s: maximum number of seconds between two calls. While the process rests, this limit
            does not apply, because other processes poll.
        first_s: seconds from the start to the first call, unless a wake-up comes earlier.

    Attributes:
        rests: returns true while the process rests: it then needs no notifications.
    """

    def __init__(
        self,
        channel: str,
        act: Callable[[], Awaitable[float]],
        *,
        poll_s: float = 30.0,
        first_s: float = 0.0,
    ) -> None:
        self.channel = channel
        self.rests: Callable[[], bool] = lambda: False
        self._act = act
        self._poll_s = poll_s
        self.first_s = first_s
        self._awake = asyncio.Event()
        self._woken_at = float("-inf")
        self._soon: asyncio.TimerHandle | None = None
        self._pause_s = 0.0

    def wake(self) -> None:
        self._awake.set()

    def on_notice(self, payload: str | None) -> None:
        """Wake the loop, unless the process rests and the payload is ``None``: a rest has begun."""
        if payload is not None or not self.rests():
            self.wake()

    def wake_soon(self) -> None:
        """Wake the loop, but at most every half second, to collect several rows for a batch."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._woken_at + 0.5)
            self._soon = loop.call_at(at, self._wake_now)

    def _wake_now(self) -> None:
        self._soon = None
        self._woken_at = asyncio.get_running_loop().time()
        self.wake()

    async def run(self) -> None:
        """Call ``act`` after each pause or wake-up, until this method is cancelled."""
        pause, self.first_s = self.first_s, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause if self.rests() else min(pause, self._poll_s)):
                    await self._awake.wait()
            self._awake.clear()
            # Wait at least 50 ms, because another worker may be claiming the due rows just now.
            pause = max(0.05, await self.act_or_pause())

    async def act_or_pause(self) -> float:
        """Call ``act``; return the seconds until the next call of ``act``."""
        try:
            left_s = await self._act()
        except DatabaseAwayError:
            raise
        except (ModelError, UnavailableError) as error:
            if not self._pause_s:
                log.warning("work.paused", error=str(error))
            self._pause_s = _next_pause_s(self._pause_s)
            return self._pause_s
        self._pause_s = 0.0
        return left_s


def wake_on_notify(listener: NotifyListener, *loops: WorkLoop) -> None:
    """Wake each loop at notifications on its channel; the loops rest while ``listener`` rests."""
    for loop in loops:
        loop.rests = listener.rests
        listener.subscribe(loop.channel, loop.on_notice)


def _next_pause_s(last_s: float) -> float:
    return min(60.0, max(1.0, 2 * last_s))


class Blame(Enum):
    """The cause of a failure: a row, or a service that all rows need."""

    ROW = "row"
    SERVICE = "service"


def blame_service(error: Exception) -> Blame | None:
    """Return ``Blame.SERVICE`` if the error means that a service is down; otherwise ``None``."""
    return Blame.SERVICE if isinstance(error, (ModelError, UnavailableError)) else None


Rows = Sequence[asyncpg.Record]
PutOff = Callable[[UUID, Rows, Exception, float | None], Awaitable[None]]
"""Function (tenant, rows, error, pause) that stores a failure of rows. If a service failed, the
pause is the number of seconds for which the tenant pauses; otherwise it is ``None``."""


@dataclass(slots=True, kw_only=True)
class LeasedWork:
    """Work on the due rows of all tenants.

    Any number of processes may do this work concurrently.

    Attributes:
        name: kind of the work for ``claim_due``.
        columns: the rows' columns with their types, except ``tenant_id``.
        lease_s: duration of a lease; it must be longer than the work on a batch.
        share: maximum number of a tenant's rows that are in progress in this process.
        places: maximum number of all tenants' rows that are in progress in this process; ``None``:
            no limit. Work that waits for external servers has no limit, because one tenant's
            hanging rows could otherwise block other tenants.
        batch: maximum number of a tenant's rows in one call of ``do``.
        do: a function that does the work of a batch of rows and stores the results.
        blame: a function that returns the cause of an error in ``do``; ``None``: the error is only
            logged.
        put_off: a function that stores a failure and a later due time of the rows; ``None``: the
            rows are due again when their leases end.
        longest_rest_s: maximum number of seconds for which a tenant pauses after a batch. The pause
            is as long as the batch took, which leaves half of the time to other tenants.
        channel, poll_s: see :class:`WorkLoop`.
        loop: the loop of this work; wake the loop when a row may be due.
    """

    pool: asyncpg.Pool
    name: str
    columns: str
    lease_s: float
    share: int
    places: int | None = None
    batch: int = 1
    do: Callable[[UUID, Sequence[asyncpg.Record]], Awaitable[None]]
    blame: Callable[[Exception], Blame | None] = blame_service
    put_off: PutOff | None = None
    longest_rest_s: float = 0.0
    channel: str = ""
    poll_s: float = 30.0
    clock: Callable[[], float] = monotonic
    loop: WorkLoop = field(init=False)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set, init=False)
    _busy: Counter[UUID] = field(default_factory=Counter, init=False)
    _pauses: dict[UUID, float] = field(default_factory=dict, init=False)
    _until: dict[UUID, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.loop = WorkLoop(self.channel, self.start_due, poll_s=self.poll_s)

    async def run(self) -> None:
        """Do the work of due rows until this method is cancelled.

        A cancellation also cancels the work in progress; its rows are due again when their leases
        end. After an error, the work in progress continues, and the method may be called again.
        """
        try:
            await self.loop.run()
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            raise

    async def do_due(self) -> float:
        """Do the work of some due rows, and wait for the end of this work.

        Include tenants that pause after a batch, but not tenants that pause because a service
        failed. Return the seconds until more rows may be due, or until the first pause ends.
        """
        self._until = {each: self._until[each] for each in self._pauses}
        left_s = await self.start_due()
        if not (self._tasks or self._until):
            return left_s
        await asyncio.gather(*self._tasks)
        return self._rest_s()

    async def start_due(self) -> float:
        """Start the work of due rows, within limits. Return the seconds until more may be due."""
        room = _MOST if self.places is None else self.places - self._busy.total()
        if room < 1:
            return float("inf")  # the loop waits until a batch ends
        self._until = {each: at for each, at in self._until.items() if at > self.clock()}
        waiting = [*self._until, *(each for each, n in self._busy.items() if n >= self.share)]
        next_s: float | None = await self.pool.fetchval(_NEXT, self.name, waiting)
        if (left_s := float("inf") if next_s is None else next_s) > 0:
            return min(left_s, self._rest_s() if self._until else left_s)
        typed = f"tenant_id uuid, {self.columns}"
        rows = await self.pool.fetch(
            f"{_CLAIM} AS ({typed})",
            *(
                self.name,
                [each.split()[0] for each in typed.split(", ")],
                self.lease_s,
                room,
                self.share,
            ),
            *([*self._busy.elements()], [*self._until]),
        )
        of_tenant: dict[UUID, list[asyncpg.Record]] = defaultdict(list)
        for row in rows:
            of_tenant[row["tenant_id"]].append(row)
        for tenant_id, due in of_tenant.items():
            for start in range(0, len(due), self.batch):
                self._begin(tenant_id, due[start : start + self.batch])
        return 0.0

    def _rest_s(self) -> float:
        """Return the seconds until the first tenant's pause ends; 0 if no tenant has a pause."""
        return max(0.0, min(self._until.values(), default=0.0) - self.clock())

    def _begin(self, tenant_id: UUID, rows: Sequence[asyncpg.Record]) -> None:
        self._busy[tenant_id] += len(rows)
        task = asyncio.ensure_future(self._do_and_rest(tenant_id, rows))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, tenant_id, len(rows)))

    def _ended(self, tenant_id: UUID, number: int, task: "asyncio.Task[None]") -> None:
        is_full = self.places is not None and self._busy.total() >= self.places
        if is_full or self._busy[tenant_id] >= self.share:
            self.loop.wake()  # due rows may have had to wait for the end of this batch
        else:
            self.loop.wake_soon()  # the batch may have set new due times
        self._busy -= Counter({tenant_id: number})
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not (isinstance(error, Exception) and is_transient(error)):
            log.error("work.failed", work=self.name, exc_info=error)

    async def _do_and_rest(self, tenant_id: UUID, rows: Sequence[asyncpg.Record]) -> None:
        began = self.clock()
        pause_s = await self._do_or_put_off(tenant_id, rows)
        if pause_s is None:
            self._pauses.pop(tenant_id, None)
            pause_s = min(self.longest_rest_s, self.clock() - began)
        else:
            self._pauses[tenant_id] = pause_s
        if pause_s:
            self._until[tenant_id] = self.clock() + pause_s

    async def _do_or_put_off(self, tenant_id: UUID, rows: Sequence[asyncpg.Record]) -> float | None:
        """Do the work of rows. If a service failed, return the tenant's new pause in seconds."""
        try:
            await self.do(tenant_id, rows)
            return None
        except Exception as caught:
            blame = self.blame(caught)
            if blame is None:
                raise
            error = caught
        if blame is Blame.ROW and len(rows) > 1:  # find the failing row
            pauses = [await self._do_or_put_off(tenant_id, [row]) for row in rows]
            return max(filter(None, pauses), default=None)
        pause_s = None
        if blame is Blame.SERVICE:
            pause_s = _next_pause_s(self._pauses.get(tenant_id, 0.0))
            if not self._pauses:
                log.warning("work.paused", work=self.name, error=str(error))
        if self.put_off is not None:
            await self.put_off(tenant_id, rows, error, pause_s)
        return pause_s
