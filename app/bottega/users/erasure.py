"""Erasure of all data of an end user.

From the request on, a row in ``user_erasures`` makes the database refuse all new data of the user.
Rows are removed in pages; each page has its own transaction, which also counts the removed rows.
Then the objects in the object store are deleted, and caches are cleared. When no data names the
user any more, the last transaction removes the row in ``user_erasures``.

All processes look for rows in ``user_erasures``, so if a process dies, another one continues.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import String, and_, column, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.engine import Database
from bottega.db.tables import episodes, idempotency_keys, runs, schedules, sessions, user_erasures
from bottega.errors import NotFoundError
from bottega.leased_work import LeasedWork
from bottega.objects import Objects
from bottega.tenants import audit, erase
from bottega.tenants.erase import (
    RUNS_AT_ONCE,
    Removed,
    delete_rows,
    erase_episodes,
    erase_runs,
    erase_sessions,
    tables_with,
    tenant_column,
)

CHANNEL = "bottega_users"
LEASE_S = 5.0
"""Lease of an erasing process, in seconds; each page renews it. Two processes at once do no harm.
"""
_AT_ONCE, _OF_ONE_TENANT = 4, 2

_own = user_erasures.c
_user_column = column("user_id", String)
# Tables whose rows are removed separately.
_NAMING = {"runs", "sessions", "episodes", "episode_search", "episode_vectors", "user_erasures"}
_LOCK = text("SELECT pg_try_advisory_xact_lock(user_lock(:tenant, :user))")


def pseudonym(user: str) -> str:
    """Return the text that replaces a user's name in the audit log."""
    return f"sha256:{sha256(user.encode()).hexdigest()}"


async def request(tx: AsyncConnection, tenant_id: UUID, user: str, actor: str) -> Mapping[str, Any]:
    """Request the erasure of a user's data, unless it is requested already; return the user.

    Raises:
        NotFoundError: no data names the user.
    """
    await get(tx, tenant_id, user)
    new = {"tenant_id": tenant_id, "user_id": user, "actor": actor}
    begun = insert(user_erasures).values(new).on_conflict_do_nothing().returning(_own.user_id)
    if await tx.scalar(begun) is not None:
        await audit.note(tx, tenant_id, actor, "user.delete", pseudonym(user))
        await tx.execute(select(func.send_signal(CHANNEL, "")))
    return await get(tx, tenant_id, user)


async def get(tx: AsyncConnection, tenant_id: UUID, user: str) -> Mapping[str, Any]:
    """Return a user, with the progress of the erasure, if it is requested.

    Raises:
        NotFoundError: no data names the user.
    """
    query = select(_own.requested_at, _own.removed).where(_is(tenant_id, user))
    if (row := (await tx.execute(query)).mappings().one_or_none()) is not None:
        return {"user": user, "status": "erasing", **row}
    if not await tx.scalar(select(func.knows_user(tenant_id, user))):
        raise NotFoundError("there is no data of this user")
    return {"user": user, "status": "active", "requested_at": None, "removed": {}}


async def is_erasing(tx: AsyncConnection, tenant_id: UUID, user: str) -> bool:
    query = select(_own.user_id).where(_is(tenant_id, user))
    return await tx.scalar(query) is not None


def _is(tenant_id: UUID, user: str) -> Any:
    return and_(_own.tenant_id == tenant_id, _own.user_id == user)


