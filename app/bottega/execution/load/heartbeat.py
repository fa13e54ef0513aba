"""Heartbeats: a worker reports that it is alive, and its load in total and per tenant."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import structlog
from pydantic_core import to_json
from sqlalchemy import RowMapping, and_, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.clock import monotonic
from bottega.db.tables import worker_tenants, workers
from bottega.events.log import is_transient
from bottega.events.wakeups import background

EVERY_S = 2.0
GONE_AFTER = timedelta(seconds=30)
"""A worker without a heartbeat for so long is not listed; the sweep deletes its rows."""
_PATIENCE_S = 10.0
_MOST = 1000
_HEARTBEAT = "SELECT worker_heartbeat($1, $2, $3, $4, $5)"
_LEFT = "SELECT worker_left($1)"
_ANY_ALIVE = "SELECT EXISTS (SELECT FROM workers WHERE seen_at > now() - $1::interval)"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's load at a moment.

    Attributes:
        pool: sums over all tenants, which every tenant may see: ``size``, ``min`` and ``max`` of
            the pool, ``busy``, ``parked`` and ``queued`` tasks, ``queue`` (waiting tasks by
            priority), and ``runs`` that are under way.
        tenants: for each tenant with any load, its own part: ``running``, ``parked`` and ``queued``
            tasks, ``queue``, and ``breakers`` that are not closed and clean: ``kind``, ``agent``,
            ``state``, ``failures``, ``retry_after_ms``; and ``models``: calls of model servers that
            are ``under_way`` and ``waiting``, by ``provider`` and ``is_operators``.
    """

    pool: Mapping[str, Any]
    tenants: Mapping[UUID, Mapping[str, Any]] = field(default_factory=dict)

    def with_models(self, calls: Mapping[UUID, Sequence[Mapping[str, Any]]]) -> "Snapshot":
        """Return it with the tenants' calls of model servers."""
        models = {tenant: {"models": each} for tenant, each in calls.items()}
        both = {**models, **self.tenants}
        return Snapshot(
            self.pool, {tenant: {**each, **models.get(tenant, {})} for tenant, each in both.items()}
        )


@asynccontextmanager
async def heartbeats(
    pool: asyncpg.Pool, snapshot: Callable[[], Snapshot], every_s: float = EVERY_S
) -> AsyncIterator[None]:
    """Report this worker as alive during the block, and as gone at its end."""
    worker_id, began = uuid4(), monotonic()

    async def beat() -> None:
        try:
            now = snapshot()
            states = [to_json(state).decode() for state in now.tenants.values()]
            about = (to_json(now.pool).decode(), list(now.tenants), states)
            async with asyncio.timeout(_PATIENCE_S):
                await pool.execute(_HEARTBEAT, worker_id, monotonic() - began, *about)
        except Exception as error:
            if not is_transient(error):
                log.exception("heartbeat.failed")

    async def beat_regularly() -> None:
        while True:
            await asyncio.sleep(every_s)
            await beat()

    await beat()
    async with background(beat_regularly):
        yield
    with contextlib.suppress(Exception):  # otherwise it counts as gone a little later
        async with asyncio.timeout(1.0):
            await pool.execute(_LEFT, worker_id)


async def any_alive(pool: asyncpg.Pool) -> bool:
    alive: bool = await pool.fetchval(_ANY_ALIVE, GONE_AFTER)
    return alive


async def load_of(connection: AsyncConnection, tenant_id: UUID) -> dict[str, Any]:
    """Return a tenant's queued runs and its quotas; see the SQL function ``tenant_load``."""
    load: dict[str, Any] = (
        await connection.execute(select(func.tenant_load(tenant_id)))
    ).scalar_one()
    for quota in load["quotas"]:
        if quota["name"] == "cost_per_day":
            amounts = {name: quota[name] for name in ("used", "limit") if quota[name] is not None}
            quota |= {name: Decimal(value).scaleb(-9) for name, value in amounts.items()}
    return load


async def alive(connection: AsyncConnection, tenant_id: UUID) -> Sequence[RowMapping]:
    """Return the rows of live workers, oldest first; ``state`` is the tenant's own part."""
    query = (
        select(workers, worker_tenants.c.state)
        .join_from(
            workers,
            worker_tenants,
            and_(
                worker_tenants.c.tenant_id == tenant_id,
                worker_tenants.c.worker_id == workers.c.id,
            ),
            isouter=True,
        )
        .where(workers.c.seen_at > func.now() - GONE_AFTER)
        .order_by(workers.c.started_at, workers.c.id)
        .limit(_MOST)
    )
    return (await connection.execute(query)).mappings().all()
