"""Sessions: shared memory that outlives a run."""

from typing import Any
from uuid import UUID

from sqlalchemy import and_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems, fetch_page
from bottega.db.tables import session_memory, sessions
from bottega.errors import ConflictError, NotFoundError

_SESSIONS = select(
    sessions.c.id, sessions.c.user_id.label("user"), sessions.c.created_at, sessions.c.updated_at
)


def session_user(session_id: str) -> ConflictError:
    """Return the error for a user who is not the session's."""
    return ConflictError(
        f"session '{session_id}' belongs to another user, or to none: a session keeps the user of "
        "its first run. Use a session of this user, or omit the user",
        code="session_user",
    )


async def user_of(
    connection: AsyncConnection, tenant_id: UUID, session_id: str | None, named: str | None
) -> str | None:
    """Return the user of a session, or ``named`` if there is no such session yet.

    Raises:
        ConflictError: ``session_user``.
    """
    if session_id is None:
        return named
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    found = (await connection.execute(select(sessions.c.user_id).where(own))).one_or_none()
    if found is None:
        return named
    user: str | None = found.user_id
    if named not in (None, user):
        raise session_user(session_id)
    return user


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    after: str | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List sessions by id: the page after the id ``after``."""
    query = _SESSIONS.where(sessions.c.tenant_id == tenant_id)
    if after is not None:
        query = query.where(sessions.c.id < after if descending else sessions.c.id > after)
    query = query.order_by(sessions.c.id.desc() if descending else sessions.c.id)
    return await fetch_page(connection, query, limit)


async def get(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> dict[str, Any]:
    """Return a session with the latest publications of its agents.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    query = _SESSIONS.where(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no session '{session_id}'")
    memory = (
        select(session_memory)
        .where(session_memory.c.tenant_id == tenant_id, session_memory.c.session_id == session_id)
        .order_by(session_memory.c.agent)
    )
    return {**row, "memory": list((await connection.execute(memory)).mappings())}
