"""Files of tenants: rows in the database, and their bytes in the object store.

A file's bytes are stored in pieces, which are objects of equal size. So an upload needs memory for
one piece only, and a reader of a few bytes loads only their pieces. Before a piece is written, its
key is stored in the database. If the piece belongs to no file an hour later, for example because
the process was killed, another process deletes the piece.

This module also lists and deletes files for API requests, and deletes unused files.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
from cachetools import LRUCache
from pydantic_core import to_json
from sqlalchemy import ColumnElement, Select, Table, and_, delete, func, select, true, union, update
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from bottega.agents.parts import FileContent, content_tokens
from bottega.clock import Clock, utcnow
from bottega.db.pages import FIRST_PLACE, PageItems, fetch_page, lateral_rows, paged
from bottega.db.pool import AsyncConnection, Database, acting_as, acting_user
from bottega.db.quota import storage_full
from bottega.db.tables import files, runs, sessions
from bottega.errors import (
    InvalidInputError,
    LimitedError,
    NotFoundError,
    UnavailableError,
    UserErasingError,
    no_run,
)
from bottega.events.log import storable
from bottega.logger import Logger
from bottega.objects import Objects, new_key
from bottega.outside import BoundedReader
from bottega.tools.media import HEAD_BYTES, PageCount, media_type_of, pixels_of

MOST_BYTES = 100_000_000
"""Maximum size of a file in bytes."""
LARGEST_IN_PROMPT = 32_000_000
"""Maximum size, in bytes, of a file in a prompt. Models' servers refuse larger requests."""
PIECE_BYTES = 1 << 20
_MOST_CLAIMED = 16
_CACHED_BYTES = 64_000_000

_COLUMNS = "id, session_id, name, media_type, size, sha256, tokens, created_at"
_FIND = f"SELECT {_COLUMNS}, object_keys, piece_bytes FROM files WHERE tenant_id = $1 AND id = $2"  # noqa: S608
_USE = f"""
UPDATE files f SET used_at = now()
WHERE f.tenant_id = $1 AND f.id = ANY ($2) AND file_serves(f, $3, $4, $5) RETURNING {_COLUMNS}
"""  # noqa: S608
_BEGIN = "SELECT uuidv7() AS id, storage_exceeded($1) IS NOT NULL AS full"
_DISCARD = "DELETE FROM files WHERE tenant_id = $1 AND id = ANY ($2)"


KEPT = timedelta(days=30)
"""Time after its last use for which a file without a session is kept."""


@dataclass(frozen=True, slots=True)
class FileQuota:
    """Limits of the number and total size of a tenant's files."""

    bytes: int = 10_000_000_000
    count: int = 10_000


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """The source of a file, and the session or run to which the file belongs.

    Attributes:
        session_id: the session that the file belongs to. The file is deleted with this session.
        run_id: the run whose tool made the file. The file is deleted with this run.
        name: the file's name, as the sender wrote it.
        media_type: the media type that the sender declared.
    """

    session_id: str | None = None
    run_id: UUID | None = None
    name: str | None = None
    media_type: str | None = None


