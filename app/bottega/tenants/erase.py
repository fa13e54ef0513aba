"""Removal of all data of a session or a tenant.

Works in pages, each in its own transaction that also logs the removed rows. So locks are short, and
a repetition after a crash continues. The tables are found by their columns, so that a new table is
included automatically.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from graphlib import TopologicalSorter
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnClause,
    ColumnElement,
    TableClause,
    Uuid,
    and_,
    bindparam,
    column,
    delete,
    exists,
    func,
    literal_column,
    select,
    table,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import Database, name_tenant
from bottega.db.tables import (
    api_keys,
    conversations,
    episodes,
    files,
    forked_turns,
    idempotency_keys,
    run_heads,
    runs,
    schedules,
    session_memory,
    sessions,
    tenants,
    waiting_runs,
    ws_tickets,
)
from bottega.errors import NotFoundError
from bottega.tenants import audit

RUNS_AT_ONCE = 100
"""Bounded so that all ids fit into one notification."""
ROWS_AT_ONCE = 5000

Removed = Counter[str]
"""Number of removed rows by table."""

Begin = Callable[[], AbstractAsyncContextManager[AsyncConnection]]

_PLACE: ColumnElement[Any] = literal_column("ctid")
_tenant_column: ColumnClause[Any] = column("tenant_id", Uuid)
_run_column: ColumnClause[Any] = column("run_id", Uuid)
_WITH_COLUMN = text("""
SELECT c.relname AS name, ARRAY(
    SELECT o.relname::text FROM pg_constraint f JOIN pg_class o ON o.oid = f.confrelid
    WHERE f.conrelid = c.oid AND f.contype = 'f' AND o.oid <> c.oid) AS refers_to
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.attname = :column
ORDER BY c.relname
""")
# Left out: a deletion begins with the head, episodes have dependent rows that go first, and a
# session's memory is deleted after the session's row is locked, in the lock order of a publishing
# run.
_NOT_OF_RUNS = {"run_heads", "episodes", "session_memory"}
# What removed runs spent still counts against the budgets.
_SPENT = text("""
    SELECT coalesce(sum(tokens_in(spent_by(tenant_id, id))), 0),
           coalesce(sum(cost_in(spent_by(tenant_id, id))), 0) FROM runs
    WHERE tenant_id = :tenant AND id = ANY(CAST(:runs AS uuid[])) AND ended_at IS NULL
""")
# Common words of episodes may be of those that are removed; the next look samples again.
_FORGET_WORDS = text("""
    UPDATE tenant_memory SET common = '{}', shares = '{}', sampled_rows = 0, sampled_at = NULL
    WHERE tenant_id = :tenant AND sampled_rows > 0
""")
# Workers stop executing the runs, and their event streams end.
_NOTIFY = text("SELECT pg_notify('bottega_cancel', ''), pg_notify('bottega_events', :runs)")


async def erase_session(
    database: Database, tenant_id: UUID, session_id: str, actor: str
) -> Removed:
    """Remove a session with its memory and runs. A later use of the id begins a new session.

    Turns that a fork shares stay: they are the fork's from then on. A worker loses its run in the
    transaction that removes it: it can write no further step, and is notified at once.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    removed: Removed = Counter()
    over = False
    while not over:
        async with database.begin(tenant_id) as tx:
            of_session = runs.c.session_id == session_id
            page, spent = await _erase_runs(tx, tenant_id, of_session, session_id)
            await tx.execute(select(func.assign_slots(tenant_id)))
            over = await _erase_memory(tx, tenant_id, session_id, page)
            if page:
                details = {"removed": page}
                await audit.note(tx, tenant_id, actor, "session.delete", session_id, details)
            await tx.execute(select(func.count_spending(tenant_id, *spent)))  # last: lock order
        removed += page
    if not removed:
        raise NotFoundError(f"there is no session '{session_id}'")
    return removed


