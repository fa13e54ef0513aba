"""Objects: one suite for the local folder, an S3 API (moto's server), and the database."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import httpx2
import pytest
from obstore.store import S3Store

from bottega.db.pool import Database, acting_as
from bottega.errors import InvalidInputError, UnavailableError
from bottega.objects import (
    PIECE_BYTES,
    CorruptObjectError,
    Objects,
    StoredElsewhereError,
    new_key,
    pack,
)

TENANT = UUID(int=7)
EPISODE = UUID(int=8)


@dataclass
class Place:
    """Storage place for objects.

    Attributes:
        write: stores raw bytes without ``Objects``.
        break_down: makes an object store unreachable.
    """

    url: str | None
    pool: asyncpg.Pool
    write: Callable[[str, bytes], Awaitable[object]]
    break_down: Callable[[], None] = lambda: None

    def open(self) -> Objects:
        return Objects(self.url, self.pool, timeout_s=10.0)


@pytest.fixture(params=["folder", "s3", "in_database"])
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(request.param)
    return place


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(request.param)
    return place


@pytest.fixture
def folder(tmp_path: Path, database: Database) -> Place:
    root = tmp_path / "made when it is opened"

    async def write(key: str, data: bytes) -> None:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)

    return Place(root.as_uri(), database.pool, write, lambda: shutil.rmtree(root))


@pytest.fixture
def in_database(database: Database, owner: asyncpg.Pool) -> Place:
    insert = "INSERT INTO object_pieces VALUES ($1, $2, 0, $3)"
    return Place(None, database.pool, lambda key, data: owner.execute(insert, TENANT, key, data))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, database: Database) -> Iterator[Place]:
    from moto.server import ThreadedMotoServer  # takes half a second

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            server.stop()
            assert server._server is not None
            server._server.server_close()

    options = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    beside = S3Store("bucket", prefix="some/prefix", client_options={"allow_http": True})
    _make_bucket(f"http://{host}:{port}", "bucket")
    try:
        yield Place("s3://bucket/some/prefix", database.pool, beside.put_async, stop)
    finally:
        stop()


def _make_bucket(endpoint: str, name: str) -> None:
    signed = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"
    with httpx2.Client(trust_env=False) as client:
        client.put(f"{endpoint}/{name}", headers={"authorization": signed}).raise_for_status()


def a_key(part: str = "trace") -> str:
    return new_key(TENANT, EPISODE, part)


@pytest.mark.parametrize("body", [b"", b"x", b"long " * 200_000, os.urandom(6_000_000)])
async def test_a_stored_object_is_read_back(place: Place, body: bytes) -> None:
    objects, key = place.open(), a_key()

    await objects.put(key, body)

    assert await objects.get(key) == body
    assert await place.open().get(key) == body  # as another process sees it


async def test_each_key_has_its_own_object(place: Place) -> None:
    objects = place.open()
    keys = [new_key(uuid4(), uuid4(), "output") for _ in range(20)]

    await asyncio.gather(*(objects.put(key, key.encode()) for key in keys))

    assert await asyncio.gather(*map(objects.get, keys)) == [key.encode() for key in keys]


async def test_a_second_put_replaces_the_object(place: Place) -> None:
    objects, key = place.open(), a_key()
    await objects.put(key, b"one")
    await objects.put(key, b"two")

    assert await objects.get(key) == b"two"


async def test_deleting_removes_an_object_and_ignores_missing_ones(place: Place) -> None:
    objects = place.open()
    keys = [a_key() for _ in range(3)]
    for key in keys[:2]:
        await objects.put(key, b"x")

    await objects.delete([a_key(), *keys, a_key()])
    await objects.delete(keys)
    await objects.delete([])

    for key in keys:
        with pytest.raises(StoredElsewhereError):
            await objects.get(key)


async def test_a_corrupted_object_is_never_returned(place: Place) -> None:
    objects = place.open()
    good = pack(b"the trace of a run")
    broken = [b"", b"BTG1", good[:-1], good + b"x", good[:5] + b"\x00" + good[6:], good[4:]]
    for data in broken:
        key = a_key()
        await place.write(key, data)
        with pytest.raises(CorruptObjectError):
            await objects.get(key)
    key = a_key()
    await place.write(key, good)
    assert await objects.get(key) == b"the trace of a run"


async def test_a_malformed_key_is_refused(place: Place) -> None:
    objects = place.open()
    for key in (
        *("../x", "/etc/passwd", f"{TENANT}/../x", f"{TENANT}/{EPISODE}/../trace", "", "a/b/c"),
        *(f"{TENANT}/{EPISODE}/{part}" for part in ("trace\x00", "a/b", "%2e%2e", "..")),
    ):
        for attempt in (objects.put(key, b""), objects.get(key), objects.delete([key])):
            with pytest.raises(InvalidInputError):
                await attempt


async def test_a_store_that_is_down_raises_an_error(store: Place) -> None:
    objects, key = store.open(), a_key()
    await objects.put(key, b"x")
    store.break_down()

    with pytest.raises(UnavailableError, match="BOTTEGA_OBJECTS_URL"):
        await objects.get(key)
    with pytest.raises(UnavailableError):
        await objects.delete([key])


async def test_writing_to_s3_that_is_down_fails(s3: Place) -> None:
    objects = s3.open()
    s3.break_down()

    with pytest.raises(UnavailableError):
        await objects.put(a_key(), b"x")


async def test_a_bucket_that_does_not_exist_is_not_a_missing_object(s3: Place) -> None:
    objects = Objects("s3://no-such-bucket/x", s3.pool, timeout_s=10.0)

    for attempt in (objects.put(a_key(), b"x"), objects.get(a_key())):
        with pytest.raises(UnavailableError, match="bucket does not exist"):
            await attempt


async def test_the_folder_is_closed_to_others(folder: Place, tmp_path: Path) -> None:
    objects = folder.open()
    await objects.put(a_key(), b"x")

    root = tmp_path / "made when it is opened"
    assert root.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("url", ["nonsense", "ftp://x/y", "http://x/y", "memory:///", "s3://", ""])
async def test_an_invalid_address_is_refused_at_once(database: Database, url: str) -> None:
    with pytest.raises(InvalidInputError, match="BOTTEGA_OBJECTS_URL"):
        Objects(url, database.pool)


async def test_objects_of_the_database_stay_when_a_store_is_set(
    in_database: Place, folder: Place
) -> None:
    before, after = in_database.open(), folder.open()
    old, new = a_key(), a_key()
    await before.put(old, b"old")
    await after.put(new, b"new")

    assert [await after.get(old), await after.get(new)] == [b"old", b"new"]
    with pytest.raises(StoredElsewhereError):
        await before.get(new)

    await after.delete([old, new])
    for key in (old, new):
        with pytest.raises(StoredElsewhereError):
            await after.get(key)


async def test_pieces_in_the_database_are_small_and_of_one_tenant(
    in_database: Place, owner: asyncpg.Pool
) -> None:
    objects, key = in_database.open(), a_key()
    body = os.urandom(3 * PIECE_BYTES + 1000)
    await objects.put(key, body)
    other = key.replace(str(TENANT), str(UUID(int=9)), 1)

    assert await objects.get(key) == body
    with pytest.raises(StoredElsewhereError):
        await objects.get(other)
    sizes = await owner.fetch("SELECT length(content) FROM object_pieces ORDER BY number")
    assert [row[0] for row in sizes[:3]] == [PIECE_BYTES] * 3
    assert len(sizes) == 4
    async with acting_as(in_database.pool, UUID(int=9)) as connection:
        assert await connection.fetch("SELECT FROM object_pieces") == []
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("INSERT INTO object_pieces VALUES ($1, 'x', 0, '')", TENANT)
