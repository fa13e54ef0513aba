"""Erasure of all data of an end user.

The request stores a row in ``user_erasures``. While this row exists, the database refuses new data
of the user. The user's rows are removed in pages: a transaction removes the rows of a page and
stores their number. Then the user's objects are deleted from the object store. When no stored data
belongs to the user, the last transaction removes the row in ``user_erasures``, and processes clear
their caches.

Every process looks for rows in ``user_erasures``. So if a process dies, another process continues
its erasures.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json
from sqlalchemy import (
    String,
    Text,
    TextClause,
    Uuid,
    and_,
    bindparam,
    column,
    delete,
    func,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.types import TypeEngine

from bottega.db.pool import AsyncConnection, Database
from bottega.db.tables import episodes, idempotency_keys, runs, schedules, sessions, user_erasures
from bottega.errors import NotFoundError, UserErasingError
from bottega.leased_work import LeasedWork
from bottega.objects import Objects
from bottega.tenants import audit, erase
from bottega.tenants.erase import (
    RUNS_AT_ONCE,
    Removed,
    delete_rows,
    erase_episodes,
    erase_runs,
    erase_sessions,
    tables_with,
    tenant_column,
)

CHANNEL = "bottega_users"
LEASE_S = 5.0
"""Lease of a process that erases a user, in seconds; each page renews it. If two processes erase a
user at the same time, this does no harm.
"""
_AT_ONCE, _OF_ONE_TENANT = 4, 2

_own = user_erasures.c
_user_column = column("user_id", String)
# Tables that have a column ``user_id``, but whose rows the erasure removes separately.
_NAMING = {"runs", "sessions", "episodes", "episode_search", "episode_vectors", "user_erasures"}
_LOCK = text("SELECT pg_try_advisory_xact_lock(user_lock(:tenant, :user))")
_TRASH = text("SELECT due_deleted_objects(:tenant, '0', 500)")
_SCHEDULES_OF_USER = """
SELECT s.name FROM schedules s
WHERE s.tenant_id = :tenant AND (s.run ->> 'user' = :user OR EXISTS (
    SELECT FROM sessions o WHERE o.tenant_id = :tenant AND o.id = s.run ->> 'session_id'
      AND o.user_id = :user))
"""
"""Query for the names of schedules whose runs belong to a user or to the user's session."""
_OF_USER = "WHERE tenant_id = :tenant AND user_id = :user"
_KNOWS_USER = text(f"""
SELECT EXISTS (SELECT FROM runs {_OF_USER}) OR EXISTS (SELECT FROM sessions {_OF_USER})
    OR EXISTS (SELECT FROM episodes {_OF_USER}) OR EXISTS (SELECT FROM user_facts {_OF_USER})
    OR EXISTS ({_SCHEDULES_OF_USER})
""")  # noqa: S608


def pseudonym(user: str) -> str:
    """Return the text that replaces the name of a user in the audit log."""
    return f"sha256:{sha256(user.encode()).hexdigest()}"


async def request(tx: AsyncConnection, tenant_id: UUID, user: str, actor: str) -> Mapping[str, Any]:
    """Request the erasure of a user's data, unless a request exists. Return the user.

    Raises:
        NotFoundError: no stored data belongs to the user.
    """
    await get(tx, tenant_id, user)
    new = {"tenant_id": tenant_id, "user_id": user, "actor": actor}
    begun = insert(user_erasures).values(new).on_conflict_do_nothing().returning(_own.user_id)
    if await tx.scalar(begun) is not None:
        await audit.note(tx, tenant_id, actor, "user.delete", pseudonym(user))
        await tx.execute(select(func.send_signal(CHANNEL, "")))
    return await get(tx, tenant_id, user)


async def get(tx: AsyncConnection, tenant_id: UUID, user: str) -> Mapping[str, Any]:
    """Return a user, including the progress of an erasure.

    Raises:
        NotFoundError: no stored data belongs to the user.
    """
    query = select(_own.requested_at, _own.removed).where(_is(tenant_id, user))
    if (row := (await tx.execute(query)).mappings().one_or_none()) is not None:
        return {"user": user, "status": "erasing", **row}
    if not await tx.scalar(_KNOWS_USER, {"tenant": tenant_id, "user": user}):
        raise NotFoundError("there is no data of this user")
    return {"user": user, "status": "active", "requested_at": None, "removed": {}}


async def is_erasing(tx: AsyncConnection, tenant_id: UUID, user: str) -> bool:
    query = select(_own.user_id).where(_is(tenant_id, user))
    return await tx.scalar(query) is not None


def _is(tenant_id: UUID, user: str) -> Any:
    return and_(_own.tenant_id == tenant_id, _own.user_id == user)


