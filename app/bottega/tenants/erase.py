"""Removal of all data of a session or tenant; functions for the erasure of an end user.

Rows are removed in pages. Each page is a transaction, which also logs the number of removed rows.
So locks are short, and after a crash a repeated call continues. The functions find the tables by
the names of columns, so they also find tables that later versions add.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from graphlib import TopologicalSorter
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import (
    BindParameter,
    ColumnClause,
    ColumnElement,
    TableClause,
    Text,
    Uuid,
    and_,
    bindparam,
    column,
    delete,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    table,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from bottega.db.pool import AsyncConnection, Database, name_tenant
from bottega.db.tables import (
    DEFAULT_TENANT,
    api_keys,
    ended_tokens,
    episodes,
    idempotency_keys,
    run_heads,
    runs,
    schedules,
    sessions,
    tenants,
)
from bottega.errors import NotFoundError
from bottega.tenants import audit

CHANNEL = "bottega_erased"
"""Channel of notifications that data was removed; the payload is the tenant's id."""
RUNS_AT_ONCE = 100
"""Maximum number of runs in a page, because all their ids must fit into one notification."""
ROWS_AT_ONCE = 5000

Removed = Counter[str]
"""Number of removed rows by table."""

Begin = Callable[[], AbstractAsyncContextManager[AsyncConnection]]

_PLACE: ColumnElement[Any] = literal_column("ctid")
tenant_column: ColumnClause[Any] = column("tenant_id", Uuid)
run_column: ColumnClause[Any] = column("run_id", Uuid)
session_column: ColumnClause[Any] = column("session_id", Text)
_WITH_COLUMN = text("""
SELECT c.relname AS name, ARRAY(
    SELECT o.relname::text FROM pg_constraint f JOIN pg_class o ON o.oid = f.confrelid
    WHERE f.conrelid = c.oid AND f.contype = 'f' AND o.oid <> c.oid) AS refers_to
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.attname = :column
ORDER BY c.relname
""")
# Tables whose rows are removed separately: run heads first, and episodes after the rows that refer
# to them. A session's memory is removed after the session's row was locked, because runs lock the
# rows in this order when they publish.
_NOT_OF_RUNS = {"run_heads", "episodes", "lessons", "session_memory"}
# Tables that have no rows of the session any more, because episodes and runs are removed earlier.
_NOT_OF_SESSIONS = {"runs", "episodes", "episode_search", "episode_vectors"}
# Tables with counts of rows. The rows of these tables are removed last, together with the tenant's
# own row.
_COUNTS = ("storage_changes", "tenant_storage", "metric_rollups", "tenant_queues", "queue_counts")
# The spending of removed unfinished runs must still count towards the daily budgets.
_SPENT = text("""
    SELECT coalesce(jsonb_agg(s), '[]') FROM runs
    CROSS JOIN jsonb_array_elements(spent_by(tenant_id, id)) AS s
    WHERE tenant_id = :tenant AND id = ANY(CAST(:runs AS uuid[])) AND ended_at IS NULL
""")
# Statistics of words and vectors may come from removed episodes, so workers measure them again.
_FORGET_WORDS = text("""
    UPDATE tenant_memory SET common = '{}', shares = '{}', sampled_rows = 0,
           background_of = NULL, background_mean = '{}', background = '{}', background_rows = 0
    WHERE tenant_id = :tenant AND (sampled_rows > 0 OR background_rows > 0)
""")
# These signals make workers stop the runs, end event streams and clear caches.
_NOTIFY = text(f"SELECT send_signal('bottega_events', :runs), send_signal('{CHANNEL}', :tenant)")


async def erase_session(
    database: Database, tenant_id: UUID, session_id: str, actor: str
) -> Removed:
    """Remove a session with its memory and runs. A later use of its id begins a new session.

    Forks of the session's runs are removed, too, because a fork contains copies of the run's
    events. A forked session keeps the turns that it shares with the removed session. After a run's
    removal, the run's worker cannot write a further step, and gets a signal to stop.

    Raises:
        NotFoundError: the tenant has no such session.
    """
    removed: Removed = Counter()
    over = False
    while not over:
        async with database.begin(tenant_id) as tx:
            which = _of_sessions([session_id])
            page, spent = await erase_runs(tx, tenant_id, which, session_id)
            over = await erase_sessions(tx, tenant_id, [session_id], page)
            if page:
                details = {"removed": page}
                await audit.note(tx, tenant_id, actor, "session.delete", session_id, details)
            await tx.execute(select(func.count_spending(tenant_id, spent)))  # takes the last lock
        removed += page
    if not removed:
        raise NotFoundError(f"there is no session '{session_id}'")
    return removed


