"""Sources of definitions that were stored together: see ``POST /v1/apply``."""

from uuid import UUID

from sqlalchemy import and_, delete
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.tables import applied_definitions

_columns = applied_definitions.c


async def forget_source(connection: AsyncConnection, tenant_id: UUID, kind: str, name: str) -> None:
    """Forget where a deleted definition came from: a later one of its name is another."""
    mine = and_(_columns.tenant_id == tenant_id, _columns.kind == kind, _columns.name == name)
    await connection.execute(delete(applied_definitions).where(mine))