async def _erase_memory(
    tx: AsyncConnection, tenant_id: UUID, session_id: str, removed: Removed
) -> bool:
    """Remove a session's memory, episodes, files and row; return false if rows or runs remain."""
    # A run that is being accepted locks the session until its row is visible; later ones wait.
    # The lock order is runs, then session, here and wherever a run publishes.
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    await tx.execute(select(sessions.c.id).where(own).with_for_update())
    others = select(runs.c.id).where(runs.c.tenant_id == tenant_id, runs.c.session_id == session_id)
    if await tx.scalar(others.limit(1)):
        return False
    memory = and_(
        session_memory.c.tenant_id == tenant_id, session_memory.c.session_id == session_id
    )
    of_session = episodes.c.session_id == session_id
    if await _erase_episodes(tx, tenant_id, of_session, removed) == ROWS_AT_ONCE:
        return False
    of_files = and_(files.c.tenant_id == tenant_id, files.c.session_id == session_id)
    await _delete(tx, files, of_files, removed)
    await _delete(tx, session_memory, memory, removed)
    shared = and_(forked_turns.c.tenant_id == tenant_id, forked_turns.c.session_id == session_id)
    await _delete(tx, forked_turns, shared, removed)
    spoken = and_(conversations.c.tenant_id == tenant_id, conversations.c.session_id == session_id)
    await _delete(tx, conversations, spoken, removed)
    await _delete(tx, sessions, own, removed)
    return True


async def _erase_episodes(
    tx: AsyncConnection, tenant_id: UUID, which: ColumnElement[bool], removed: Removed
) -> int:
    """Remove at most a page of a tenant's episodes with their dependent rows; return the count."""
    found = select(episodes.c.id).where(episodes.c.tenant_id == tenant_id, which)
    ids = (await tx.scalars(found.limit(ROWS_AT_ONCE))).all()
    if ids:
        await forget_answers(tx, tenant_id, ids, removed)
        await name_tenant(tx, tenant_id)  # for transactions that see all tenants
        erase = func.erase_episodes(bindparam("ids", ids, ARRAY(Uuid)), type_=JSONB)
        removed.update(await tx.scalar(select(erase)) or {})
        await tx.execute(_FORGET_WORDS, {"tenant": tenant_id})
    return len(ids)


async def erase_tenant(begin: Begin, name: str, actor: str) -> Removed:
    """Remove all data of a tenant, and then the tenant itself, except ``default``.

    Keys go first, so that no new request is accepted. The log of ``default`` notes begin and end.

    Args:
        begin: opens transactions that see all tenants.

    Raises:
        NotFoundError: there is no tenant of that name.
    """
    removed: Removed = Counter()
    async with begin() as tx:
        tenant_id = await tx.scalar(select(tenants.c.id).where(tenants.c.name == name))
        if tenant_id is None:
            raise NotFoundError(f"there is no tenant '{name}': see `bottega tenants list`")
        live = and_(api_keys.c.tenant_id == tenant_id, api_keys.c.revoked_at.is_(None))
        await tx.execute(update(api_keys).where(live).values(revoked_at=func.now()))
        for each in (schedules, ws_tickets):
            await _delete(tx, each, each.c.tenant_id == tenant_id, removed)
        await audit.note(tx, DEFAULT_TENANT, actor, "tenant.delete", name)
    while True:
        removed += await _erase_rows(begin, tenant_id)
        try:
            async with begin() as tx:
                if tenant_id != DEFAULT_TENANT:
                    counted = waiting_runs.c.tenant_id == tenant_id
                    await _delete(tx, waiting_runs, counted, removed)
                    await _delete(tx, tenants, tenants.c.id == tenant_id, removed)
                await audit.note(
                    tx, DEFAULT_TENANT, actor, "tenant.deleted", name, {"removed": removed}
                )
        except IntegrityError:  # an earlier request added rows
            continue
        return removed


async def _erase_rows(begin: Begin, tenant_id: UUID) -> Removed:
    removed: Removed = Counter()
    more = True
    while more:
        async with begin() as tx:
            page, _ = await _erase_runs(tx, tenant_id, true())
            more = bool(await tx.scalar(select(exists().where(runs.c.tenant_id == tenant_id))))
        removed += page
    async with begin() as tx:
        found = await _tables_with(tx, _tenant_column)
    for each in found:
        # The count of waiting runs follows the runs: it is removed with the tenant's own row.
        more = each.name != waiting_runs.name
        while more:
            async with begin() as tx:
                page = Counter()
                some = select(_PLACE).select_from(each).where(_tenant_column == tenant_id)
                if each.name == "audit_log":  # ``default`` keeps the log of tenants
                    some = some.where(column("action").not_like("tenant.%"))
                await _delete(tx, each, _PLACE.in_(some.limit(ROWS_AT_ONCE).correlate(None)), page)
            removed += page
            more = bool(page)
    return removed


