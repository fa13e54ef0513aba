"""Sessions: shared memory that outlives a run (spec page 2, G12)."""

from typing import Any
from uuid import UUID

from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db.tables import session_memory, sessions
from app.errors import NotFoundError


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    after: str | None,
    descending: bool,
    limit: int,
) -> list[RowMapping]:
    """Sessions by id, at most ``limit``, behind the id ``after``."""
    query = select(sessions).where(sessions.c.tenant_id == tenant_id)
    if after is not None:
        query = query.where(sessions.c.id < after if descending else sessions.c.id > after)
    query = query.order_by(sessions.c.id.desc() if descending else sessions.c.id).limit(limit)
    return list((await connection.execute(query)).mappings())


async def get(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> dict[str, Any]:
    """A session with what its agents published last.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    query = select(sessions).where(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no session '{session_id}'")
    memory = (
        select(session_memory)
        .where(session_memory.c.tenant_id == tenant_id, session_memory.c.session_id == session_id)
        .order_by(session_memory.c.agent)
    )
    return {**row, "memory": list((await connection.execute(memory)).mappings())}