def _of_sessions(ids: Sequence[str]) -> ColumnElement[bool]:
    return or_(runs.c.session_id.in_(ids), runs.c.session_of_origin.in_(ids))


async def erase_sessions(
    tx: AsyncConnection, tenant_id: UUID, ids: Sequence[str], removed: Removed
) -> bool:
    """Remove sessions, with all their rows, after their runs were removed.

    Return false if runs, or more than a page of episodes, remain.
    """
    # A run that is being accepted locks the session until the run's row is visible. Runs that are
    # accepted later wait for this function's lock.
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id.in_(ids))
    await tx.execute(select(sessions.c.id).where(own).order_by(sessions.c.id).with_for_update())
    others = select(runs.c.id).where(runs.c.tenant_id == tenant_id, _of_sessions(ids))
    if await tx.scalar(others.limit(1)):
        return False
    of_sessions = episodes.c.session_id.in_(ids)
    if await erase_episodes(tx, tenant_id, of_sessions, removed) == ROWS_AT_ONCE:
        return False
    of_them = and_(tenant_column == tenant_id, session_column.in_(ids))
    for each in await tables_with(tx, session_column):
        if each.name not in _NOT_OF_SESSIONS:
            await delete_rows(tx, each, of_them, removed)
    await forget_answers(tx, tenant_id, ids, removed)
    await delete_rows(tx, sessions, own, removed)
    return True


async def erase_episodes(
    tx: AsyncConnection, tenant_id: UUID, which: ColumnElement[bool], removed: Removed
) -> int:
    """Remove at most a page of a tenant's episodes, with dependent rows. Return their number."""
    found = select(episodes.c.id).where(episodes.c.tenant_id == tenant_id, which)
    ids = (await tx.scalars(found.limit(ROWS_AT_ONCE))).all()
    if ids:
        await forget_answers(tx, tenant_id, ids, removed)
        await name_tenant(tx, tenant_id)  # needed in a transaction that sees all tenants
        erase = func.erase_episodes(bindparam("ids", ids, ARRAY(Uuid)), type_=JSONB)
        removed.update(await tx.scalar(select(erase)) or {})
        await tx.execute(_FORGET_WORDS, {"tenant": tenant_id})
    return len(ids)


