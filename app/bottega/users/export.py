"""Export of all data of an end user, as lines of JSON.

The data is read in pages, each in its own transaction, so that a slow reader keeps no transaction
open. Therefore the export is no snapshot: it has all rows from before its begin, and perhaps some
rows from after its begin.

The tables are found in the database's catalogue, so that new tables are included. A row belongs to
a user if it names the user, or a run, a session or an episode of the user.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from pydantic_core import to_json
from sqlalchemy import Text, TextClause, Uuid, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from bottega.db.engine import Database
from bottega.errors import UserErasingError
from bottega.objects import Objects
from bottega.users import erasure

OWNERS = {"user_id": "text", "run_id": "uuid", "session_id": "text", "episode_id": "uuid"}
"""Columns that name an owner, with their types; the first of them in a table names the owner."""
NOT_EXPORTED = frozenset(
    (
        "user_erasures",  # during an erasure there is no export
        "run_queue",  # only says which worker executes a run
        "run_heads",
        "ended_tokens",  # credentials
        "idempotency_keys",  # copies of the objects that requests made
        "episode_search",  # words of episodes
        "episode_vectors",  # vectors that were computed from episodes
        "episode_work",
        "pattern_applications",  # judgements of patterns, without texts
        "pattern_sources",
    )
)
"""Tables that are left out, because other tables have all their facts about a user."""
_BY_SESSION = frozenset(("session_memory",))
"""Tables whose rows belong to a session, although they name its last run, too."""
_BY_FIRST = frozenset(("files", "forked_turns"))
"""Tables whose rows have owners of different kinds: the first owner column with a value decides."""

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
    """Rows of a table that belong to users by one column.

    Attributes:
        key: names and types of the primary key's columns, without the tenant.
        owner: the column that names the owner.
        where: SQL of a further condition.
    """

    table: str
    key: Sequence[tuple[str, str]]
    owner: str
    where: str = "true"


async def find(connection: AsyncConnection) -> list[Belongings]:
    """Return the rows of users that are exported; each row belongs to exactly one item."""
    found = []
    for row in await connection.execute(_COLUMNS):
        owners = [each for each in OWNERS if each in row.columns and "tenant_id" in row.columns]
        if not owners or row.name in NOT_EXPORTED:
            continue
        key = [tuple(each.split(" ", 1)) for each in row.key]
        if row.name in _BY_SESSION:
            owners = ["session_id"]
        if row.name in _BY_FIRST:
            unnamed = [f"{earlier} IS NULL" for earlier in owners]
            for n, owner in enumerate(owners):
                found.append(Belongings(row.name, key, owner, " AND ".join(["true", *unnamed[:n]])))
        else:
            found.append(Belongings(row.name, key, owners[0]))
    return found


_ROWS = 200
_BYTES = 1_000_000
"""Most bytes of a page; a larger first row forms a page of its own."""
_OWNERS = 50
"""Number of runs, sessions or episodes whose rows are read together."""
_HIDDEN = ("tenant_id", "filler", "object_key", "object_keys")
"""Columns that are left out, because they have no facts about the user."""
_OWNING = {"runs": "run_id", "sessions": "session_id", "episodes": "episode_id"}
"""Tables whose rows own rows of other tables, with the column that names the owner in those."""
_TYPES = {"user_facts": "fact"}
"""Types of lines that have another name than their table."""
_MORE = {
    # A step's events are lines of JSON.
    "run_steps": " || jsonb_build_object("
    "'events', ('[' || replace(t.events, E'\\n', ',') || ']')::jsonb)",
}
_OBJECTS = {
    "files": "t.object_keys",
    "episode_bodies": "CASE WHEN t.object_key IS NOT NULL THEN ARRAY[t.object_key] END",
}
_SCHEDULES = Belongings("schedules", (("name", "text"),), "name")
"""Rows of schedules, which name the user inside a JSON document."""


@dataclass(frozen=True, slots=True)
class UserExport:
    """The export of one user."""

    database: Database
    objects: Objects
    tenant_id: UUID
    user: str
    _count: Counter[str] = field(default_factory=Counter)

    async def check(self, tx: AsyncConnection) -> None:
        """Check that there is data to export.

        Raises:
            NotFoundError: no data names the user.
            UserErasingError: the user is being erased.
        """
        if (await erasure.get(tx, self.tenant_id, self.user))["status"] == "erasing":
            raise UserErasingError

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield pages of lines, each an object with ``type`` and ``data``.

        The last line has the type ``end`` and the number of lines of each type. It is missing if
        the user's erasure began, or an error occurred.
        """
        async with self.database.begin(self.tenant_id) as tx:
            found = await find(tx)
        try:
            starting = "SELECT schedules_of_user(:tenant, :user)"
            async for lines, _ in self._pages(_SCHEDULES, starting):
                yield lines
            for each in found:
                if each.owner == "user_id":
                    async for lines in self._owned(each, found):
                        yield lines
        except UserErasingError:
            return
        yield self._line("end", to_json({"lines": self._count}))

    async def _owned(self, of: Belongings, found: Sequence[Belongings]) -> AsyncIterator[bytes]:
        """Yield the lines of a table that names users; after each page, the rows that it owns."""
        inner = [each for each in found if each.owner == _OWNING.get(of.table)]
        async for lines, ids in self._pages(of, "SELECT :user"):
            yield lines
            for start in range(0, len(ids), _OWNERS):
                some = ids[start : start + _OWNERS]
                for each in inner:
                    owners = f"SELECT unnest(CAST(:ids AS {OWNERS[each.owner]}[]))"
                    async for more, _ in self._pages(each, owners, some):
                        yield more

    async def _pages(
        self, of: Belongings, owners: str, ids: Sequence[str] = ()
    ) -> AsyncIterator[tuple[bytes, list[str]]]:
        """Yield pages of a table's lines, each with the first key column of its rows."""
        values = {"tenant": self.tenant_id, "user": self.user, "ids": ids, "after": None}
        while True:
            query = _page(of, owners, is_first=values["after"] is None)
            async with self.database.begin(self.tenant_id) as tx:
                if await erasure.is_erasing(tx, self.tenant_id, self.user):
                    raise UserErasingError
                rows = (await tx.execute(query, values)).all()
            if not rows:
                return
            lines = b"".join(self._line(of.table, row.line.encode()) for row in rows)
            yield lines, [row.key[0] for row in rows]
            for row in rows:
                async for content in self._contents(of.table, row.key, row.objects or ()):
                    yield content, []
            values["after"] = rows[-1].key

    async def _contents(
        self, table: str, key: Sequence[str], object_keys: Sequence[str]
    ) -> AsyncIterator[bytes]:
        """Yield a row's objects in the object store, one line for each object."""
        for number, object_key in enumerate(object_keys):
            data = await self.objects.get(object_key)
            about = {"of": table, "key": key, "piece": number, "base64": b64encode(data).decode()}
            yield self._line("content", to_json(about))

    def _line(self, kind: str, data: bytes) -> bytes:
        kind = _TYPES.get(kind, kind)
        self._count[kind] += 1
        return b'{"type":"%s","data":%s}\n' % (kind.encode(), data)