@dataclass(frozen=True, slots=True)
class UserErasure:
    """Background work that erases users; any number of processes may do it at once."""

    database: Database
    objects: Objects

    def leased(self) -> LeasedWork:
        """Return this work for the users of all tenants, with leases."""
        return LeasedWork(
            pool=self.database.pool,
            name="erase",
            columns="user_id text",
            lease_s=LEASE_S,
            share=_OF_ONE_TENANT,
            places=_AT_ONCE,
            do=self._erase_some,
            channel=CHANNEL,
        )

    async def _erase_some(self, tenant_id: UUID, due: Sequence[asyncpg.Record]) -> None:
        for row in due:
            await self.erase(tenant_id, row["user_id"])

    async def erase(self, tenant_id: UUID, user: str) -> None:
        """Erase all remaining data of a user.

        Raises:
            UnavailableError: the object store is unreachable; all rows are removed already.
        """
        while await self._erase_page(tenant_id, user):
            pass
        await self._empty_trash(tenant_id)
        await self._finish(tenant_id, user)

    async def _erase_page(self, tenant_id: UUID, user: str) -> bool:
        """Remove a page of rows; return false if there were none."""
        async with self.database.begin(tenant_id) as tx:
            # The lock lets one process work at a time. If another has finished, the row is missing.
            query = select(_own.removed).where(_is(tenant_id, user)).with_for_update()
            before = await tx.scalar(query)
            if before is None:
                return False
            removed = await erase_page(tx, tenant_id, user)
            changes = {"removed": Counter(before) + removed, "next_at": _later(LEASE_S)}
            await tx.execute(update(user_erasures).where(_is(tenant_id, user)).values(changes))
        return bool(removed)

    async def _empty_trash(self, tenant_id: UUID) -> None:
        while True:
            async with self.database.begin(tenant_id) as tx:
                found = select(func.trash_of_tenant(500))
                keys = list((await tx.scalars(found)).all())
            if not keys:
                return
            await self.objects.delete(keys)
            await self.database.pool.execute("SELECT forget_deleted_objects($1)", keys)

    async def _finish(self, tenant_id: UUID, user: str) -> None:
        """End the erasure, unless an older transaction has stored more of the user meanwhile."""
        async with self.database.begin(tenant_id) as tx:
            free = await tx.scalar(_LOCK, {"tenant": tenant_id, "user": user})
            if not free or await tx.scalar(select(func.knows_user(tenant_id, user))):
                again = update(user_erasures).where(_is(tenant_id, user))
                await tx.execute(again.values(next_at=_later(0.2)))
                return
            gone = delete(user_erasures).where(_is(tenant_id, user))
            row = (await tx.execute(gone.returning(_own.actor, _own.removed))).one_or_none()
            if row is not None:
                about = {"removed": row.removed}
                await audit.note(tx, tenant_id, row.actor, "user.deleted", pseudonym(user), about)
                await tx.execute(select(func.send_signal(erase.CHANNEL, str(tenant_id))))


def _later(seconds: float) -> Any:
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, seconds)


async def erase_page(tx: AsyncConnection, tenant_id: UUID, user: str) -> Removed:
    """Remove a page of a user's rows; return the counts.

    Schedules and unfinished runs come first, because they make new rows. A worker loses its run in
    the transaction that removes the run.
    """
    removed: Removed = Counter()
    starting = schedules.c.name.in_(select(func.schedules_of_user(tenant_id, user)))
    await delete_rows(tx, schedules, and_(schedules.c.tenant_id == tenant_id, starting), removed)
    of_user = runs.c.user_id == user
    for which in (and_(of_user, runs.c.ended_at.is_(None)), of_user):
        page, spent = await erase_runs(tx, tenant_id, which)
        if page:
            await tx.execute(select(func.count_spending(tenant_id, spent)))  # takes the last lock
            return removed + page
    found = select(sessions.c.id).where(
        sessions.c.tenant_id == tenant_id, sessions.c.user_id == user
    )
    if ids := (await tx.scalars(found.order_by(sessions.c.id).limit(RUNS_AT_ONCE))).all():
        await erase_sessions(tx, tenant_id, ids, removed)
        return removed
    if await erase_episodes(tx, tenant_id, episodes.c.user_id == user, removed):
        return removed
    for each in await tables_with(tx, _user_column):
        if each.name not in _NAMING:
            named = and_(tenant_column == tenant_id, _user_column == user)
            await delete_rows(tx, each, named, removed)
    await _forget_answers(tx, tenant_id, user, removed)
    return removed


async def _forget_answers(
    tx: AsyncConnection, tenant_id: UUID, user: str, removed: Removed
) -> None:
    """Remove stored answers with the user's name: about sessions, runs, episodes and schedules."""
    body = idempotency_keys.c.answer
    places = (("body", "user"), ("body", "user_id"), ("body", "run", "user"))
    naming = or_(*(body[place].astext == user for place in places))
    answers = and_(idempotency_keys.c.tenant_id == tenant_id, naming)
    await delete_rows(tx, idempotency_keys, answers, removed)