async def erase_tenant(begin: Begin, name: str, actor: str) -> Removed:
    """Remove all data of a tenant, and then the tenant itself, except ``default``.

    The tenant's keys are removed first, so the API accepts no new request of the tenant. The
    audit log of the tenant ``default`` records the beginning and the end of the removal.

    Args:
        begin: opens a transaction that sees all tenants.

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
        for each in (schedules, ended_tokens):
            await delete_rows(tx, each, each.c.tenant_id == tenant_id, removed)
        await audit.note(tx, DEFAULT_TENANT, actor, "tenant.delete", name)
    while True:
        removed += await _erase_rows(begin, tenant_id)
        try:
            async with begin() as tx:
                if tenant_id != DEFAULT_TENANT:
                    for counts in map(table, _COUNTS):
                        await delete_rows(tx, counts, tenant_column == tenant_id, removed)
                    await delete_rows(tx, tenants, tenants.c.id == tenant_id, removed)
                await audit.note(
                    tx, DEFAULT_TENANT, actor, "tenant.deleted", name, {"removed": removed}
                )
        except asyncpg.IntegrityConstraintViolationError:
            continue  # a request that began before the keys were removed has added rows
        return removed


async def _erase_rows(begin: Begin, tenant_id: UUID) -> Removed:
    removed: Removed = Counter()
    more = True
    while more:
        async with begin() as tx:
            page, _ = await erase_runs(tx, tenant_id, true())
            more = bool(await tx.scalar(select(exists().where(runs.c.tenant_id == tenant_id))))
        removed += page
    async with begin() as tx:
        found = await tables_with(tx, tenant_column)
    for each in found:
        more = each.name not in _COUNTS
        while more:
            async with begin() as tx:
                page = Counter()
                some = select(_PLACE).select_from(each).where(tenant_column == tenant_id)
                if each.name == "audit_log":  # the log of ``default`` also has actions on tenants
                    some = some.where(column("action").not_like("tenant.%"))
                some = some.limit(ROWS_AT_ONCE).correlate(None)
                await delete_rows(tx, each, _PLACE.in_(some), page)
            removed += page
            more = bool(page)
    return removed


async def erase_runs(
    tx: AsyncConnection, tenant_id: UUID, which: ColumnElement[bool], session_id: str | None = None
) -> tuple[Removed, BindParameter[Any]]:
    """Remove at most a page of a tenant's runs, with all their rows. Skip locked runs.

    Args:
        session_id: the removed session; sessions that were forked from it keep the shared turns.

    Returns:
        The number of removed rows by table, and the unfinished runs' spending for
        ``count_spending``.
    """
    removed: Removed = Counter()
    ids = await _locked(tx, and_(runs.c.tenant_id == tenant_id, which))
    if session_id is not None:
        named = bindparam("ids", ids, ARRAY(Uuid))
        given = select(func.give_turns_away(tenant_id, session_id, named))
        kept = set((await tx.scalars(given)).all())
        ids = [each for each in ids if each not in kept]
    if not ids:
        return removed, literal([], JSONB)
    # Without a run head, the run's worker can store no more rows of the run.
    heads = and_(run_heads.c.tenant_id == tenant_id, run_heads.c.run_id.in_(ids))
    await delete_rows(tx, run_heads, heads, removed)
    spent = literal(await tx.scalar(_SPENT, {"tenant": tenant_id, "runs": ids}), JSONB)
    await erase_episodes(tx, tenant_id, episodes.c.run_id.in_(ids), removed)
    await remove_runs(tx, tenant_id, ids, removed)
    await forget_answers(tx, tenant_id, ids, removed)
    await tx.execute(_NOTIFY, {"runs": ",".join(map(str, ids)), "tenant": str(tenant_id)})
    return +removed, spent


async def remove_runs(
    tx: AsyncConnection, tenant_id: UUID, ids: Sequence[UUID], removed: Removed
) -> None:
    """Remove locked runs that have no run heads, with all their rows except episodes."""
    of_them = and_(tenant_column == tenant_id, run_column.in_(ids))
    for each in await _tables_of_runs(tx):
        await delete_rows(tx, each, of_them, removed)
    started = and_(schedules.c.tenant_id == tenant_id, schedules.c.last_run_id.in_(ids))
    await tx.execute(update(schedules).where(started).values(last_run_id=None))
    await delete_rows(tx, runs, and_(runs.c.tenant_id == tenant_id, runs.c.id.in_(ids)), removed)


async def count_runs(
    tx: AsyncConnection, tenant_id: UUID, ids: Sequence[UUID], counted: Removed
) -> None:
    """Count the rows that :func:`remove_runs` would remove."""
    of_them = and_(tenant_column == tenant_id, run_column.in_(ids))
    for each in await _tables_of_runs(tx):
        await count_rows(tx, each, of_them, counted)
    counted[runs.name] += len(ids)


async def _tables_of_runs(tx: AsyncConnection) -> list[TableClause]:
    return [each for each in await tables_with(tx, run_column) if each.name not in _NOT_OF_RUNS]


async def _locked(tx: AsyncConnection, which: ColumnElement[bool]) -> Sequence[UUID]:
    """Lock a page of runs and return the runs' ids.

    The function waits only for the first lock, and skips other locked rows. So there is no deadlock
    with transactions that lock many rows in a different order.
    """
    query = select(runs.c.id).where(which)
    first = (await tx.scalars(query.limit(1).with_for_update())).all()
    others = query.limit(RUNS_AT_ONCE).with_for_update(skip_locked=True)
    return list({*first, *(await tx.scalars(others)).all()})[:RUNS_AT_ONCE]


async def forget_answers(
    tx: AsyncConnection, tenant_id: UUID, ids: Sequence[UUID | str], removed: Removed
) -> None:
    """Remove stored responses to requests that created these objects: they contain the objects."""
    await delete_rows(tx, idempotency_keys, answers_with(tenant_id, ids), removed)


def answers_with(tenant_id: UUID, ids: Sequence[UUID | str]) -> ColumnElement[bool]:
    """Return the condition for stored responses to requests that created these objects."""
    columns = idempotency_keys.c
    return and_(columns.tenant_id == tenant_id, columns.about.in_([str(each) for each in ids]))


async def tables_with(tx: AsyncConnection, condition: ColumnElement[Any]) -> list[TableClause]:
    """List the tables that have a column. A table comes before the tables to which it refers."""
    rows = (await tx.execute(_WITH_COLUMN, {"column": str(condition)})).all()
    refers_to = {row.name: row.refers_to for row in rows}
    order = reversed([*TopologicalSorter(refers_to).static_order()])
    return [table(name) for name in order if name in refers_to]


async def delete_rows(
    tx: AsyncConnection, rows_of: TableClause, which: ColumnElement[bool], removed: Removed
) -> None:
    if count := (await tx.execute(delete(rows_of).where(which))).rowcount:
        removed[rows_of.name] += count


async def count_rows(
    tx: AsyncConnection, rows_of: TableClause, which: ColumnElement[bool], removed: Removed
) -> None:
    """Count the rows that :func:`delete_rows` would delete."""
    if count := await tx.scalar(select(func.count()).select_from(rows_of).where(which)):
        removed[rows_of.name] += count
