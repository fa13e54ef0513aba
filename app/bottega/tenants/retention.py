"""Removal of old runs, audit entries and archived episodes; and sums of tenants' storage.

Rows are removed in pages. Each page has its own transaction, which skips rows that other processes
have locked. So several processes may remove rows at once, and after a crash a later call continues.

The storage quota, ``GET /v1/scheduler`` and ``GET /v1/metrics/series`` use the sums of storage.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
from pydantic_core import to_json
from sqlalchemy import ARRAY, Uuid, bindparam, func, select, text
from sqlalchemy.dialects.postgresql import JSONB

from bottega.clock import Clock, monotonic, utcnow
from bottega.db.pages import FIRST_PLACE
from bottega.db.pool import AsyncConnection, Database
from bottega.db.tables import idempotency_keys
from bottega.leased_work import WorkLoop
from bottega.logger import Logger
from bottega.tenants import erase
from bottega.tenants.erase import RUNS_AT_ONCE, Removed

RUNS = "runs"
KINDS = (RUNS, "audit", "episodes")
_ANSWERS_KEPT = timedelta(days=2)
"""A longer time than the lifetime of stored responses to requests with an ``Idempotency-Key``."""

Begin = Callable[[UUID], AbstractAsyncContextManager[AsyncConnection]]
"""Function that opens a transaction for a tenant's rows."""
Place = tuple[datetime, UUID]
"""Position of a run among all finished runs: time of its end, and id."""

_DUE = text("SELECT tenant_id, name, kind, before FROM due_retention(:days, :tenant, :own)")
_OWN_DAYS = text("SELECT kind, days FROM retention WHERE tenant_id = :tenant")
_DUE = _DUE.bindparams(bindparam("days", type_=JSONB))
_DUE_NOW = "SELECT tenant_id, name, kind, before FROM due_retention($1::jsonb, NULL, true)"
_LOCK = text("SELECT ids, last_at, last_id FROM lock_expired_runs(:before, :at, :id, :most)")
# If a conversation loses its last turn, the next run begins without earlier turns.
_FORGET_TURNS = text("""
UPDATE conversations SET last_run = NULL
WHERE tenant_id = :tenant AND last_run = ANY (:runs)
  AND id IN (SELECT conversations_of(:tenant, :runs))
""").bindparams(bindparam("tenant", type_=Uuid), bindparam("runs", type_=ARRAY(Uuid)))
_FORGOTTEN = text(f"SELECT send_signal('{erase.CHANNEL}', :tenant)")

log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class Due:
    """A kind of data of a tenant, and the age from which data of this kind are removed.

    Attributes:
        tenant: name of the tenant.
        kind: one of :data:`KINDS`.
        before: data are removed if the run ended, or the entry was written, before this time.
    """

    tenant_id: UUID
    tenant: str
    kind: str
    before: datetime


