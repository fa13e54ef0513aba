"""Leased work: rows that wait in the database until their time, done by the first free worker.

A worker claims due rows by moving their time into the future: that is the lease. It does them
without an open transaction, and stores the results. If it dies, another one claims them at that
time.

- :class:`WorkLoop` calls some work when a row may be due: at a NOTIFY, at the next due time, and
  after a slow poll for missed notifications. These are only hints: the rows and the database's
  clock decide.
- :class:`LeasedWork` is the work: claim rows, do them per tenant, split a batch that fails, pause
  while a service is down, return the seconds until the next row is due.

Work without batches calls :func:`seconds_until_due` itself: webhooks keep several deliveries open
between two claims, and a schedule's lock and start are one transaction.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import monotonic
from bottega.events.listener import NotifyListener
from bottega.events.log import is_transient

_AGAIN_S = 1.0
_APART_S = 1.0
"""Least time between two calls of :meth:`WorkLoop.wake_soon`, so that rows are done together."""
_LEAST_S = 0.05  # due rows that cannot be claimed are another worker's
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

log = structlog.get_logger(__name__)


class WorkLoop:
    """A loop that calls ``act`` at the start, at every ring, and at every due time.

    Args:
        channel: notifications on it wake the loop; see :func:`wake_on_notify`.
        act: does the due work; returns the seconds until more is due.
        poll_s: longest time between two calls.
        first_s: seconds from the start to the first call, if no ring comes before.
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
        self._act = act
        self._poll_s = poll_s
        self._first_s = first_s
        self._awake = asyncio.Event()
        self._woken_at = float("-inf")
        self._soon: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self._awake.set()

    def on_notice(self, payload: str | None) -> None:
        """Wake at a notification; its payload does not matter."""
        self.wake()

    def wake_soon(self) -> None:
        """Wake the loop, but once a second at most: rows that come in between are done together."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._woken_at + _APART_S)
            self._soon = loop.call_at(at, self._wake_now)

    def _wake_now(self) -> None:
        self._soon = None
        self._woken_at = asyncio.get_running_loop().time()
        self.wake()

    async def run(self) -> None:
        """Run until cancelled. Errors of ``act`` are logged."""
        pause = self._first_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, self._poll_s)):
                    await self._awake.wait()
            self._awake.clear()
            pause = _AGAIN_S
            try:
                pause = max(_LEAST_S, await self._act())
            except Exception as error:
                if not is_transient(error):
                    log.exception("alarm.failed", channel=self.channel)


def wake_on_notify(listener: NotifyListener, *loops: WorkLoop) -> None:
    """Wake each loop at notifications on its channel."""
    for loop in loops:
        listener.subscribe(loop.channel, loop.on_notice)


async def seconds_until_due(pool: asyncpg.Pool, query: str, *args: Any) -> float:
    """Return a query's seconds until the next row is due, at least 0; infinite for NULL."""
    seconds: float | None = await pool.fetchval(query, *args)
    return float("inf") if seconds is None else max(0.0, seconds)


class Outage:
    """Pauses in the use of a service that is down, each twice as long as the last."""

    def __init__(self, event: str, clock: Callable[[], float]) -> None:
        self._event = event
        self._clock = clock
        self._pause_s = 0.0
        self._until = float("-inf")

    def left_s(self) -> float:
        """Return the seconds until the service is used again; 0 if it may be used now."""
        return max(0.0, self._until - self._clock())

    def next_pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))

    def pause(self, error: Exception) -> float:
        """Begin the next pause; return its seconds."""
        if not self._pause_s:
            log.warning(self._event, error=str(error))
        self._pause_s = self.next_pause_s()
        self._until = self._clock() + self._pause_s
        return self._pause_s

    def end(self) -> None:
        """Note that the service works: the next pause is the shortest again."""
        self._pause_s = 0.0


