"""Rows of files, for requests."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import and_, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.tables import files
from bottega.errors import NotFoundError


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    session_id: str | None,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List files by age: the page after the id ``after``.

    Args:
        session_id: only files of this session.
    """
    query = select(files).where(files.c.tenant_id == tenant_id)
    if session_id is not None:
        query = query.where(files.c.session_id == session_id)
    query = paged(query, files.c.id, after=after, descending=descending)
    return await fetch_page(connection, query, limit, by_index=session_id is None)


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
