"""Files beside crashes and time: nothing stays behind."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx2
import psutil
import pytest

from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import InvalidInputError
from bottega.files.store import FileOrigin, FileRetention, FileStore, Owner
from bottega.objects import Objects
from tests.processes import Command, command
from tests.service import client_of
from tests.waiting import until

MEGABYTE = 1 << 20


async def objects(owner: asyncpg.Pool) -> int:
    """Return the number of objects in the database."""
    query = "SELECT count(DISTINCT object_key) FROM object_pieces"
    count: int = await owner.fetchval(query)
    return count


def settings_of(database_url: str, folder: Path, **more: str) -> dict[str, str]:
    """Return the settings of a process that shares nothing but the database with others."""
    return {
        "DATABASE_URL": database_url,
        "BOTTEGA_DATA_DIR": str(folder),
        "OPENAI_API_KEY": "test-key",
        **more,
    }


@pytest.mark.deep
async def test_an_upload_cut_off_by_kill_9_leaves_nothing(
    database_url: str, tmp_path: Path, owner: asyncpg.Pool
) -> None:
    settings = settings_of(database_url, tmp_path)
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-length: 9000000\r\n"
        b"content-type: multipart/form-data; boundary=B\r\n\r\n"
        b'--B\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
    )
    async with command("serve", "--no-worker", "--port", "0", **settings) as serving:
        _, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(head + bytes(2 * MEGABYTE + 5))
        await until(lambda: objects(owner), lambda found: found == 2)
        serving.kill()
        await serving.process.wait()
        writer.transport.abort()
    assert await objects(owner) == 2

    # An hour later, and some minutes.
    await owner.execute("UPDATE deleted_objects SET at = at - interval '2 hours'")
    async with (
        command("serve", "--port", "0", **settings) as serving,
        client_of(serving.port) as client,
    ):
        await until(lambda: objects(owner), lambda left: left == 0)
        assert (await client.get("/v1/files")).json()["items"] == []


@asynccontextmanager
async def two(
    database_url: str, folder: Path, one: dict[str, str], other: dict[str, str]
) -> AsyncIterator[tuple[Command, httpx2.AsyncClient, httpx2.AsyncClient]]:
    """Start two servers with folders of their own; yield the first, and a client of each."""
    api = "serve", "--no-worker", "--port", "0"
    async with (
        command(*api, **settings_of(database_url, folder / "a", **one)) as first,
        command(*api, **settings_of(database_url, folder / "b", **other)) as second,
        client_of(first.port) as uploading,
        client_of(second.port) as reading,
    ):
        yield first, uploading, reading


async def test_processes_that_share_only_the_database_read_each_others_files(
    database_url: str, tmp_path: Path, owner: asyncpg.Pool
) -> None:
    data = os.urandom(3 * MEGABYTE + 5)
    async with two(database_url, tmp_path, {}, {}) as (_, uploading, reading):
        file = (await uploading.post("/v1/files", files={"file": data})).json()

        path = f"/v1/files/{file['id']}/content"
        assert (await reading.get(path)).content == data
        part = await reading.get(path, headers={"range": "bytes=1048570-1048580"})
        assert part.content == data[1048570:1048581]
        assert await objects(owner) == 4
        assert not any(files for _, _, files in os.walk(tmp_path))


def resident(pid: int) -> int:
    """Return the bytes of memory of a process and its children."""
    root = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [root, *root.children(recursive=True)])


@pytest.mark.deep
async def test_a_file_of_100_mb_is_never_in_memory(database_url: str, tmp_path: Path) -> None:
    piece = os.urandom(MEGABYTE)
    headers = {"content-type": "multipart/form-data; boundary=B"}

    async def body(pieces: int) -> AsyncIterator[bytes]:
        yield b'--B\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
        for _ in range(pieces):
            yield piece
        yield b"\r\n--B--\r\n"

    async with two(database_url, tmp_path, {}, {}) as (first, uploading, reading):
        await uploading.post("/v1/files", content=body(2), headers=headers)  # to warm up
        before = resident(first.process.pid)
        answer = await uploading.post("/v1/files", content=body(95), headers=headers, timeout=110)
        assert answer.status_code == 201, answer.text
        size = 0
        path = f"/v1/files/{answer.json()['id']}/content"
        async with uploading.stream("GET", path, timeout=110) as stream:
            async for part in stream.aiter_bytes():
                size += len(part)
        assert size == 95 * MEGABYTE
        assert resident(first.process.pid) - before < 40 * MEGABYTE
        async with reading.stream("GET", path, timeout=110) as stream:
            assert piece.startswith(await anext(stream.aiter_bytes()))


async def test_a_body_in_another_store_is_a_503(database_url: str, tmp_path: Path) -> None:
    stored = {"BOTTEGA_OBJECTS_URL": (tmp_path / "store").as_uri()}
    async with two(database_url, tmp_path, stored, {}) as (_, uploading, reading):
        file = (await uploading.post("/v1/files", files={"file": b"words"})).json()
        path = f"/v1/files/{file['id']}/content"

        answer = await reading.get(path)

        assert (answer.status_code, answer.json()["code"]) == (503, "stored_elsewhere")
        assert (await uploading.get(path)).content == b"words"
        assert [each for each in (tmp_path / "store").rglob("*") if each.is_file()]


@pytest.fixture
def files(database: Database) -> FileStore:
    return FileStore(database, Objects(None, database.pool))


async def test_files_that_nobody_uses_expire_and_those_of_sessions_stay(
    files: FileStore, owner: asyncpg.Pool, database: Database
) -> None:
    await owner.execute("INSERT INTO sessions (tenant_id, id) VALUES ($1, 's')", DEFAULT_TENANT)
    origins = {"alone": FileOrigin(), "kept": FileOrigin("s"), "lost": FileOrigin("no session")}
    stored = {name: await files.add(DEFAULT_TENANT, b"x", each) for name, each in origins.items()}
    await owner.execute("UPDATE files SET used_at = now() - interval '31 days'")
    stored["new"] = await files.add(DEFAULT_TENANT, b"x", FileOrigin())
    stored["used"] = await files.add(DEFAULT_TENANT, b"x", FileOrigin())
    await owner.execute(
        "UPDATE files SET used_at = now() - interval '31 days' WHERE id = $1", stored["used"]["id"]
    )
    await files.use(DEFAULT_TENANT, [stored["used"]["id"]], Owner(None, None))

    await FileRetention(database.pool).delete_unused()

    left = {row["id"] for row in await owner.fetch("SELECT id FROM files")}
    assert left == {stored[name]["id"] for name in ("kept", "new", "used")}


async def test_a_deleted_file_is_not_read_from_the_cache(
    files: FileStore, owner: asyncpg.Pool, database: Database
) -> None:
    stored = await files.add(DEFAULT_TENANT, b"words", FileOrigin())
    name = str(stored["id"])
    assert (await files.load(DEFAULT_TENANT, name)).data == b"words"
    await owner.execute("TRUNCATE object_pieces")
    assert (await files.load(DEFAULT_TENANT, name)).data == b"words"  # the bytes are kept
    # Another process deletes it.
    await FileStore(database, files.objects).discard(DEFAULT_TENANT, [stored["id"]])
    with pytest.raises(InvalidInputError, match="no file") as refused:
        await files.load(DEFAULT_TENANT, name)
    assert refused.value.code == "unknown_file"
