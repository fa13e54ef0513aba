"""The quota of a tenant's storage; see ``storage.sql``."""

from uuid import UUID

from sqlalchemy import Boolean, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.errors import LimitedError

STORAGE_QUOTA = "storage_quota"
"""Code of the error."""
STORAGE_FULL = (
    "the bytes that a tenant may store are used up: delete sessions, files or episodes, or "
    "ask the operator to keep runs for a shorter time or to raise the limit; GET /v1/scheduler "
    "shows what takes the room"
)
RETRY_AFTER_S = 60.0
GREW = literal_column("new.bytes > coalesce(old.bytes, 0)", Boolean()).label("grew")
"""Column to return from a change of a row: it takes more bytes than before."""


async def require_room(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Refuse something new of a tenant that has used up its storage.

    Raises:
        LimitedError: ``storage_quota``.
    """
    if await connection.scalar(select(func.storage_exceeded(tenant_id))) is not None:
        raise storage_full()


def storage_full() -> LimitedError:
    """Return the error of a tenant whose storage is used up."""
    return LimitedError(STORAGE_FULL, code=STORAGE_QUOTA, retry_after_s=RETRY_AFTER_S)
