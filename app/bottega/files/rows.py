"""Rows of files, for requests."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, Table, and_, delete, func, select, true, union, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from bottega.db.driver import driver_of
from bottega.db.pages import PageItems, beside, fetch_page, paged
from bottega.db.tables import files, runs, sessions
from bottega.errors import NotFoundError
from bottega.files.store import Owner


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    session_id: str | None,
    user: str | None = None,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List files by age: the page after the id ``after``.

    Args:
        session_id: only files of this session.
        user: only files of this user's sessions and runs.
    """
    shown: ReadOnlyColumnCollection[str, Any] = files.c
    query = select(files).where(files.c.tenant_id == tenant_id)
    if user is not None:
        of_session = _of(sessions, files.c.session_id, tenant_id, user)
        found = union(of_session, _of(runs, files.c.run_id, tenant_id, user)).subquery()
        query, shown = select(found), found.c
    if session_id is not None:
        query = query.where(shown.session_id == session_id)
    query = paged(query, shown.id, after=after, descending=descending)
    few = session_id is not None or user is not None
    return await fetch_page(connection, query, limit, by_index=not few)


def _of(table: Table, place: ColumnElement[Any], tenant_id: UUID, user: str) -> Select[Any]:
    """Return the files of a user's sessions, or runs; ``place``: the column that names those."""
    its = beside(files, and_(files.c.tenant_id == tenant_id, place == table.c.id), *files.c.keys())
    own = table.c.tenant_id == tenant_id, table.c.user_id == user
    return select(*its.c).select_from(table.join(its, true())).where(*own)


async def owner_of_run(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> Owner:
    """Return the user and the session of a run.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    own = runs.c.tenant_id == tenant_id, runs.c.id == run_id
    found = await connection.execute(select(runs.c.user_id, runs.c.session_id).where(*own))
    if (row := found.one_or_none()) is None:
        raise NotFoundError(f"there is no run {run_id}")
    return Owner(*row, run_id)


async def user_of(connection: AsyncConnection, tenant_id: UUID, file_id: UUID) -> str | None:
    """Return the user of a file's session or run; ``None``: of nobody, or unknown."""
    query = "SELECT o.user_id FROM files f, file_owner(f) AS o WHERE f.tenant_id = $1 AND f.id = $2"
    user: str | None = await (await driver_of(connection)).fetchval(query, tenant_id, file_id)
    return user


async def touch(connection: AsyncConnection, tenant_id: UUID, ids: Sequence[UUID]) -> None:
    """Note that a run uses some files again."""
    if ids:
        used = and_(files.c.tenant_id == tenant_id, files.c.id.in_(sorted(ids)))
        await connection.execute(update(files).where(used).values(used_at=func.now()))


async def remove(connection: AsyncConnection, tenant_id: UUID, file_id: UUID) -> None:
    """Delete a file; its bytes are deleted some minutes later.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    own = and_(files.c.tenant_id == tenant_id, files.c.id == file_id)
    if not (await connection.execute(delete(files).where(own))).rowcount:
        raise NotFoundError(f"there is no file {file_id}")
