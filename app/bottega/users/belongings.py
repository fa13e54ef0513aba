"""Tables with rows of end users, found in the catalogue, so that a new one is included.

A row belongs to a user if it names the user, or a run, a session or an episode of the user's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

OWNERS = {"user_id": "text", "run_id": "uuid", "session_id": "text", "episode_id": "uuid"}
"""Columns that name an owner, with their types; the first that a table has decides."""
NOT_EXPORTED = frozenset(
    (
        "user_erasures",  # there is no export meanwhile
        "run_queue",  # which worker executes a run
        "run_heads",
        "ws_tickets",  # credentials
        "idempotency_keys",  # copies of the objects that requests made
        "episode_search",  # words of episodes
        "episode_vectors",  # numbers that were computed of them
        "episode_work",
        "pattern_applications",  # judgements of patterns; they name an episode, and no text
        "pattern_sources",
    )
)
"""Tables whose rows say nothing of a user that others do not say."""
_BY_SESSION = frozenset(("session_memory",))
"""They name the last of several runs, too."""

_COLUMNS = text("""
SELECT c.relname AS name, array_agg(a.attname::text ORDER BY a.attnum) AS columns, ARRAY(
    SELECT k.attname || ' ' || format_type(k.atttypid, NULL)
    FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS u(number, n)
    JOIN pg_attribute k ON k.attrelid = c.oid AND k.attnum = u.number
    WHERE i.indrelid = c.oid AND i.indisprimary AND k.attname <> 'tenant_id' ORDER BY u.n) AS key
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
GROUP BY c.oid, c.relname ORDER BY c.relname
""")


@dataclass(frozen=True, slots=True)
class Belongings:
    """Rows of a table that belong to users.

    Attributes:
        key: names and types of the primary key, without the tenant.
        owner: the column that names the owner.
        where: a further condition.
    """

    table: str
    key: Sequence[tuple[str, str]]
    owner: str
    where: str = "true"


async def find(connection: AsyncConnection) -> list[Belongings]:
    """Return all rows of users to export, each row in one of the items."""
    found = []
    for row in await connection.execute(_COLUMNS):
        owners = [each for each in OWNERS if each in row.columns and "tenant_id" in row.columns]
        if not owners or row.name in NOT_EXPORTED:
            continue
        key = [tuple(each.split(" ", 1)) for each in row.key]
        if row.name in _BY_SESSION:
            owners = ["session_id"]
        found.append(Belongings(row.name, key, owners[0]))
        if owners[:2] == ["run_id", "session_id"]:
            found.append(Belongings(row.name, key, "session_id", "run_id IS NULL"))
    return found
