"""Removing everything of a session.

Page by page, each in a transaction of its own that also notes what it removed, so that nobody is
locked out for long however much there is, and repeating it after a crash goes on where it ended.
What is removed is found by the columns of the tables, so that a new table cannot be forgotten.
"""

from collections import Counter
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import ColumnElement, Table, and_, delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db.base import metadata
from app.db.engine import Database
from app.db.tables import idempotency_keys, runs, schedules, session_memory, sessions
from app.errors import NotFoundError
from app.tenants import audit

RUNS_AT_ONCE = 100
"""Their ids fit into one notice."""

Removed = Counter[str]
"""Rows that were removed, by their table."""

_OF_RUNS = [table for table in reversed(metadata.sorted_tables) if "run_id" in table.c]
_UNQUEUE = text(
    "DELETE FROM pgqueuer.pgqueuer WHERE dedupe_key = ANY(CAST(:runs AS text[]))"
    " AND status IN ('queued', 'picked')"
)
# Workers stop executing them, and streams of them end.
_TELL = text("SELECT pg_notify('bottega_cancel', ''), pg_notify('bottega_events', :runs)")


async def erase_session(
    database: Database, tenant_id: UUID, session_id: str, actor: str
) -> Removed:
    """Remove a session: its memory, its runs, and all that is theirs. Who names it again begins it
    anew.

    A run that is under way loses its worker with the transaction that removes it: nothing more can
    be written of it, and the worker hears of it at once.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    removed: Removed = Counter()
    over = False
    while not over:
        async with database.begin(tenant_id) as tx:
            page = await erase_runs(tx, tenant_id, runs.c.session_id == session_id)
            over = await _erase_memory(tx, tenant_id, session_id, page)
            if page:
                details = {"removed": page}
                await audit.note(tx, tenant_id, actor, "session.delete", session_id, details)
        removed += page
    if not removed:
        raise NotFoundError(f"there is no session '{session_id}'")
    return removed


async def _erase_memory(
    tx: AsyncConnection, tenant_id: UUID, session_id: str, removed: Removed
) -> bool:
    """Remove what is left once all runs are gone; answers whether they are."""
    # A run that is being accepted holds the session until it can be seen; later ones wait for us.
    # Runs are locked before the session, here and wherever a run publishes.
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    await tx.execute(select(sessions.c.id).where(own).with_for_update())
    others = select(runs.c.id).where(runs.c.tenant_id == tenant_id, runs.c.session_id == session_id)
    if await tx.scalar(others.limit(1)):
        return False
    memory = and_(
        session_memory.c.tenant_id == tenant_id, session_memory.c.session_id == session_id
    )
    await _delete(tx, session_memory, memory, removed)
    await _delete(tx, sessions, own, removed)
    return True


async def erase_runs(tx: AsyncConnection, tenant_id: UUID, which: ColumnElement[bool]) -> Removed:
    """Remove at most a page of a tenant's runs, with all that is theirs; nothing: there are none.

    Those that others hold at the moment may stay for the next page.
    """
    removed: Removed = Counter()
    ids = await _locked(tx, and_(runs.c.tenant_id == tenant_id, which))
    if not ids:
        return removed
    named = [str(run_id) for run_id in ids]
    for table in _OF_RUNS:
        of_them = and_(table.c.tenant_id == tenant_id, table.c.run_id.in_(ids))
        await _delete(tx, table, of_them, removed)
    answers = and_(
        idempotency_keys.c.tenant_id == tenant_id,
        idempotency_keys.c.answer[("body", "id")].astext.in_(named),
    )
    await _delete(tx, idempotency_keys, answers, removed)
    removed["queue"] += (await tx.execute(_UNQUEUE, {"runs": named})).rowcount
    started = and_(schedules.c.tenant_id == tenant_id, schedules.c.last_run_id.in_(ids))
    await tx.execute(update(schedules).where(started).values(last_run_id=None))
    await _delete(tx, runs, and_(runs.c.tenant_id == tenant_id, runs.c.id.in_(ids)), removed)
    await tx.execute(select(func.fill_places(tenant_id)))
    await tx.execute(_TELL, {"runs": ",".join(named)})
    return +removed


async def _locked(tx: AsyncConnection, which: ColumnElement[bool]) -> Sequence[UUID]:
    """Ids of a page of runs, which nobody else can change any more.

    Waits only while it holds none: who locks many rows in another order must not wait for us while
    we wait for them.
    """
    query = select(runs.c.id).where(which)
    first = (await tx.scalars(query.limit(1).with_for_update())).all()
    others = query.limit(RUNS_AT_ONCE).with_for_update(skip_locked=True)
    return list({*first, *(await tx.scalars(others)).all()})[:RUNS_AT_ONCE]


async def _delete(
    tx: AsyncConnection, table: Table, which: ColumnElement[bool], removed: Removed
) -> None:
    if count := (await tx.execute(delete(table).where(which))).rowcount:
        removed[table.name] += count