@dataclass(frozen=True, slots=True)
class UserErasure:
    """Background work that erases users; several processes may do it at the same time."""

    database: Database
    objects: Objects

    def leased(self) -> LeasedWork:
        """Return the leased work that erases the users of all tenants."""
        return LeasedWork(
            pool=self.database.pool,
            name="erase",
            columns="user_id text",
            lease_s=LEASE_S,
            share=_OF_ONE_TENANT,
            places=_AT_ONCE,
            do=self._erase_some,
            channel=CHANNEL,
        )

    async def _erase_some(self, tenant_id: UUID, due: Sequence[asyncpg.Record]) -> None:
        for row in due:
            await self.erase(tenant_id, row["user_id"])

    async def erase(self, tenant_id: UUID, user: str) -> None:
        """Erase all remaining data of a user.

        Raises:
            UnavailableError: the object store is unreachable; all rows have been removed.
        """
        while await self._erase_page(tenant_id, user):
            pass
        await self._empty_trash(tenant_id)
        await self._finish(tenant_id, user)

    async def _erase_page(self, tenant_id: UUID, user: str) -> bool:
        async with self.database.begin(tenant_id) as tx:
            # The row's lock lets only one process at a time erase the user. The row is missing if
            # another process has finished the erasure.
            query = select(_own.removed).where(_is(tenant_id, user)).with_for_update()
            before = await tx.scalar(query)
            if before is None:
                return False
            removed = await erase_page(tx, tenant_id, user)
            changes = {"removed": Counter(before) + removed, "next_at": _later(LEASE_S)}
            await tx.execute(update(user_erasures).where(_is(tenant_id, user)).values(changes))
        return bool(removed)

    async def _empty_trash(self, tenant_id: UUID) -> None:
        while True:
            async with self.database.begin(tenant_id) as tx:
                keys = list((await tx.scalars(_TRASH, {"tenant": tenant_id})).all())
            if not keys:
                return
            await self.objects.delete(keys)
            await self.database.pool.execute("SELECT forget_deleted_objects($1)", keys)

    async def _finish(self, tenant_id: UUID, user: str) -> None:
        """End the erasure, unless an older transaction has stored more data of the user."""
        async with self.database.begin(tenant_id) as tx:
            values = {"tenant": tenant_id, "user": user}
            if not await tx.scalar(_LOCK, values) or await tx.scalar(_KNOWS_USER, values):
                again = update(user_erasures).where(_is(tenant_id, user))
                await tx.execute(again.values(next_at=_later(0.2)))
                return
            gone = delete(user_erasures).where(_is(tenant_id, user))
            row = (await tx.execute(gone.returning(_own.actor, _own.removed))).one_or_none()
            if row is not None:
                about = {"removed": row.removed}
                await audit.note(tx, tenant_id, row.actor, "user.deleted", pseudonym(user), about)
                await tx.execute(select(func.send_signal(erase.CHANNEL, str(tenant_id))))


def _later(seconds: float) -> Any:
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, seconds)


async def erase_page(tx: AsyncConnection, tenant_id: UUID, user: str) -> Removed:
    """Remove a page of a user's rows; return the numbers of removed rows by kind.

    Schedules and unfinished runs come first, because they make new rows. After the transaction that
    removes a run, no worker can write to the run.
    """
    removed: Removed = Counter()
    names = await tx.scalars(text(_SCHEDULES_OF_USER), {"tenant": tenant_id, "user": user})
    starting = schedules.c.name.in_(names.all())
    await delete_rows(tx, schedules, and_(schedules.c.tenant_id == tenant_id, starting), removed)
    of_user = runs.c.user_id == user
    for which in (and_(of_user, runs.c.ended_at.is_(None)), of_user):
        page, spent = await erase_runs(tx, tenant_id, which)
        if page:
            # All transactions lock rows in the same order: the row of this statement comes last.
            await tx.execute(select(func.count_spending(tenant_id, spent)))
            return removed + page
    found = select(sessions.c.id).where(
        sessions.c.tenant_id == tenant_id, sessions.c.user_id == user
    )
    if ids := (await tx.scalars(found.order_by(sessions.c.id).limit(RUNS_AT_ONCE))).all():
        await erase_sessions(tx, tenant_id, ids, removed)
        return removed
    if await erase_episodes(tx, tenant_id, episodes.c.user_id == user, removed):
        return removed
    for each in await tables_with(tx, _user_column):
        if each.name not in _NAMING:
            named = and_(tenant_column == tenant_id, _user_column == user)
            await delete_rows(tx, each, named, removed)
    await _forget_answers(tx, tenant_id, user, removed)
    return removed


