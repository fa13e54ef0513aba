"""Storage of large bodies of episodes and files: an object store, a folder, or the database.

The library obstore reads and writes local folders, S3, stores compatible with S3, Google Cloud
Storage and Azure. Without an object store, the database stores each object as several rows, which
every process can read. An object is written once, as a whole, with a checksum.
"""

import asyncio
import contextlib
import itertools
import os
import re
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import to_json

from bottega.db.pool import acting_as
from bottega.errors import BottegaError, InvalidInputError, UnavailableError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of one body before compression, in bytes."""

PIECE_BYTES = 256 * 1024
"""Size of a row in bytes, so that no message to or from the database has a whole body."""

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")

_KEY = re.compile(r"[0-9a-f-]{36}/[0-9a-f-]{36}/[a-z0-9-]{1,80}")
_FORM = b"BTG1"
_DIGEST = 16


class CorruptObjectError(BottegaError):
    """An object's bytes differ from the bytes that were written."""

    code = "object_corrupt"


class StoredElsewhereError(UnavailableError):
    """A row refers to an object that is neither in the object store nor in the database."""

    code = "stored_elsewhere"

    def __init__(self) -> None:
        super().__init__(
            "the body is not in the object store of this process: give all processes the same "
            "BOTTEGA_OBJECTS_URL, or restore the body from a backup"
        )


def new_key(tenant_id: UUID, owner_id: UUID, part: str) -> str:
    """Return a new key: ``<tenant>/<owner>/<part>-<random>``.

    No key is used twice, so a late deletion cannot delete a newer object.
    """
    return f"{tenant_id}/{owner_id}/{part}-{uuid4().hex[:12]}"


class Objects:
    """A store of bodies by key: it compresses them with zlib, and verifies a checksum at each read.

    Args:
        url: URL of the object store; ``None``: the database stores new objects. In both cases,
            objects in the database can be read and deleted.
        timeout_s: timeout of one operation of the object store, in seconds.

    Raises:
        InvalidInputError: the URL or the store's settings are invalid.
    """

    def __init__(self, url: str | None, pool: asyncpg.Pool, *, timeout_s: float = 30.0) -> None:
        self._pieces = _Pieces(pool)
        self._bucket = None if url is None else Bucket(url, timeout_s=timeout_s)

    async def put(self, key: str, body: bytes, *, level: int = zlib.Z_DEFAULT_COMPRESSION) -> None:
        """Write an object; readers never see an incomplete object.

        Args:
            level: compression level from 0 (none) to 9; the default is zlib's default.

        Raises:
            InvalidInputError: the key is malformed, or the body is too long.
            UnavailableError: the store is unreachable, or refuses the request.
        """
        _check(key)
        if len(body) > MAX_BYTES:
            raise InvalidInputError(f"a body may have {MAX_BYTES >> 20} MB at most")
        packed = await asyncio.to_thread(pack, body, level)
        await (self._bucket or self._pieces).put(key, packed)

    async def get(self, key: str) -> bytes:
        """Return an object's body.

        Raises:
            StoredElsewhereError: the object is neither in the object store nor in the database.
            CorruptObjectError: the object's bytes are not the bytes that were written.
            UnavailableError: the store is unreachable, or refuses the request.
        """
        _check(key)
        packed = None if self._bucket is None else await self._bucket.get(key)
        if packed is None:
            packed = await self._pieces.get(key)
        if packed is None:
            raise StoredElsewhereError
        return await asyncio.to_thread(unpack, key, packed)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; ignore objects that do not exist.

        Raises:
            UnavailableError: the object store is unreachable, or refuses the request. Some objects
                may have been deleted.
        """
        for key in keys:
            _check(key)
        if keys and self._bucket is not None:
            await self._bucket.delete(keys)
        await self._pieces.delete(keys)


_PUT_PIECE = """
INSERT INTO object_pieces (tenant_id, object_key, number, content) VALUES ($1, $2, $3, $4)
"""
_GET_PIECE = """
SELECT content FROM object_pieces WHERE tenant_id = $1 AND object_key = $2 AND number = $3
"""
_STORED = """
SELECT object_key FROM object_pieces WHERE tenant_id = $1 AND object_key = ANY ($2) AND number = 0
"""
_DELETE = "DELETE FROM object_pieces WHERE tenant_id = $1 AND object_key = $2"


class _Pieces:
    """Objects in the database. Each row has a piece of an object, at most :data:`PIECE_BYTES`."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def put(self, key: str, packed: bytes) -> None:
        tenant_id = _tenant_of(key)
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_DELETE, tenant_id, key)
            for number, start in enumerate(range(0, len(packed), PIECE_BYTES)):
                piece = packed[start : start + PIECE_BYTES]
                await connection.execute(_PUT_PIECE, tenant_id, key, number, piece)

    async def get(self, key: str) -> bytes | None:
        pieces: list[bytes] = []
        tenant_id = _tenant_of(key)
        async with acting_as(self._pool, tenant_id) as connection:
            while not pieces or len(pieces[-1]) == PIECE_BYTES:
                piece = await connection.fetchval(_GET_PIECE, tenant_id, key, len(pieces))
                if piece is None:
                    break
                pieces.append(piece)
        return b"".join(pieces) if pieces else None

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete each object in a separate transaction, because a large object has many rows."""
        for tenant_id, some in itertools.groupby(sorted(keys), _tenant_of):
            async with acting_as(self._pool, tenant_id) as connection:
                stored = await connection.fetch(_STORED, tenant_id, list(some))
            for row in stored:
                async with acting_as(self._pool, tenant_id) as connection:
                    await connection.execute(_DELETE, tenant_id, row["object_key"])


def _tenant_of(key: str) -> UUID:
    return UUID(key.partition("/")[0])


class Bucket:
    """Objects in a folder or in an object store.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix`` or ``file:///folder``. A
            store's address and credentials come from the usual environment variables, such as
            ``AWS_ENDPOINT_URL`` and ``AWS_ACCESS_KEY_ID``. A folder is created at its first use.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self._timeout_s = timeout_s
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            known = ", ".join(f"{each}://" for each in SCHEMES)
            raise InvalidInputError(f"BOTTEGA_OBJECTS_URL must begin with one of {known}")
        self._folder = Path(unquote(urlsplit(url).path)) if scheme == "file" else None
        retries: RetryConfig = {
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=timeout_s),
        }
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
            # Permit plain HTTP, which the client uses only if its endpoint begins with http://.
            "allow_http": True,
        }
        try:
            # For a folder, `_opened` creates the store.
            self._store: ObjectStore | None = (
                from_url(url, client_options=client, retry_config=retries)
                if self._folder is None
                else None
            )
        except (BaseError, ValueError) as error:
            raise InvalidInputError(
                f"BOTTEGA_OBJECTS_URL is invalid: {_first_line(error)}"
            ) from None

    async def put(self, key: str, packed: bytes) -> None:
        async with self._asking():
            # Upload in one request: after an interrupted multipart upload, parts would remain.
            await self._opened().put_async(key, packed, use_multipart=False)
            if self._folder is not None:
                await asyncio.to_thread(_flush, self._folder, key)

    async def get(self, key: str) -> bytes | None:
        try:
            async with self._asking():
                answer = await self._opened().get_async(key)
                return bytes(await answer.bytes_async())
        except _MissingError:
            return None

    async def delete(self, keys: Sequence[str]) -> None:
        try:
            async with self._asking():
                await self._opened().delete_async(list(keys))
        except _MissingError:
            # Delete the objects one by one: if an object of a list is missing, some stores may not
            # delete the list's other objects.
            for key in keys:
                with contextlib.suppress(_MissingError):
                    async with self._asking():
                        await self._opened().delete_async(key)

    def _opened(self) -> "ObjectStore":
        if self._store is None:
            from obstore.store import LocalStore

            assert self._folder is not None
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._store = LocalStore(self._folder, mkdir=True)
        return self._store

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        from obstore.exceptions import BaseError
        from obstore.exceptions import NotFoundError as Missing

        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (BaseError, OSError, ValueError) as error:
            why = _first_line(error)
            if "NoSuchBucket" in str(error):
                why = "the bucket does not exist"
            elif isinstance(error, TimeoutError):
                why = "no answer in time"
            elif isinstance(error, (Missing, FileNotFoundError)):
                if self._folder is None or self._folder.is_dir():
                    raise _MissingError from None
                why = "the folder is gone"
            raise UnavailableError(
                f"the object store is unavailable ({why}): check BOTTEGA_OBJECTS_URL and "
                "credentials",
                code="object_store",
            ) from None


