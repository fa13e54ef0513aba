"""The lease of this worker, which regular reports extend, and the load of all workers."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import asyncpg
from pydantic_core import to_json
from sqlalchemy import RowMapping, func, select, text

from bottega import __version__
from bottega.clock import monotonic
from bottega.db.pool import AsyncConnection
from bottega.db.sessions import DatabaseSession
from bottega.events.listener import Connect, keep_connected
from bottega.services import background

_REPORT = "SELECT * FROM report($1, $2, $3, $4, $5, $6, $7)"
_LEAVE_S = 1.0
_ANY_ALIVE = "SELECT EXISTS (SELECT FROM workers WHERE leased_until > now())"
_ALIVE = text("SELECT * FROM live_workers()")


class RunLease(NamedTuple):
    """A run that a worker executes, with the number of its attempt."""

    tenant_id: UUID
    run_id: UUID
    attempt: int


class LeaseOwner(Protocol):
    """The executor of the runs for which a worker has a lease."""

    def leases(self) -> Sequence[RunLease]:
        """Return the runs that this worker executes. Another thread calls this method."""

    def lose(self, run: RunLease) -> None:
        """Stop a run that has ended in the database, or that a different worker executes."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a worker at one moment.

    Attributes:
        pool: sums over all tenants, which every tenant may see: ``size``, ``min`` and ``max`` of
            the pool; ``busy``, ``parked`` (active without a slot) and ``queued`` tasks; ``queue``
            (queued tasks by priority); ``runs`` under way.
        tenants: for each tenant with any load: ``running``, ``parked`` and ``queued`` tasks;
            ``queue``; ``breakers`` (those that are not closed, with ``run_id``, ``agent``,
            ``state``, ``failures`` and ``retry_after_ms``); ``models`` (the ``under_way`` and
            ``waiting`` calls to model servers, by ``provider`` and ``is_operators``).
    """

    pool: Mapping[str, Any]
    tenants: Mapping[UUID, Mapping[str, Any]] = field(default_factory=dict)

    def with_models(self, calls: Mapping[UUID, Sequence[Mapping[str, Any]]]) -> "Load":
        """Return this load, with the numbers of each tenant's calls to model servers added."""
        models = {tenant: {"models": each} for tenant, each in calls.items()}
        both = {**models, **self.tenants}
        return Load(
            self.pool, {tenant: {**each, **models.get(tenant, {})} for tenant, each in both.items()}
        )


class WorkerLease:
    """The lease of this worker. Each report to the database extends the lease.

    Args:
        worker_id: id of this process as a worker; each process has a new id.
        lease_s: number of seconds for which the lease lasts after each report.
        places: returns how many runs may run at once. The event loop calls ``places`` and ``load``.
        claim: called in the event loop when the lease begins, also after a lost connection, and
            after a report if due runs wait for a worker.
        listen: called in the event loop after each report. The argument is true if this worker may
            get one of the next runs.
        sweep: called in the event loop after a report if the SQL function ``sweep`` is due.
    """

    def __init__(
        self,
        worker_id: UUID,
        owner: LeaseOwner,
        lease_s: float,
        *,
        places: Callable[[], int],
        load: Callable[[], Load],
        claim: Callable[[], object],
        listen: Callable[[bool], object],
        sweep: Callable[[], object],
    ) -> None:
        self._worker_id, self._owner, self._lease_s = worker_id, owner, lease_s
        self._places, self._load, self._claim = places, load, claim
        self._listen, self._sweep = listen, sweep
        self._began = monotonic()
        self._loop = asyncio.get_running_loop()
        self._open = 0
        self._about = ""
        self._is_over = False

    @asynccontextmanager
    async def kept(self, connect: Connect, pool: asyncpg.Pool) -> AsyncIterator[None]:
        """During the block, send reports in a thread. After the block, end the lease."""
        self._measure()
        loop = asyncio.new_event_loop()
        reporting = loop.create_task(self._report_regularly(connect))

        def run() -> None:
            # The runner ends the tasks of a lost connection before it closes the event loop.
            runner = asyncio.Runner(loop_factory=lambda: loop)
            with runner, contextlib.suppress(asyncio.CancelledError):
                runner.get_loop().run_until_complete(reporting)

        thread = threading.Thread(target=run, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(reporting.cancel)
            await asyncio.to_thread(thread.join)
            self._lease_s = 0.0
            await self.leave(pool)

    async def leave(self, pool: asyncpg.Pool) -> None:
        """Report that this worker claims no more runs. If that fails, the next report says so."""
        self._is_over, self._open = True, 0
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LEAVE_S):
                await pool.fetch(_REPORT, *self._values(self._owner.leases()))

    def _measure(self) -> None:
        self._open = 0 if self._is_over else self._places()
        load = self._load()
        age_s = monotonic() - self._began
        about = {"version": __version__, "age_s": age_s, "pool": load.pool, "tenants": load.tenants}
        self._about = to_json(about).decode()

    def _values(self, runs: Sequence[RunLease]) -> tuple[Any, ...]:
        parts = [list(part) for part in zip(*runs, strict=True)] or [[], [], []]
        return self._worker_id, self._lease_s, self._open, *parts, self._about

    async def _report_regularly(self, connect: Connect) -> None:
        every_s = self._lease_s / 3  # two reports may be lost

        async def report_on(connection: DatabaseSession) -> None:
            is_first = True
            while True:
                runs = self._owner.leases()
                report = await connection.fetchrow(_REPORT, *self._values(runs), timeout=every_s)
                self._open = 0  # report no free places while the main event loop does not answer
                self._loop.call_soon_threadsafe(self._measure)
                own, is_next, is_due, is_sweep_due, again_s = report
                if is_first or is_due:
                    self._loop.call_soon_threadsafe(self._claim)
                    is_first = False
                for run in runs:
                    if run.run_id not in own:
                        self._loop.call_soon_threadsafe(self._owner.lose, run)
                self._loop.call_soon_threadsafe(self._listen, is_next)
                if is_sweep_due:
                    self._loop.call_soon_threadsafe(self._sweep)
                while again_s > 0:
                    await asyncio.sleep(min(again_s, every_s))
                    has_begun = not runs and bool(self._owner.leases())
                    again_s = 0 if has_begun else again_s - every_s

        async with background(partial(keep_connected, connect, report_on, every_s)):
            await asyncio.Event().wait()  # until cancelled


async def any_alive(pool: asyncpg.Pool) -> bool:
    return bool(await pool.fetchval(_ANY_ALIVE))


async def alive(connection: AsyncConnection) -> Sequence[RowMapping]:
    """Return live workers, sorted from old to new. ``state`` has only the tenant's own load."""
    return (await connection.execute(_ALIVE)).mappings().all()


async def load_of(connection: AsyncConnection, tenant_id: UUID) -> dict[str, Any]:
    """Return a tenant's queued runs, waiting runs and quotas (SQL function ``tenant_load``)."""
    load = dict((await connection.execute(select(func.tenant_load(tenant_id)))).scalar_one())
    for quota in load["quotas"]:
        if quota["name"] == "cost_per_day":
            amounts = {name: quota[name] for name in ("used", "limit") if quota[name] is not None}
            quota |= {name: Decimal(value).scaleb(-9) for name, value in amounts.items()}
    return load
