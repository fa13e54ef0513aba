"""Parts in a run's input: what is accepted, stored and shown; errors at their place."""

import asyncio
from base64 import b64encode
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from bottega.background import schedules
from tests.api.test_files import upload
from tests.service import Running, client_of
from tests.tenants import holder
from tests.tools.test_media import png

IMAGE = png(300, 250)
DATA = b64encode(IMAGE).decode()
AGENT = {"name": "painter", "system_message": "You see."}


@pytest.fixture(autouse=True)
async def painter(client: httpx2.AsyncClient) -> None:
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201


def asking(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return {"agent": "painter", "input": [{"role": "user", "content": content}], **more}


async def start(client: httpx2.AsyncClient, *parts: dict[str, Any], **more: Any) -> Any:
    answer = await client.post("/v1/runs", json=asking(*parts), **more)
    assert answer.status_code == 202, answer.text
    return answer.json()


async def files(client: httpx2.AsyncClient) -> list[Any]:
    found: list[Any] = (await client.get("/v1/files")).json()["items"]
    return found


async def test_a_file_is_shown_as_it_is_known(client: httpx2.AsyncClient) -> None:
    file = await upload(client, IMAGE, "a.png")

    run = await start(client, {"type": "image", "file": file["id"]})

    shown = {
        "type": "image",
        "file": file["id"],
        "media_type": "image/png",
        "name": "a.png",
        "size_tokens": 100,
    }
    assert run["input"][0]["content"] == [{"type": "text", "text": "What is it?"}, shown]
    again = (await client.get(f"/v1/runs/{run['id']}")).json()
    assert again["input"] == run["input"]
    (message,) = (await client.get(f"/v1/runs/{run['id']}/messages")).json()["items"]
    assert (message["content"], message["parts"][1]) == ("What is it?", shown)
    repeated = await client.post("/v1/runs", json={"agent": "painter", "input": run["input"]})
    assert repeated.json()["input"] == run["input"]


async def test_data_becomes_a_file(client: httpx2.AsyncClient, shared: Running) -> None:
    body = asking(
        {"type": "image", "data": DATA, "media_type": "image/png", "name": "b.png"},
        session_id="s",
    )

    run = (await client.post("/v1/runs", json=body)).json()

    (file,) = await files(client)
    part = run["input"][0]["content"][1]
    assert (part["file"], part["name"], "data" in part) == (file["id"], "b.png", False)
    assert (file["session_id"], file["media_type"]) == ("s", "image/png")
    content = await client.get(f"/v1/files/{file['id']}/content")
    assert content.content == IMAGE
    log = await shared.owner.fetchval("SELECT string_agg(s::text, '') FROM run_steps s")
    assert DATA[:40] not in log


async def test_a_file_of_data_belongs_to_its_run(
    client: httpx2.AsyncClient, shared: Running
) -> None:
    uploaded = await upload(client, IMAGE, "a.png")
    image = {"type": "image", "data": DATA, "media_type": "image/png"}

    run = await start(client, image, {"type": "image", "file": uploaded["id"]})

    named = [part["file"] for part in run["input"][0]["content"][1:]]
    owned = "SELECT id::text, run_id::text FROM files WHERE id::text = ANY ($1)"
    rows = await shared.owner.fetch(owned, named)
    assert {row["id"]: row["run_id"] for row in rows} == {named[0]: run["id"], named[1]: None}


async def test_a_url_is_passed_on(client: httpx2.AsyncClient) -> None:
    part = {"type": "image", "url": "http://127.0.0.1:9/a.png", "media_type": "image/png"}

    run = await start(client, part)

    assert run["input"][0]["content"][1] == part


async def test_a_part_that_the_agent_s_model_cannot_take_is_refused_at_its_place(
    client: httpx2.AsyncClient,
) -> None:
    part = {"type": "document", "url": "https://a.example/a.pdf", "media_type": "application/pdf"}

    answer = await client.post("/v1/runs", json=asking(part))

    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "unsupported_part"), answer.text
    assert problem["errors"][0]["pointer"] == "/input/0/content/1"


async def test_a_part_that_an_agent_of_a_graph_cannot_take_is_refused(
    client: httpx2.AsyncClient,
) -> None:
    part = {"type": "document", "url": "https://a.example/a.pdf", "media_type": "application/pdf"}
    graph = {"name": "alone", "nodes": ["painter"], "edges": []}
    answer = await client.post("/v1/graphs", json=graph)
    assert answer.status_code == 201, answer.text

    asked = {**asking(part), "graph": "alone", "mode": "dag"}
    del asked["agent"]
    answer = await client.post("/v1/runs", json=asked)

    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_part"), answer.text


async def test_plain_content_stays_as_it_is(client: httpx2.AsyncClient) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]

    answer = await client.post("/v1/runs", json={"agent": "painter", "input": messages})

    assert answer.json()["input"] == messages


UNKNOWN = str(uuid4())