class _MissingError(Exception):
    """The object store does not have the object."""


def pack(body: bytes, level: int = zlib.Z_DEFAULT_COMPRESSION) -> bytes:
    """Return a body's stored form: format, checksum, and compressed bytes. Pure."""
    return _FORM + _digest(body) + zlib.compress(body, level)


def unpack(key: str, packed: bytes) -> bytes:
    """Return the body that a stored form contains. Pure.

    Raises:
        CorruptObjectError: the format or the checksum is wrong.
    """
    start = len(_FORM) + _DIGEST
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(packed[start:], MAX_BYTES + 1)
    except zlib.error:
        body = b""
    whole = packed.startswith(_FORM) and unpacker.eof and not unpacker.unused_data
    if not whole or _digest(body) != packed[len(_FORM) : start]:
        raise CorruptObjectError(
            f"the object {key} has changed since it was written: restore it from a backup"
        )
    return body


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST).digest()


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise InvalidInputError("a key must have the form <tenant>/<owner>/<part>")


def _flush(folder: Path, key: str) -> None:
    """Write a file and its folders to disk; otherwise a power failure could remove them."""
    for name in (PurePath(key), *PurePath(key).parents):
        handle = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


_AT_A_TIME = 8

_INLINE = """
SELECT episode_id, part, content FROM episode_bodies
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND part = ANY ($3) AND content IS NOT NULL
ORDER BY episode_id, part
"""

ALL_PARTS = ("trace", "input", "output")


async def copied(
    pool: asyncpg.Pool, objects: Objects, tenant_id: UUID, ids: Sequence[UUID], parts: Sequence[str]
) -> str:
    """Copy episodes' bodies from the database to the object store.

    Returns:
        JSON for the SQL functions: ``episode_id``, ``part`` and ``object_key`` of each copied body.

    Raises:
        UnavailableError: the object store is unreachable; no episode has changed.
    """
    async with acting_as(pool, tenant_id) as connection:
        rows = await connection.fetch(_INLINE, tenant_id, ids, parts)
        keys = [new_key(tenant_id, row["episode_id"], row["part"]) for row in rows]
        if keys:
            await connection.execute("SELECT claim_objects($1)", keys)
    for start in range(0, len(rows), _AT_A_TIME):
        some = slice(start, start + _AT_A_TIME)
        puts = [
            objects.put(key, row["content"].encode())
            for key, row in zip(keys[some], rows[some], strict=True)
        ]
        for ended in await asyncio.gather(*puts, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
    moved = [
        {"episode_id": row["episode_id"], "part": row["part"], "object_key": key}
        for key, row in zip(keys, rows, strict=True)
    ]
    return to_json(moved).decode()