class Owner(NamedTuple):
    """User and session of a run, if any. The run may use all files of this user and this session.

    Attributes:
        run_id: id of the run; ``None`` for a new run.
    """

    user: str | None
    session_id: str | None
    run_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class FileStore:
    """The files of all tenants."""

    database: Database
    objects: Objects
    quota: FileQuota = FileQuota()
    _cache: "LRUCache[tuple[UUID, str], FileContent]" = field(
        default_factory=lambda: LRUCache(_CACHED_BYTES, getsizeof=lambda file: len(file.data))
    )

    async def add(self, tenant_id: UUID, data: bytes, origin: FileOrigin) -> dict[str, Any]:
        """Store a file that is in memory. Return the file's row.

        This method raises the errors of :meth:`writing` and :meth:`FileWriter.finish`.
        """
        async with self.writing(tenant_id) as writer:
            await writer.write(data)
            return await writer.finish(origin)

    @asynccontextmanager
    async def writing(self, tenant_id: UUID) -> "AsyncIterator[FileWriter]":
        """Yield a writer of a new file. If the writer does not finish, delete the pieces.

        Raises:
            LimitedError: ``storage_quota``.
        """
        async with self._acting(tenant_id) as connection:
            new = await connection.fetchrow(_BEGIN, tenant_id)
        if new["full"]:
            raise storage_full()
        writer = FileWriter(self, tenant_id, new["id"])
        try:
            yield writer
        finally:
            if not writer.kept:
                # If this deletion fails, another process deletes the pieces an hour later.
                with suppress(UnavailableError):
                    await self.objects.delete(writer.keys)

    async def find(self, tenant_id: UUID, file_id: UUID) -> Mapping[str, Any]:
        """Return a file's row.

        Raises:
            NotFoundError: the tenant has no such file.
        """
        async with self._acting(tenant_id) as connection:
            row = await connection.fetchrow(_FIND, tenant_id, file_id)
        if row is None:
            raise NotFoundError(f"there is no file {file_id}")
        return dict(row)

    async def discard(self, tenant_id: UUID, ids: Iterable[UUID]) -> None:
        """Delete new files to which no run refers. Ids of files that do not exist are ignored."""
        async with self._acting(tenant_id) as connection:
            await connection.execute(_DISCARD, tenant_id, list(ids))

    async def use(
        self, tenant_id: UUID, ids: list[UUID], owner: Owner
    ) -> dict[UUID, Mapping[str, Any]]:
        """Record that a run uses files. Return the rows of the files that the run may use."""
        async with self._acting(tenant_id) as connection:
            rows = await connection.fetch(_USE, tenant_id, sorted(set(ids)), *owner)
        return {row["id"]: dict(row) for row in rows}

    async def read(
        self, row: Mapping[str, Any], start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the bytes of a file from ``start`` (inclusive) to ``end`` (exclusive), in pieces.

        Args:
            row: result of :meth:`find`.

        Raises:
            StoredElsewhereError, CorruptObjectError, UnavailableError: see :meth:`Objects.get`.
        """
        size = row["piece_bytes"]
        end = row["size"] if end is None else end
        for number in range(start // size, -(-end // size)):
            piece = await self.objects.get(row["object_keys"][number])
            begin = number * size
            yield piece[max(0, start - begin) : end - begin]

    async def load(self, tenant_id: UUID, file: str) -> FileContent:
        """Return a whole file. A cache has the bytes of recently used files.

        Raises:
            InvalidInputError: ``unknown_file``, or ``file_too_large`` for a model.
            UnavailableError: the object store is unreachable.
        """
        key = tenant_id, file
        try:
            row = await self.find(tenant_id, UUID(file))
            if (cached := self._cache.get(key)) is not None:
                return cached
            check_size(row)
            data = b"".join([piece async for piece in self.read(row)])
        except (NotFoundError, ValueError):
            self._cache.pop(key, None)
            raise unknown_file(file) from None
        content = self._cache[key] = FileContent(data, row["media_type"], row["name"])
        return content

    def forget(self, tenant_id: UUID | None) -> None:
        """Remove a tenant's files from the cache; ``None``: remove the files of all tenants."""
        for key in [key for key in self._cache if tenant_id in (None, key[0])]:
            del self._cache[key]

    @asynccontextmanager
    async def _acting(self, tenant_id: UUID) -> AsyncIterator[asyncpg.Connection]:
        async with (
            self.database.turn(tenant_id),
            acting_as(self.database.pool, tenant_id) as connection,
        ):
            yield connection


class FileWriter:
    """Writer of one new file. :meth:`FileStore.writing` makes the writer.

    Attributes:
        size: number of bytes written so far.
        keys: keys that were stored; the object store may have a piece at each of these keys.
        kept: true if the file's row may exist. Then the pieces must not be deleted.
    """

    def __init__(self, store: FileStore, tenant_id: UUID, file_id: UUID) -> None:
        self.size = 0
        self.keys: list[str] = []
        self.kept = False
        self._store = store
        self._tenant_id = tenant_id
        self._id = file_id
        self._chunks = 0
        self._waiting = bytearray()
        self._head = b""
        self._pixels: int | None = None
        self._pages = PageCount()
        self._reader = BoundedReader(MOST_BYTES)
        self._hash = sha256()

    async def write(self, data: bytes) -> None:
        """Append bytes to the file.

        Raises:
            InvalidInputError: ``file_too_large``.
            UnavailableError: the object store is unreachable.
        """
        self.size += len(data)
        if self.size > MOST_BYTES:
            raise InvalidInputError(
                f"the file is larger than {MOST_BYTES // 10**6} MB", code="file_too_large"
            )
        async for step in self._reader.steps(data):
            self._look_at(step)
            while len(self._waiting) >= PIECE_BYTES:
                piece = bytes(self._waiting[:PIECE_BYTES])
                del self._waiting[:PIECE_BYTES]
                await self._put(piece)

    def _look_at(self, step: bytes) -> None:
        self._hash.update(step)
        self._waiting += step
        if len(self._head) < HEAD_BYTES:
            self._head += step[: HEAD_BYTES - len(self._head)]
        if self._head.startswith(b"%PDF-"):
            self._pages.feed(step)

    async def finish(self, origin: FileOrigin) -> dict[str, Any]:
        """Store and return the file's row.

        Raises:
            LimitedError: ``file_quota``.
            UserErasingError: the data of the session's user is being erased.
            UnavailableError: the object store is unreachable.
        """
        if self._waiting:
            await self._put(bytes(self._waiting))
        media_type = media_type_of(self._head, origin.media_type)
        pages = self._pages.pages or None
        new = {
            "id": self._id,
            "session_id": origin.session_id,
            "run_id": origin.run_id,
            "user_id": None if (acting := acting_user.get()) is None else acting.user,
            "name": storable(origin.name),
            "media_type": media_type,
            "size": self.size,
            "sha256": self._hash.hexdigest(),
            "tokens": content_tokens(media_type, self.size, pixels=self._pixels, pages=pages),
            "object_keys": self.keys[: self._chunks],
            "unused_keys": self.keys[self._chunks :],
            "piece_bytes": PIECE_BYTES,
        }
        quota = self._store.quota
        row_json = to_json(new).decode()
        self.kept = True  # set before the commit, because the response to a commit may get lost
        async with self._store._acting(self._tenant_id) as connection:
            try:
                over = await connection.fetchval(
                    "SELECT add_file($1, $2, $3)", row_json, quota.bytes, quota.count
                )
            except asyncpg.ForeignKeyViolationError:  # the file's run was deleted
                self.kept = False
                raise
            if over is not None:
                self.kept = False
                raise UserErasingError if over == "user_erasing" else _over(over, quota)
            row = await connection.fetchrow(_FIND, self._tenant_id, self._id)
        return dict(row)

    async def _put(self, piece: bytes) -> None:
        if not self._chunks:
            self._pixels = pixels_of(piece)
        if self._chunks == len(self.keys):
            await self._claim()
        # Use the lowest compression level, because most files are already compressed.
        await self._store.objects.put(self.keys[self._chunks], piece, level=1)
        self._chunks += 1

    async def _claim(self) -> None:
        first = len(self.keys)  # one key in the first call, because most files have one piece
        more = range(first, first + min(max(1, first), _MOST_CLAIMED))
        keys = [new_key(self._tenant_id, self._id, f"p{number}") for number in more]
        async with self._store._acting(self._tenant_id) as connection:
            await connection.execute("SELECT claim_objects($1)", keys)
        self.keys += keys


def _over(limit: str, quota: FileQuota) -> LimitedError:
    what = f"{quota.count} files" if limit == "files" else f"{quota.bytes} bytes of files"
    return LimitedError(
        f"a tenant may have at most {what}: delete files that are not needed",
        code="file_quota",
        retry_after_s=60.0,
    )


def unknown_file(file: str, pointer: str | None = None) -> InvalidInputError:
    """Return the error for a file that does not exist or belongs to another tenant or user."""
    return InvalidInputError(f"there is no file {file}", code="unknown_file", pointer=pointer)


def check_size(row: Mapping[str, Any], pointer: str | None = None) -> None:
    """Refuse a file that is too large for a prompt.

    Raises:
        InvalidInputError: ``file_too_large``.
    """
    if row["size"] > LARGEST_IN_PROMPT:
        raise InvalidInputError(
            f"file {row['id']} is larger than the {LARGEST_IN_PROMPT // 10**6} MB that can be "
            "sent to a model",
            code="file_too_large",
            pointer=pointer,
        )


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    session_id: str | None,
    user: str | None = None,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of files, sorted by age. The page begins after the file with the id ``after``.

    Args:
        session_id: list only files of this session.
        user: list only this user's files: uploads with the user's token, and files of the user's
            sessions and runs.
    """
    columns: ReadOnlyColumnCollection[str, Any] = files.c
    query = select(files).where(files.c.tenant_id == tenant_id)
    if user is not None:
        of_session = _of(sessions, files.c.session_id, tenant_id, user)
        own = select(files).where(files.c.tenant_id == tenant_id, files.c.user_id == user)
        ids = union(own, of_session, _of(runs, files.c.run_id, tenant_id, user)).subquery()
        query, columns = select(ids), ids.c
    if session_id is not None:
        query = query.where(columns.session_id == session_id)
    query = paged(query, columns.id, after=after, descending=descending)
    few = session_id is not None or user is not None
    return await fetch_page(connection, query, limit, by_index=not few)


def _of(table: Table, column: ColumnElement[Any], tenant_id: UUID, user: str) -> Select[Any]:
    its = lateral_rows(
        files, and_(files.c.tenant_id == tenant_id, column == table.c.id), *files.c.keys()
    )
    own = table.c.tenant_id == tenant_id, table.c.user_id == user
    return select(*its.c).select_from(table.join(its, true())).where(*own)


async def owner_of_run(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> Owner:
    """Return the user and the session of a run.

    Raises:
        NotFoundError: the tenant has no such run.
    """
    own = runs.c.tenant_id == tenant_id, runs.c.id == run_id
    result = await connection.execute(select(runs.c.user_id, runs.c.session_id).where(*own))
    if (row := result.one_or_none()) is None:
        raise no_run(run_id)
    return Owner(*row, run_id)


async def user_of(connection: AsyncConnection, tenant_id: UUID, file_id: UUID) -> str | None:
    """Return the user of a file's session or run; ``None``: there is no user, or no file."""
    query = "SELECT o.user_id FROM files f, file_owner(f) AS o WHERE f.tenant_id = $1 AND f.id = $2"
    user: str | None = await connection.driver.fetchval(query, tenant_id, file_id)
    return user


async def touch(connection: AsyncConnection, tenant_id: UUID, ids: Sequence[UUID]) -> None:
    if ids:
        same = and_(files.c.tenant_id == tenant_id, files.c.id.in_(sorted(ids)))
        await connection.execute(update(files).where(same).values(used_at=func.now()))


async def remove(connection: AsyncConnection, tenant_id: UUID, file_id: UUID) -> None:
    """Delete a file's row. The file's bytes are deleted some minutes later.

    Raises:
        NotFoundError: the tenant has no such file.
    """
    own = and_(files.c.tenant_id == tenant_id, files.c.id == file_id)
    if not (await connection.execute(delete(files).where(own))).rowcount:
        raise NotFoundError(f"there is no file {file_id}")


_AT_ONCE = 500
_UNUSED = "SELECT tenant_id, id, used_at FROM unused_files($1, $2, $3, $4)"
_DELETE = "DELETE FROM files WHERE tenant_id = $1 AND id = $2 AND used_at < $3"
"""Deletes an unused file. ``used_at`` protects a file that a run has just begun to use."""

log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class FileRetention:
    """Background work that deletes unused files. Several processes may run it at the same time."""

    pool: asyncpg.Pool
    clock: Clock = utcnow

    async def delete_unused(self) -> float:
        """Delete all unused files. Return the seconds until more work is due: always infinity."""
        before = self.clock() - KEPT
        position = FIRST_PLACE
        while due := await self.pool.fetch(_UNUSED, before, *position, _AT_ONCE):
            for row in due:
                async with acting_as(self.pool, row["tenant_id"]) as connection:
                    await connection.execute(_DELETE, row["tenant_id"], row["id"], before)
            log.info("files.expired", count=len(due))
            position = due[-1]["used_at"], due[-1]["id"]
        return float("inf")