class Blame(Enum):
    """Cause of a failure: one of the rows, or a service that all of them need."""

    ROW = "row"
    SERVICE = "service"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedWork:
    """Rows of all tenants that are due, and the work on them.

    Any number of processes may do it concurrently.

    Attributes:
        claim: query that leases due rows and returns them with their ``tenant_id``.
        limits: its arguments: seconds of the lease, most rows, and the like.
        next_s: query of the seconds until the next row is due.
        do: does rows of one tenant, and stores the results.
        blame: cause of an error of ``do``; ``None``: raise it, the lease ends by itself.
        put_off: stores the failure of a single row, or of all rows if a service is down.
        outage: the pauses of that service.
        tenants_at_once: tenants whose rows are done concurrently.
        longest_rest_s: longest pause after some work. It lasts as long as the work: half of the
            time is left to others.
    """

    pool: asyncpg.Pool
    claim: str
    limits: tuple[float, ...]
    next_s: str
    do: Callable[[UUID, Sequence[asyncpg.Record]], Awaitable[None]]
    blame: Callable[[Exception], Blame | None] = lambda _: None
    put_off: Callable[[UUID, Sequence[asyncpg.Record], Exception], Awaitable[None]] | None = None
    outage: Outage | None = None
    tenants_at_once: int = 1
    longest_rest_s: float = 0.0
    clock: Callable[[], float] = monotonic
    _failed_at: dict[UUID, float] = field(default_factory=dict, init=False)

    async def do_due(self) -> float:
        """Claim some due rows and do them; return the seconds until more are due."""
        if self.outage is not None and (left_s := self.outage.left_s()):
            return left_s
        began = self.clock()
        rows = await self.pool.fetch(self.claim, *self.limits)
        if not rows:
            return await seconds_until_due(self.pool, self.next_s)
        error = await self._do_all(rows)
        if error is None:
            self._failed_at.clear()
        if self.outage is not None:
            if error is not None:
                return self.outage.pause(error)
            self.outage.end()
        return min(self.longest_rest_s, self.clock() - began)

    async def _do_all(self, rows: Sequence[asyncpg.Record]) -> Exception | None:
        """Do the rows of several tenants; return the first error of a tenant without success.

        If the service fails for all tenants that are tried at once, it is down for the others. They
        go first the next time.
        """
        of_tenant: dict[UUID, list[asyncpg.Record]] = defaultdict(list)
        for row in rows:
            of_tenant[row["tenant_id"]].append(row)
        tenants = sorted(of_tenant, key=lambda each: self._failed_at.get(each, float("-inf")))
        failed: Exception | None = None
        down: Exception | None = None
        for start in range(0, len(tenants), self.tenants_at_once):
            some = tenants[start : start + self.tenants_at_once]
            if down is not None:
                for each in some:
                    await self._put_off(each, of_tenant[each], down)
                continue
            errors = await asyncio.gather(
                *(self._do_or_put_off(each, of_tenant[each]) for each in some)
            )
            for each, error in zip(some, errors, strict=True):
                if error is not None:
                    self._failed_at[each] = self.clock()
                    failed = failed or error
            if all(error and self.blame(error) is Blame.SERVICE for error in errors):
                down = errors[0]
        return failed

    async def _do_or_put_off(
        self, tenant_id: UUID, rows: Sequence[asyncpg.Record]
    ) -> Exception | None:
        """Do rows of a tenant; return the error if all of them fail."""
        try:
            await self.do(tenant_id, rows)
            return None
        except Exception as caught:
            blame = self.blame(caught)
            if blame is None:
                raise
            error = caught
        if blame is Blame.ROW and len(rows) > 1:  # find the row that fails
            errors = [await self._do_or_put_off(tenant_id, [row]) for row in rows]
            return error if all(errors) else None
        await self._put_off(tenant_id, rows, error)
        return error

    async def _put_off(
        self, tenant_id: UUID, rows: Sequence[asyncpg.Record], error: Exception
    ) -> None:
        assert self.put_off is not None, "errors are blamed, but nothing stores the failure"
        await self.put_off(tenant_id, rows, error)
