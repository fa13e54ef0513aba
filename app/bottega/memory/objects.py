"""Large bodies of episodes, in a folder or in an object store (spec page 4, M11).

One library (obstore) speaks to a local folder, S3 and what is like it, Google Cloud Storage and
Azure. An object is written once, as a whole, and carries a checksum of what it holds.
"""

import asyncio
import contextlib
import os
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from uuid import UUID, uuid4

from obstore.exceptions import BaseError
from obstore.exceptions import NotFoundError as Missing
from obstore.store import LocalStore, from_url

from bottega.errors import BottegaError, InvalidInputError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

MAX_BYTES = 256 * 1024 * 1024
"""Of one body, before it is compressed."""

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")

_KEY = re.compile(r"[0-9a-f-]{36}/[0-9a-f-]{36}/[a-z0-9-]{1,80}")
_FORM = b"BTG1"
_DIGEST = 16
_LEVEL = 6
_TRIES = 3
_CONNECT_S = 5.0
_LONGEST_QUOTE = 200


class CorruptObjectError(BottegaError):
    """An object does not hold what was written."""

    code = "object_corrupt"


def new_key(tenant_id: UUID, episode_id: UUID, part: str) -> str:
    """``<tenant>/<episode>/<part>-<random>``: no key is ever used twice, so that what is about to
    be deleted is never what was just written."""
    return f"{tenant_id}/{episode_id}/{part}-{uuid4().hex[:12]}"


class Objects:
    """Bytes by key, compressed (zlib) and checked when they are read.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix`` or ``file:///folder``.
            Addresses and credentials of a store come from its usual environment variables
            (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID`` …). A folder is made if it is missing.
        timeout_s: longest time of one operation, in seconds.

    Attributes:
        local: whether it is a folder, which other machines do not see.

    Raises:
        InvalidInputError: the URL, or what belongs to it, cannot be used.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            known = ", ".join(f"{each}://" for each in SCHEMES)
            raise InvalidInputError(f"BOTTEGA_OBJECTS_URL must begin with one of {known}")
        self.local = scheme == "file"
        self._folder = Path(unquote(urlsplit(url).path)) if self.local else None
        retries: RetryConfig = {
            "max_retries": _TRIES - 1,
            "retry_timeout": timedelta(seconds=timeout_s),
        }
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
            # Only an endpoint that somebody wrote down with http:// is ever asked by it.
            "allow_http": True,
        }
        try:
            # A folder is made when something is put into it, not where nothing ever is.
            self._store: ObjectStore | None = (
                None if self.local else from_url(url, client_options=client, retry_config=retries)
            )
        except (BaseError, ValueError) as error:
            raise InvalidInputError(
                f"BOTTEGA_OBJECTS_URL cannot be used: {_first_line(error)}"
            ) from None

    async def put(self, key: str, body: bytes) -> None:
        """Write an object: afterwards it is there as a whole, or not at all.

        Raises:
            InvalidInputError: the key is of another form, or the body too long.
            UnavailableError: the store cannot be reached, or refuses.
        """
        _check(key)
        if len(body) > MAX_BYTES:
            raise InvalidInputError(f"a body may have {MAX_BYTES >> 20} MB at most")
        packed = await asyncio.to_thread(pack, body)
        async with self._asking():
            # In one piece: an upload in parts leaves its parts behind when it breaks off.
            await self._opened().put_async(key, packed, use_multipart=False)
            if self._folder is not None:
                await asyncio.to_thread(_flush, self._folder, key)

    async def get(self, key: str) -> bytes:
        """What was written.

        Raises:
            NotFoundError: there is no such object.
            CorruptObjectError: it is not what was written.
            UnavailableError: the store cannot be reached, or refuses.
        """
        _check(key)
        try:
            async with self._asking():
                answer = await self._opened().get_async(key)
                packed = bytes(await answer.bytes_async())
        except _MissingError:
            raise NotFoundError(f"the object store has no object {key}") from None
        return await asyncio.to_thread(unpack, key, packed)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are no error.

        Raises:
            UnavailableError: the store cannot be reached, or refuses; some may be gone.
        """
        for key in keys:
            _check(key)
        if not keys:
            return
        try:
            async with self._asking():
                await self._opened().delete_async(list(keys))
        except _MissingError:
            # Some stores find fault with a missing one, and may leave others then.
            for key in keys:
                with contextlib.suppress(_MissingError):
                    async with self._asking():
                        await self._opened().delete_async(key)

    def _opened(self) -> "ObjectStore":
        if self._store is None:
            assert self._folder is not None
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._store = LocalStore(self._folder, mkdir=True)
        return self._store

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Turn what the store says into errors of ours."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (Missing, FileNotFoundError) as error:
            if self._folder is not None and not self._folder.is_dir():
                raise self._unavailable("the folder is gone") from None
            if "NoSuchBucket" in str(error):
                raise self._unavailable("the bucket does not exist") from None
            raise _MissingError from None
        except (BaseError, OSError, ValueError) as error:
            if "NoSuchBucket" in str(error):
                raise self._unavailable("the bucket does not exist") from None
            why = "no answer in time" if isinstance(error, TimeoutError) else _first_line(error)
            raise self._unavailable(why) from None

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"the object store cannot be used ({why}): check BOTTEGA_OBJECTS_URL and what belongs "
            "to it",
            code="object_store",
        )


class _MissingError(Exception):
    """There is no such object."""


def pack(body: bytes) -> bytes:
    """A body as it is stored: its form, its checksum, and itself compressed. Pure."""
    return _FORM + _digest(body) + zlib.compress(body, _LEVEL)


def unpack(key: str, packed: bytes) -> bytes:
    """The body that was packed. Pure.

    Raises:
        CorruptObjectError: it is no such thing, or not the same.
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
            f"the object {key} does not hold what was written there: restore it from a backup"
        )
    return body


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST).digest()


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise InvalidInputError("a key is <tenant>/<episode>/<part>")


def _flush(folder: Path, key: str) -> None:
    """See that a file, and its place in its folders, outlast a loss of power."""
    for path in _way(folder, key):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _way(folder: Path, key: str) -> Iterator[Path]:
    path = folder / key
    while path != folder:
        yield path
        path = path.parent
    yield folder


def _first_line(error: BaseException) -> str:
    line = str(error).split("\n", 1)[0]
    return line if len(line) <= _LONGEST_QUOTE else f"{line[:_LONGEST_QUOTE]}…"