async def days_kept(
    tx: AsyncConnection, tenant_id: UUID, days: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return for how many days a tenant keeps each kind of data; ``None``: for ever.

    Args:
        days: the operator's values, which apply to kinds for which the tenant has no value.
    """
    own = await tx.execute(_OWN_DAYS, {"tenant": tenant_id})
    return {**days, **{row.kind: row.days for row in own}}


async def due(
    tx: AsyncConnection,
    days: Mapping[str, float | None],
    *,
    tenant: str | None = None,
    own: bool = True,
) -> list[Due]:
    """Return the kinds of data that must be removed, by tenant.

    Args:
        days: number of days for which data are kept, by kind; ``None``: for ever.
        tenant: a tenant's name; ``None``: all tenants.
        own: true if the tenants' own values replace ``days``.
    """
    result = await tx.execute(_DUE, {"days": dict(days), "tenant": tenant, "own": own})
    return [Due(*row) for row in result]


async def remove(
    begin: Begin, what: Due, *, count_only: bool = False, clock: Clock = utcnow
) -> Removed:
    """Remove old data of a tenant, or only count the rows.

    Return the numbers of rows by table. After each page, the function pauses for as long as the
    page took, at most a second. So other work gets at least half of the database's time.
    """
    removed: Removed = Counter()
    async for page in _pages(begin, what, count_only, clock):
        removed += page
    return removed


async def _pages(
    begin: Begin, what: Due, count_only: bool, clock: Clock = utcnow
) -> AsyncIterator[Removed]:
    position: Place | None = FIRST_PLACE
    while position is not None:
        began = monotonic()
        async with begin(what.tenant_id) as tx:
            if what.kind == RUNS:
                answers = what.before > clock() - _ANSWERS_KEPT
                page, position = await _runs(tx, what, position, count_only, answers)
            else:
                page = await _others(tx, what, count_only)
                position = FIRST_PLACE if page and not count_only else None
        yield page
        if position is not None:
            await asyncio.sleep(min(1.0, monotonic() - began))


async def _runs(
    tx: AsyncConnection, what: Due, after: Place, count_only: bool, answers: bool
) -> tuple[Removed, Place | None]:
    """Remove a page of finished runs. Return the counts, and the start of the next page, if any."""
    about = {"before": what.before, "at": after[0], "id": after[1], "most": RUNS_AT_ONCE}
    ids, last_at, last_id = (await tx.execute(_LOCK, about)).one()
    page: Removed = Counter()
    if ids and count_only:
        await erase.count_runs(tx, what.tenant_id, ids, page)
        if answers:
            answers_stored = erase.answers_with(what.tenant_id, ids)
            await erase.count_rows(tx, idempotency_keys, answers_stored, page)
    elif ids:
        await tx.execute(_FORGET_TURNS, {"tenant": what.tenant_id, "runs": ids})
        await erase.remove_runs(tx, what.tenant_id, ids, page)
        if answers:
            await erase.forget_answers(tx, what.tenant_id, ids, page)
        if page["files"]:
            await tx.execute(_FORGOTTEN, {"tenant": str(what.tenant_id)})
    return +page, None if last_at is None else (last_at, last_id)


async def _others(tx: AsyncConnection, what: Due, count_only: bool) -> Removed:
    """Remove a page of the audit log, or of archived episodes."""
    if what.kind == "audit":
        entries = func.expire_audit(what.before, 1000, count_only)
        return +Counter({"audit_log": await tx.scalar(select(entries)) or 0})
    episodes = func.expire_episodes(what.before, 100, count_only, type_=JSONB)
    page: Removed = +Counter(await tx.scalar(select(episodes)) or {})
    if page and not count_only:
        await tx.execute(_FORGOTTEN, {"tenant": str(what.tenant_id)})
    return page


@dataclass(frozen=True, slots=True)
class Pruning:
    """Background work that removes old data. Several processes may do this work at once.

    Attributes:
        days: days for which data is kept, by kind; ``None``: for ever.
    """

    database: Database
    days: Mapping[str, float | None]

    def loop(self) -> WorkLoop:
        """Return the loop that removes old data."""
        return WorkLoop("retention", self.prune, poll_s=600.0)

    async def prune(self) -> float:
        """Remove all old data, one page per tenant in turn. Return the seconds until the next call.

        The next call repeats a removal that failed.
        """
        # Usually nothing is due, so wait for no slot of a transaction: use the pool.
        rows = await self.database.pool.fetch(_DUE_NOW, to_json(self.days).decode())
        left = {due: _pages(self.database.begin, due, False) for due in (Due(*row) for row in rows)}
        removed: dict[Due, Removed] = {due: Counter() for due in left}
        while left:
            for due, pages in list(left.items()):
                try:
                    removed[due] += await anext(pages)
                except StopAsyncIteration:
                    del left[due]
                except Exception as error:
                    del left[due]
                    log.warning(
                        "retention.failed", tenant=due.tenant, kind=due.kind, error=repr(error)
                    )
        for due, count in removed.items():
            if count:
                log.info("retention.removed", tenant=due.tenant, kind=due.kind, **count)
        return float("inf")


_SUMS_POLL_S = 5.0
_SUM = "SELECT sum_storage($1)"


class StorageSums:
    """Background work that adds up the storage of tenants, every five seconds in one process."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self.pool = pool
        self.loop = WorkLoop("bottega_storage", self.add_up, poll_s=_SUMS_POLL_S)

    async def add_up(self) -> float:
        """Sum up a page of changes. Return the seconds until the next page may be due."""
        has_more = await self.pool.fetchval(_SUM, _SUMS_POLL_S)
        return 0.0 if has_more else float("inf")