async def as_array(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Convert pages of JSON lines to pages of one JSON array."""
    before = b"["
    async for page in lines:
        yield before + page.rstrip(b"\n").replace(b"\n", b",\n")
        before = b",\n"
    yield b"[]" if before == b"[" else b"]"


def _page(of: Belongings, owners: str, *, is_first: bool) -> TextClause:
    """Return the query for a page of a table's rows, in the order of their keys."""
    names = [f't."{name}"' for name, _ in of.key]
    after = [f"CAST((:after)[{n}] AS {kind})" for n, (_, kind) in enumerate(of.key, 1)]
    place = "true" if is_first else f"({', '.join(names)}) > ({', '.join(after)})"
    query = f"""
SELECT line, key, objects FROM (
    SELECT q.*, sum(octet_length(line)) OVER (ORDER BY n) - octet_length(line) AS before FROM (
        SELECT row_number() OVER () AS n, ARRAY[{", ".join(f"{name}::text" for name in names)}]
               AS key, {_OBJECTS.get(of.table, "NULL::text[]")} AS objects,
               (to_jsonb(t) - '{{{",".join(_HIDDEN)}}}'::text[]{_MORE.get(of.table, "")})::text
               AS line
        FROM (SELECT * FROM {of.table} t
              WHERE t.tenant_id = :tenant AND t."{of.owner}" IN ({owners}) AND {of.where}
                AND {place}
              ORDER BY {", ".join(names)} LIMIT {_ROWS}) t) q) p
WHERE before < {_BYTES} ORDER BY n
"""  # noqa: S608
    bound: dict[str, TypeEngine[Any]] = {
        "tenant": Uuid(),
        "user": Text(),
        "ids": ARRAY(Text()),
        "after": ARRAY(Text()),
    }
    return text(query).bindparams(
        *(bindparam(name, type_=kind) for name, kind in bound.items() if f":{name}" in query)
    )
