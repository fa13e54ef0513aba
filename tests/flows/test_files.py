"""Files beside crashes and time: nothing stays behind."""

import asyncio
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from bottega.db.engine import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import InvalidInputError
from bottega.files.store import FileOrigin, FileRetention, FileStore, Owner
from bottega.objects import Objects
from tests.processes import command
from tests.service import client_of
from tests.waiting import until

MEGABYTE = 1 << 20


def objects(folder: Path) -> list[Path]:
    return [path for path in (folder / "objects").rglob("*") if path.is_file()]


async def test_an_upload_cut_off_by_kill_9_leaves_nothing(
    database_url: str, tmp_path: Path, owner: asyncpg.Pool
) -> None:
    settings = {
        "DATABASE_URL": database_url,
        "BOTTEGA_DATA_DIR": str(tmp_path),
        "OPENAI_API_KEY": "test-key",
    }
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-length: 9000000\r\n"
        b"content-type: multipart/form-data; boundary=B\r\n\r\n"
        b'--B\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
    )
    async with command("serve", "--no-worker", "--port", "0", **settings) as serving:
        _, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(head + bytes(2 * MEGABYTE + 5))
        await until(lambda: objects(tmp_path), lambda found: len(found) == 2)
        serving.kill()
        await serving.process.wait()
        writer.transport.abort()
    assert len(objects(tmp_path)) == 2

    # An hour later, and some minutes.
    await owner.execute("UPDATE deleted_objects SET at = at - interval '2 hours'")
    async with (
        command("serve", "--port", "0", **settings) as serving,
        client_of(serving.port) as client,
    ):
        await until(lambda: objects(tmp_path), lambda left: left == [])
        assert (await client.get("/v1/files")).json()["items"] == []
        # Two processes with one folder: what one stores, another reads.
        async with command("serve", "--no-worker", "--port", "0", **settings) as other:
            file = (await client.post("/v1/files", files={"file": b"words"})).json()
            async with client_of(other.port) as second:
                found = await second.get(f"/v1/files/{file['id']}/content")
            assert found.content == b"words"


@pytest.fixture
def files(database: Database, tmp_path: Path) -> FileStore:
    return FileStore(database, Objects((tmp_path / "objects").as_uri()))


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

    await FileRetention(database.pool, timedelta(days=30)).delete_unused()

    left = {row["id"] for row in await owner.fetch("SELECT id FROM files")}
    assert left == {stored[name]["id"] for name in ("kept", "new", "used")}


async def test_a_deleted_file_is_not_read_from_the_cache(
    files: FileStore, tmp_path: Path, database: Database
) -> None:
    stored = await files.add(DEFAULT_TENANT, b"words", FileOrigin())
    name = str(stored["id"])
    assert (await files.load(DEFAULT_TENANT, name)).data == b"words"
    for path in objects(tmp_path):
        path.unlink()
    assert (await files.load(DEFAULT_TENANT, name)).data == b"words"  # the bytes are kept
    # Another process deletes it.
    await FileStore(database, files.objects).discard(DEFAULT_TENANT, [stored["id"]])
    with pytest.raises(InvalidInputError, match="no file") as refused:
        await files.load(DEFAULT_TENANT, name)
    assert refused.value.code == "unknown_file"
