"""The quota of a tenant's storage; see ``storage.sql``."""

from uuid import UUID

from sqlalchemy import BigInteger, Label, column, func, literal_column, select, table

from bottega.db.pool import AsyncConnection
from bottega.errors import LimitedError

STORAGE_QUOTA = "storage_quota"
"""Code of the error for a tenant that has used up its storage."""
STORAGE_FULL = (
    "the bytes that a tenant may store are used up: delete sessions, files or episodes, or "
    "ask the operator to keep runs for a shorter time or to raise the limit; GET /v1/scheduler "
    "shows the bytes of each kind of data"
)


def grew(changed: str, *key: str) -> Label[bool]:
    """Return a column for RETURNING: true if the statement made the row larger.

    Args:
        changed: name of the table.
        key: names of the table's unique columns.
    """
    old = table(changed, *map(column, key), column("bytes", BigInteger())).alias("old")
    same = (old.c[name] == literal_column(f"{changed}.{name}") for name in key)
    before = select(old.c.bytes).where(*same).scalar_subquery()
    return (literal_column(f"{changed}.bytes") > func.coalesce(before, 0)).label("grew")


async def require_room(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Refuse a request to store data if the tenant has used up its storage.

    Raises:
        LimitedError: ``storage_quota``.
    """
    if await connection.scalar(select(func.storage_exceeded(tenant_id))) is not None:
        raise storage_full()


def storage_full() -> LimitedError:
    return LimitedError(STORAGE_FULL, code=STORAGE_QUOTA, retry_after_s=60)