async def _forget_answers(
    tx: AsyncConnection, tenant_id: UUID, user: str, removed: Removed
) -> None:
    """Remove responses that are stored under idempotency keys and name the user."""
    body = idempotency_keys.c.answer
    places = (("body", "user"), ("body", "user_id"), ("body", "run", "user"))
    naming = or_(*(body[place].astext == user for place in places))
    answers = and_(idempotency_keys.c.tenant_id == tenant_id, naming)
    await delete_rows(tx, idempotency_keys, answers, removed)


OWNERS = {"user_id": "text", "run_id": "uuid", "session_id": "text", "episode_id": "uuid"}
"""Columns that name an owner, with their types; the first of these in a table names the owner."""
NOT_EXPORTED = frozenset(
    (
        "user_erasures",  # an export during an erasure is not possible
        "run_queue",  # which worker executes each run
        "run_heads",
        "ended_tokens",  # credentials
        "idempotency_keys",  # copies of responses
        "episode_search",  # words of episodes
        "episode_vectors",  # vectors that were computed from episodes
        "episode_work",
        "pattern_applications",  # judgements of patterns, without texts
        "pattern_sources",
    )
)
"""Tables that the export leaves out, because other tables have all their facts about a user."""
_BY_SESSION = frozenset(("session_memory",))
"""Tables whose rows belong to a session, although each row also names the session's last run."""
_BY_FIRST = frozenset(("files", "forked_turns"))
"""Tables whose rows have owners of different kinds: the first owner column with a value counts."""

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
    """The rows of one table, with the column that names each row's owner.

    Attributes:
        key: names and types of the primary key's columns, except ``tenant_id``.
        owner: the column that has the owner's name or id.
        where: an additional SQL condition.
    """

    table: str
    key: Sequence[tuple[str, str]]
    owner: str
    where: str = "true"


async def find(connection: AsyncConnection) -> list[Belongings]:
    """Return descriptions of the rows that an export contains; no row matches two of them."""
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
"""Maximum size of a page in bytes; a larger first row is a page of its own."""
_OWNERS = 50
"""Number of runs, sessions or episodes whose rows are read together."""
_HIDDEN = ("tenant_id", "filler", "object_key", "object_keys")
"""Columns that the export leaves out."""
_OWNING = {"runs": "run_id", "sessions": "session_id", "episodes": "episode_id"}
"""Tables whose rows own other rows, and the column of other tables that names such an owner."""
_TYPES = {"user_facts": "fact"}
"""Types of lines whose name differs from the table's name."""
_MORE = {
    # A row has a step's events as lines of JSON; the export has a list of events.
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
        """Check that the user has data, and is not being erased.

        Raises:
            NotFoundError: no stored data belongs to the user.
            UserErasingError: the user is being erased.
        """
        if (await get(tx, self.tenant_id, self.user))["status"] == "erasing":
            raise UserErasingError

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield pages of lines; each line is a JSON object that has ``type`` and ``data``.

        The last line has the type ``end`` and the numbers of lines by type. This line is missing if
        an erasure of the user began or an error occurred during the export.
        """
        async with self.database.begin(self.tenant_id) as tx:
            found = await find(tx)
        try:
            async for lines, _ in self._pages(_SCHEDULES, _SCHEDULES_OF_USER):
                yield lines
            for each in found:
                if each.owner == "user_id":
                    async for lines in self._owned(each, found):
                        yield lines
        except UserErasingError:
            return
        yield self._line("end", to_json({"lines": self._count}))

    async def _owned(self, of: Belongings, found: Sequence[Belongings]) -> AsyncIterator[bytes]:
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
        values = {"tenant": self.tenant_id, "user": self.user, "ids": ids, "after": None}
        while True:
            query = _page(of, owners, is_first=values["after"] is None)
            async with self.database.begin(self.tenant_id) as tx:
                if await is_erasing(tx, self.tenant_id, self.user):
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
        for number, object_key in enumerate(object_keys):
            data = await self.objects.get(object_key)
            about = {"of": table, "key": key, "piece": number, "base64": b64encode(data).decode()}
            yield self._line("content", to_json(about))

    def _line(self, kind: str, data: bytes) -> bytes:
        kind = _TYPES.get(kind, kind)
        self._count[kind] += 1
        return b'{"type":"%s","data":%s}\n' % (kind.encode(), data)


async def as_array(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Convert pages of JSON lines to pages that together are one JSON array."""
    before = b"["
    async for page in lines:
        yield before + page.rstrip(b"\n").replace(b"\n", b",\n")
        before = b",\n"
    yield b"[]" if before == b"[" else b"]"


def _page(of: Belongings, owners: str, *, is_first: bool) -> TextClause:
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
