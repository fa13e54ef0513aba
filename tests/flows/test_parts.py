"""Images in a run: from its input and from a tool, to the model, over a crash, until deletion."""

import asyncio
from base64 import b64encode
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, text
from tests.processes import command
from tests.service import Running, client_of, running
from tests.tools.raw_server import RawServer, answer
from tests.tools.test_media import png
from tests.waiting import until

ASKED, DRAWN = png(300, 200), png(20, 10)


def seen(request: dict[str, Any]) -> list[str]:
    """Return the images of a model request, as text."""
    return [
        part["image_url"]["url"].partition("base64,")[2]
        for message in request["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def encoded(*images: bytes) -> list[str]:
    return [b64encode(image).decode() for image in images]


@pytest.fixture
async def web() -> Any:
    async with RawServer(reply=answer(DRAWN, content_type="image/png")) as web:
        yield web


def painter(web: RawServer) -> dict[str, Any]:
    draw = {"type": "http", "name": "draw", "description": "Draws.", "url": web.url("/draw")}
    return {"name": "painter", "system_message": "You see.", "tools": [draw]}


def asking(**more: Any) -> dict[str, Any]:
    image = {"type": "image", "data": encoded(ASKED)[0], "media_type": "image/png"}
    content = [{"type": "text", "text": "What is it?"}, image]
    return {"agent": "painter", "input": [{"role": "user", "content": content}], **more}


@pytest.fixture
async def bottega(settings: Settings, database_url: str, model: FakeModel) -> Any:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "egress_allow": ["127.0.0.1"]}
    )
    async with running(configured, database_url, worker=True) as server:
        yield server


async def test_a_model_sees_the_images_of_the_input_and_of_its_tools(
    bottega: Running, model: FakeModel, web: RawServer
) -> None:
    assert (await bottega.client.post("/v1/agents", json=painter(web))).status_code == 201
    model.script(calls(("draw", {})), text("Both are grey."))

    started = await bottega.client.post("/v1/runs?wait=30", json=asking(session_id="s"))

    run = started.json()
    assert (run["status"], run["output"]) == ("completed", "Both are grey."), run
    assert [seen(request) for request in model.requests] == [
        encoded(ASKED),
        encoded(ASKED, DRAWN),
    ]
    path = f"/v1/runs/{run['id']}/messages"
    question, _, result, _ = (await bottega.client.get(path)).json()["items"]
    assert question["content"] == "What is it?"
    assert [part["type"] for part in question["parts"]] == ["text", "image"]
    (_, drawn) = result["parts"]
    stored = await bottega.client.get(f"/v1/files/{drawn['file']}/content")
    assert stored.content == DRAWN
    rows = "SELECT string_agg(s::text, '') FROM run_steps s"
    log: str = await bottega.owner.fetchval(rows)
    assert drawn["file"] in log
    assert not any(image[:40] in log for image in encoded(ASKED, DRAWN))
    task = await bottega.owner.fetchval("SELECT summary ->> 'task' FROM episodes")
    assert task == "What is it?"

    removed = (await bottega.client.delete("/v1/sessions/s")).json()["removed"]
    assert removed["files"] == 2


async def test_a_deleted_file_ends_the_run_that_needs_it(
    bottega: Running, model: FakeModel, web: RawServer
) -> None:
    assert (await bottega.client.post("/v1/agents", json=painter(web))).status_code == 201
    gate = asyncio.Event()
    model.script(text("It is grey."), gated(gate, text("never asked")))
    run = (await bottega.client.post("/v1/runs?wait=30", json=asking())).json()
    (file,) = (await bottega.client.get("/v1/files")).json()["items"]
    assert (await bottega.client.delete(f"/v1/files/{file['id']}")).status_code == 204
    bottega.service.files._cache.clear()

    retried = await bottega.client.post(f"/v1/runs/{run['id']}/retry", json={})

    again = f"/v1/runs/{retried.json()['id']}"
    ended = await until(
        lambda: bottega.client.get(again), lambda found: found.json()["status"] == "failed"
    )
    assert ended.json()["error"]["code"] == "unknown_file"


async def test_a_run_resumed_after_kill_9_has_the_same_prompt(
    database_url: str, tmp_path: Path, model: FakeModel, web: RawServer, owner: asyncpg.Pool
) -> None:
    environment = {
        "DATABASE_URL": database_url,
        "BOTTEGA_DATA_DIR": str(tmp_path),
        "BOTTEGA_EGRESS_ALLOW": "127.0.0.1",
        "BOTTEGA_TAKEOVER_S": "1",
        "OPENAI_API_KEY": "test-key",
        "OPENAI_BASE_URL": model.base_url,
    }
    gate = asyncio.Event()
    model.script(calls(("draw", {})), gated(gate, text("late")), text("Both are grey."))
    async with (
        command("serve", "--no-worker", "--port", "0", **environment) as api,
        client_of(api.port) as client,
    ):
        assert (await client.post("/v1/agents", json=painter(web))).status_code == 201
        async with command("worker", **environment) as first:
            run = (await client.post("/v1/runs", json=asking())).json()
            await model.received(2)
            first.kill()
            await first.process.wait()
        async with command("worker", **environment):
            path = f"/v1/runs/{run['id']}"
            ended = await until(
                lambda: client.get(path), lambda found: found.json()["ended_at"] is not None
            )
        assert ended.json()["output"] == "Both are grey."
    _, before, after = model.requests
    assert after["messages"] == before["messages"]
    assert seen(after) == encoded(ASKED, DRAWN)
    assert len(web.requests) == 1
    assert await owner.fetchval("SELECT count(*) FROM files") == 2