async def _erase_runs(
    tx: AsyncConnection, tenant_id: UUID, which: ColumnElement[bool], session_id: str | None = None
) -> tuple[Removed, tuple[int, int]]:
    """Remove at most a page of a tenant's runs and their rows, except runs locked by others.

    Return also the tokens, and the cost, that the unfinished runs among them have spent.

    Args:
        session_id: their session, which is removed alone: its forks keep what they share.
    """
    removed: Removed = Counter()
    ids = await _locked(tx, and_(runs.c.tenant_id == tenant_id, which))
    if session_id is not None:
        named = bindparam("ids", ids, ARRAY(Uuid))
        given = select(func.give_turns_away(tenant_id, session_id, named))
        kept = set((await tx.scalars(given)).all())
        ids = [each for each in ids if each not in kept]
    if not ids:
        return removed, (0, 0)
    # Without its head a run's worker stores no more rows.
    heads = and_(run_heads.c.tenant_id == tenant_id, run_heads.c.run_id.in_(ids))
    await _delete(tx, run_heads, heads, removed)
    (row,) = await tx.execute(_SPENT, {"tenant": tenant_id, "runs": ids})
    spent = int(row[0]), int(row[1])
    await _erase_episodes(tx, tenant_id, episodes.c.run_id.in_(ids), removed)
    of_them = and_(_tenant_column == tenant_id, _run_column.in_(ids))
    for each in await _tables_with(tx, _run_column):
        if each.name not in _NOT_OF_RUNS:
            await _delete(tx, each, of_them, removed)
    await forget_answers(tx, tenant_id, ids, removed)
    started = and_(schedules.c.tenant_id == tenant_id, schedules.c.last_run_id.in_(ids))
    await tx.execute(update(schedules).where(started).values(last_run_id=None))
    await _delete(tx, runs, and_(runs.c.tenant_id == tenant_id, runs.c.id.in_(ids)), removed)
    await tx.execute(_NOTIFY, {"runs": ",".join(map(str, ids))})
    return +removed, spent


async def _locked(tx: AsyncConnection, which: ColumnElement[bool]) -> Sequence[UUID]:
    """Lock a page of runs and return their ids.

    Waits for a lock only while it holds none, against deadlocks with transactions that lock many
    rows in another order.
    """
    query = select(runs.c.id).where(which)
    first = (await tx.scalars(query.limit(1).with_for_update())).all()
    others = query.limit(RUNS_AT_ONCE).with_for_update(skip_locked=True)
    return list({*first, *(await tx.scalars(others)).all()})[:RUNS_AT_ONCE]


async def forget_answers(
    tx: AsyncConnection, tenant_id: UUID, ids: Sequence[UUID], removed: Removed
) -> None:
    """Remove the stored responses that created these objects, since they contain them."""
    answers = and_(
        idempotency_keys.c.tenant_id == tenant_id,
        idempotency_keys.c.answer[("body", "id")].astext.in_([str(each) for each in ids]),
    )
    await _delete(tx, idempotency_keys, answers, removed)


async def _tables_with(tx: AsyncConnection, wanted: ColumnElement[Any]) -> list[TableClause]:
    """List the tables that have a column, referring tables before those that they refer to."""
    rows = (await tx.execute(_WITH_COLUMN, {"column": str(wanted)})).all()
    refers_to = {row.name: row.refers_to for row in rows}
    order = reversed([*TopologicalSorter(refers_to).static_order()])
    return [table(name) for name in order if name in refers_to]


async def _delete(
    tx: AsyncConnection, rows_of: TableClause, which: ColumnElement[bool], removed: Removed
) -> None:
    if count := (await tx.execute(delete(rows_of).where(which))).rowcount:
        removed[rows_of.name] += count
