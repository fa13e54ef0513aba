"""Copy of episode bodies from the database to an object store.

The object is written first, under a new key that the database lists as deletable until a row refers
to it. So a crash changes no episode, and the object is soon deleted.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import UUID

import asyncpg

from bottega.db.engine import acting_as
from bottega.memory.objects import new_key

_AT_A_TIME = 8

_INLINE = """
SELECT episode_id, part, content FROM episode_bodies
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND part = ANY ($3) AND content IS NOT NULL
ORDER BY episode_id, part
"""

TRACE = ("trace",)
ALL_PARTS = ("trace", "input", "output")


class ColdStorage(Protocol):
    """Store for large or rarely read bodies (:class:`bottega.memory.objects.Objects`)."""

    async def put(self, key: str, body: bytes) -> None:
        """Store ``body`` under a key.

        Raises:
            UnavailableError: the store cannot be reached.
        """


Moved = list[dict[str, Any]]
"""``episode_id``, ``part`` and ``object_key`` of each copied body, as the SQL functions take it."""


async def copied(
    pool: asyncpg.Pool,
    storage: ColdStorage,
    tenant_id: UUID,
    ids: Sequence[UUID],
    parts: Sequence[str],
) -> Moved:
    """Copy the bodies of episodes that are still in the database to the object store.

    Raises:
        UnavailableError: the object store cannot be reached; nothing has changed.
    """
    async with acting_as(pool, tenant_id) as connection:
        rows = await connection.fetch(_INLINE, tenant_id, ids, parts)
        moved = [
            {
                "episode_id": str(row["episode_id"]),
                "part": row["part"],
                "object_key": new_key(tenant_id, row["episode_id"], row["part"]),
            }
            for row in rows
        ]
        if moved:
            keys = [each["object_key"] for each in moved]
            await connection.execute("SELECT claim_objects($1)", keys)
    for start in range(0, len(moved), _AT_A_TIME):
        some = slice(start, start + _AT_A_TIME)
        puts = [
            storage.put(each["object_key"], row["content"].encode())
            for each, row in zip(moved[some], rows[some], strict=True)
        ]
        for ended in await asyncio.gather(*puts, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
    return moved