@pytest.mark.parametrize(
    ("part", "code", "pointer"),
    [
        ({"type": "image", "file": UNKNOWN}, "unknown_file", ""),
        ({"type": "image", "data": "?", "media_type": "image/png"}, "bad_data", ""),
        ({"type": "audio", "data": DATA, "media_type": "audio/wav"}, "wrong_media_type", ""),
        ({"type": "image"}, "invalid", ""),
        ({"type": "image", "file": UNKNOWN, "url": "https://a.example/"}, "invalid", ""),
        ({"type": "image", "data": DATA}, "invalid", ""),
        ({"type": "video", "file": UNKNOWN}, "invalid", "/type"),
        ({"type": "text"}, "invalid", "/text"),
        ({"type": "text", "text": "x", "file": UNKNOWN}, "invalid", "/file"),
        ({"type": "image", "file": "no id"}, "invalid", "/file"),
        ({"type": "image", "url": "file:///etc/passwd"}, "invalid", "/url"),
        ({"type": "image", "url": "data:image/png;base64,AA"}, "invalid", "/url"),
        ({"type": "image", "data": DATA, "media_type": "png"}, "invalid", "/media_type"),
        ("words", "invalid", ""),
    ],
)
async def test_other_parts_are_refused_at_their_place(
    client: httpx2.AsyncClient, part: Any, code: str, pointer: str
) -> None:
    answer = await client.post("/v1/runs", json=asking(part))

    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, code), answer.text
    assert problem["errors"][0]["pointer"] == f"/input/0/content/1{pointer}"
    assert await files(client) == []


async def test_another_tenant_s_file_is_unknown(shared: Running, shared_url: str) -> None:
    ours, theirs = await holder(shared_url, "ours"), await holder(shared_url, "theirs")
    async with (
        client_of(shared.port, headers=ours.headers) as client,
        client_of(shared.port, headers=theirs.headers) as other,
    ):
        assert (await other.post("/v1/agents", json=AGENT)).status_code == 201
        file = await upload(client, IMAGE)
        answer = await other.post("/v1/runs", json=asking({"type": "image", "file": file["id"]}))
        assert answer.json()["code"] == "unknown_file"


async def test_a_refused_run_leaves_no_files(client: httpx2.AsyncClient) -> None:
    part = {"type": "image", "data": DATA, "media_type": "image/png"}
    body = asking(part) | {"agent": "nobody"}

    assert (await client.post("/v1/runs", json=body)).json()["code"] == "unknown_agent"

    assert await files(client) == []


async def test_a_repeated_request_makes_its_files_once(client: httpx2.AsyncClient) -> None:
    part = {"type": "image", "data": DATA, "media_type": "image/png"}
    headers = {"idempotency-key": "once"}

    first = await start(client, part, headers=headers)
    second = await start(client, part, headers=headers)

    assert first == second
    assert [file["id"] for file in await files(client)] == [first["input"][0]["content"][1]["file"]]


async def test_long_data_is_accepted_and_bounded(client: httpx2.AsyncClient) -> None:
    long = b64encode(IMAGE + bytes(2_000_000)).decode()
    part = {"type": "image", "data": long, "media_type": "image/png"}

    await start(client, part)

    beyond = part | {"data": long * 12}
    answer = await client.post("/v1/runs", json=asking(beyond))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    text = {"agent": "painter", "input": "x" * 2_000_000}
    assert (await client.post("/v1/runs", json=text)).status_code == 422
    both = await asyncio.gather(*[client.post("/v1/runs", json=asking(part)) for _ in range(6)])
    assert {answer.status_code for answer in both} <= {202, 429}


async def test_a_schedule_stores_files_and_its_runs_use_them(
    client: httpx2.AsyncClient, shared: Running
) -> None:
    part = {"type": "image", "data": DATA, "media_type": "image/png"}
    body = {"name": "nightly", "cron": "0 3 * * *", "run": asking(part)}

    answer = await client.post("/v1/schedules", json=body)

    assert answer.status_code == 201, answer.text
    (file,) = await files(client)
    stored = answer.json()["run"]["input"][0]["content"][1]
    assert (stored["file"], stored["size_tokens"]) == (file["id"], 100)
    wrong = {**body, "name": "other", "run": asking({"type": "image", "file": UNKNOWN})}
    problem = (await client.post("/v1/schedules", json=wrong)).json()
    assert problem["errors"][0]["pointer"] == "/run/input/0/content/1"

    await shared.owner.execute("UPDATE files SET used_at = now() - interval '29 days'")
    await shared.owner.execute("UPDATE schedules SET next_at = now()")
    service = shared.service
    await schedules.Ticker(service.database, "full", service.pins)._start_due()
    (run,) = (await client.get("/v1/runs?view=full")).json()["items"]
    assert run["input"][0]["content"][1] == stored
    unused = "SELECT now() - used_at < interval '1 hour' FROM files WHERE id::text = $1"
    assert await shared.owner.fetchval(unused, file["id"])
