"""Files: uploads in pieces, what is kept of them, downloads, limits, and whose they are."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bottega.files import store
from bottega.settings import Settings
from tests.service import Running, client_of, running
from tests.tenants import holder
from tests.tools.test_media import png
from tests.waiting import until

HEAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"content-type: multipart/form-data; boundary=B\r\n"
)
PART = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'
END = b"\r\n--B--\r\n"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PIECE_BYTES", 1000)


async def upload(
    client: httpx2.AsyncClient, data: bytes, name: str = "a.bin", **fields: str
) -> Any:
    answer = await client.post("/v1/files", files={"file": (name, data)}, data=fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


def objects(settings: Settings) -> set[Path]:
    assert settings.data_dir is not None
    return {path for path in (settings.data_dir / "objects").rglob("*") if path.is_file()}


async def test_an_uploaded_file_comes_back(
    client: httpx2.AsyncClient, module_settings: Settings
) -> None:
    data = bytes(range(256)) * 20
    before = objects(module_settings)

    file = await upload(client, data, "ü.bin", session_id="s1")

    assert file["size"] == len(data)
    assert file["sha256"] == hashlib.sha256(data).hexdigest()
    assert file["media_type"] == "application/octet-stream"
    assert (file["name"], file["session_id"]) == ("ü.bin", "s1")
    assert (await client.get(f"/v1/files/{file['id']}")).json() == file
    assert len(objects(module_settings) - before) == 6
    found = await client.get(f"/v1/files/{file['id']}/content")
    assert found.content == data
    assert found.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%BC.bin"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in found.headers["content-security-policy"]
    assert found.headers["content-length"] == str(len(data))


@pytest.mark.parametrize(
    ("data", "media_type", "kind"),
    [
        (png(30, 50), "image/png", "inline"),
        (b"<svg xmlns='x'><script>", "image/svg+xml", "attachment"),
        (b"<!doctype html><script>", "text/html", "attachment"),
        (b"%PDF-1.7 /Type /Page ", "application/pdf", "attachment"),
    ],
)
async def test_only_raster_images_are_shown_inline(
    client: httpx2.AsyncClient, data: bytes, media_type: str, kind: str
) -> None:
    file = await upload(client, data)

    answer = await client.get(f"/v1/files/{file['id']}/content")

    assert file["media_type"] == media_type
    assert answer.headers["content-type"].startswith(media_type)
    assert answer.headers["content-disposition"].startswith(f"{kind};")


async def test_an_empty_file_is_a_file(client: httpx2.AsyncClient) -> None:
    file = await upload(client, b"")

    assert file["size"] == 0
    assert (await client.get(f"/v1/files/{file['id']}/content")).content == b""


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-9", 0, 9),
        ("bytes=990-2010", 990, 2010),
        ("bytes=2990-", 2990, 2999),
        ("bytes=2990-9999", 2990, 2999),
        ("bytes=-1500", 1500, 2999),
        ("bytes=-9999", 0, 2999),
    ],
)
async def test_a_range_is_a_part_of_the_file(
    client: httpx2.AsyncClient, asked: str, first: int, last: int
) -> None:
    data = bytes(range(250)) * 12
    path = f"/v1/files/{(await upload(client, data))['id']}/content"

    answer = await client.get(path, headers={"range": asked})

    assert answer.status_code == 206
    assert answer.content == data[first : last + 1]
    assert answer.headers["content-range"] == f"bytes {first}-{last}/3000"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"range": "bytes=3-"}, 416),
        ({"range": "bytes=-0"}, 416),
        ({"range": "bytes=2-1"}, 200),
        ({"range": "bytes=0-0,2-2"}, 200),
        ({"range": "lines=0-1"}, 200),
        ({"range": "bytes=0-0", "if-range": '"another"'}, 200),
    ],
)
async def test_other_ranges_are_refused_or_ignored(
    client: httpx2.AsyncClient, headers: dict[str, str], status: int
) -> None:
    path = f"/v1/files/{(await upload(client, b'abc'))['id']}/content"

    answer = await client.get(path, headers=headers)

    assert answer.status_code == status
    assert status == 416 or answer.content == b"abc"


async def test_files_are_listed_by_age_and_session(client: httpx2.AsyncClient) -> None:
    made = [await upload(client, b"x", session_id=name) for name in ("a", "b", "a")]
    ids = [file["id"] for file in made]

    first = (await client.get("/v1/files?limit=2")).json()
    second = (await client.get(f"/v1/files?limit=2&cursor={first['next_cursor']}")).json()
    of_a = (await client.get("/v1/files?session_id=a&order=desc")).json()

    assert [file["id"] for file in first["items"] + second["items"]] == ids
    assert [file["id"] for file in of_a["items"]] == [ids[2], ids[0]]


async def test_a_deleted_file_is_gone_and_its_bytes_follow(
    client: httpx2.AsyncClient, shared: Running
) -> None:
    file = await upload(client, bytes(2500))

    assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 204

    for path in ("", "/content"):
        assert (await client.get(f"/v1/files/{file['id']}{path}")).status_code == 404
    assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 404
    due = "SELECT count(*) FROM deleted_objects WHERE object_key LIKE $1 AND at <= now()"
    assert await shared.owner.fetchval(due, f"%{file['id']}%") == 3


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (PART + b"x" + END, 201, None),
        (b"--B--\r\n", 422, "invalid"),
        (PART + b"x", 422, "bad_multipart"),
        (b"words", 422, "bad_multipart"),
        (b"", 422, "bad_multipart"),
        (PART + b"x\r\n" + PART + b"y" + END, 422, "bad_multipart"),
        (b'--B\r\ncontent-disposition: form-data; name="other"\r\n\r\nx' + END, 422, "invalid"),
        (b"--B\r\nno header\r\n\r\nx" + END, 422, "bad_multipart"),
        (b"--B\r\n" + b"x: y\r\n" * 1000 + b"\r\nx" + END, 422, "bad_multipart"),
        (b"--B\r\nx: " + b"y" * 10**6 + b"\r\n\r\nx" + END, 422, "bad_multipart"),
        (
            b'--B\r\ncontent-disposition: form-data; name="session_id"\r\n\r\n' + b"x" * 5000 + END,
            422,
            "invalid",
        ),
        (
            PART
            + b'x\r\n--B\r\ncontent-disposition: form-data; name="session_id"\r\n\r\n no '
            + END,
            422,
            "invalid",
        ),
    ],
)
async def test_other_bodies_are_refused_and_leave_nothing(
    client: httpx2.AsyncClient,
    module_settings: Settings,
    body: bytes,
    status: int,
    code: str | None,
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=B"}
    before = objects(module_settings)

    answer = await client.post("/v1/files", content=body, headers=headers)

    assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text
    assert len(objects(module_settings) - before) == (status == 201)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 415),
        ("multipart/form-data", 422),
        ("multipart/form-data; boundary=" + "x" * 500, 422),
    ],
)
async def test_a_body_without_parts_is_refused(
    client: httpx2.AsyncClient, content_type: str, status: int
) -> None:
    answer = await client.post("/v1/files", content=b"{}", headers={"content-type": content_type})
    assert answer.status_code == status, answer.text


async def test_a_longer_file_is_refused(
    client: httpx2.AsyncClient, module_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects(module_settings)
    monkeypatch.setattr(store, "MOST_BYTES", 5000)
    answer = await client.post("/v1/files", files={"file": bytes(5001)})

    assert answer.json()["code"] == "file_too_large"
    assert objects(module_settings) == before


async def test_a_declared_length_is_refused_at_once(refusing: Running) -> None:
    reader, writer = await raw(refusing)
    writer.write(HEAD + b"connection: close\r\ncontent-length: 100100000\r\n\r\n")

    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_the_files_of_a_tenant_are_limited(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = partial(store.FileQuota, bytes=1000, count=3)
    monkeypatch.setattr("bottega.container.FileQuota", quota)
    async with running(settings, database_url) as server:
        uploads = [server.client.post("/v1/files", files={"file": bytes(400)}) for _ in range(5)]
        statuses = [answer.status_code for answer in await asyncio.gather(*uploads)]
        assert sorted(statuses) == [201, 201, 429, 429, 429]
        await upload(server.client, b"x")
        full = await server.client.post("/v1/files", files={"file": b""})

        assert full.json()["code"] == "file_quota"
        assert len(objects(settings)) == 3


async def test_concurrent_uploads_of_a_tenant_are_limited(
    server_: Running, settings: Settings
) -> None:
    open_ones = [await raw(server_) for _ in range(8)]
    for _, writer in open_ones:
        writer.write(HEAD + b"content-length: 9000000\r\n\r\n" + PART + bytes(1500))
    await until(lambda: objects(settings), lambda found: len(found) == 8)

    headers = {"content-type": "multipart/form-data; boundary=B"}
    body = PART + bytes(2_000_000) + END
    refused = await server_.client.post("/v1/files", content=body, headers=headers)
    short = await server_.client.post("/v1/files", content=PART + b"x" + END, headers=headers)

    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_uploads")
    assert short.status_code == 201
    for _, writer in open_ones:
        writer.transport.abort()
    await until(lambda: objects(settings), lambda found: len(found) == 1)


async def test_a_tenant_sees_only_its_own_files(shared: Running, shared_url: str) -> None:
    ours = await holder(shared_url, "ours")
    theirs = await holder(shared_url, "theirs")
    async with (
        client_of(shared.port, headers=ours.headers) as client,
        client_of(shared.port, headers=theirs.headers) as other,
    ):
        file = await upload(client, b"secret")

        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await other.request(method, f"/v1/files/{file['id']}{path}")
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert (await other.get("/v1/files")).json()["items"] == []
        assert (await client.get(f"/v1/files/{file['id']}/content")).content == b"secret"


@pytest.fixture
async def hasty(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """A server that waits for a body for a fifth of a second."""
    monkeypatch.setattr("bottega.main.REQUEST_TIMEOUT_S", 0.2)
    async with running(settings, database_url) as server:
        yield server


async def raw(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_slow_upload_is_whole(hasty: Running) -> None:
    reader, writer = await raw(hasty)
    data = bytes(3000)
    size = len(PART + data + END)
    writer.write(HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % size + PART)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for start in range(0, len(data), 500):  # longer in all than the limit, never silent so long
        writer.write(data[start : start + 500])
        await until(lambda: loop.time(), lambda now: now > began + (start + 500) / 10_000)  # noqa: B023
    writer.write(END)
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 201 "), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["size"] == len(data)


async def test_a_silent_upload_is_cut_off_and_leaves_nothing(
    hasty: Running, settings: Settings
) -> None:
    reader, writer = await raw(hasty)
    writer.write(HEAD + b"content-length: 9000\r\n\r\n" + PART + bytes(2500))

    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 408 "), answer
    await until(lambda: objects(settings), lambda left: not left)
    assert (await hasty.client.get("/v1/files")).json()["items"] == []


async def test_an_upload_whose_client_leaves_is_removed(
    server_: Running, settings: Settings
) -> None:
    _, writer = await raw(server_)
    writer.write(HEAD + b"content-length: 9000\r\n\r\n" + PART + bytes(2500))
    await until(lambda: objects(settings), lambda found: len(found) == 2)

    writer.transport.abort()

    await until(lambda: objects(settings), lambda left: not left)


async def test_a_store_that_is_away_is_a_503(server_: Running, settings: Settings) -> None:
    file = await upload(server_.client, b"words")
    assert settings.data_dir is not None
    (settings.data_dir / "objects").rename(settings.data_dir / "away")

    answer = await server_.client.get(f"/v1/files/{file['id']}/content")

    assert (answer.status_code, answer.json()["code"]) == (503, "object_store")
