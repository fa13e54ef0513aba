"""Watching runs: replay and tail, resuming, refusals."""

import asyncio
from typing import Any
from uuid import UUID

import httpx2
import pytest
import websockets
from pydantic_core import from_json

from bottega.settings import Settings
from tests.fake_model import FakeModel, gated, text
from tests.service import Running, is_stored, running
from tests.team import define, start
from tests.waiting import until

NOBODY = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"


async def sse(client: httpx2.AsyncClient, path: str, **headers: str) -> list[dict[str, Any]]:
    """Return all stored events of a server-sent stream until the server ends it."""
    found: list[dict[str, Any]] = []
    accept = {"accept": "text/event-stream", **headers}
    async with client.stream("GET", path, headers=accept) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        async for line in response.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
                continue
            if "data" in fields:
                event = from_json(fields["data"])
                assert fields.get("id") == (event["seq"] and str(event["seq"]))
                assert fields["event"] == event["type"]
                found.append(event)
            fields = {}
    assert found.pop()["type"] == "end"
    return [event for event in found if is_stored(event)]


async def test_sse_and_websocket_show_the_same_events_and_resume_anywhere(bottega: Running) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client)
    path = f"/v1/runs/{run_id}"
    live = await sse(bottega.client, f"{path}/events")
    assert [event["seq"] for event in live] == list(range(1, len(live) + 1))
    assert live[-1]["type"] == "run.completed"
    assert await bottega.frames(f"{path}/ws") == live
    assert await sse(bottega.client, f"{path}/events?after=5") == live[5:]
    assert await sse(bottega.client, f"{path}/events", **{"last-event-id": "7"}) == live[7:]
    assert await bottega.frames(f"{path}/ws?after={len(live) - 1}") == live[-1:]
    assert await bottega.frames(f"{path}/ws?after={len(live)}") == []
    assert await bottega.frames(f"{path}/ws?after=99999") == []


async def test_many_subscribers_of_many_runs_get_every_event_once(bottega: Running) -> None:
    await define(bottega.client)
    runs = [await start(bottega.client) for _ in range(4)]
    paths = [f"/v1/runs/{run_id}/ws" for run_id in runs for _ in range(12)]
    for frames in await asyncio.gather(*map(bottega.frames, paths)):
        assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
        assert frames[-1]["type"] == "run.completed"


async def test_event_pages_join_both_ways(bottega: Running) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    for order, expected in (("asc", frames), ("desc", frames[::-1])):
        url: str | None = f"/v1/runs/{run_id}/events?limit=10&order={order}"
        found = []
        while url:
            page = await bottega.client.get(url)
            found += page.json()["items"]
            url = page.links["next"]["url"] if "next" in page.links else None
        assert found == expected


async def test_a_subscriber_sees_a_step_while_the_run_goes_on(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    run_id = await start(bottega.client, agent="requirements", graph=None)
    async with websockets.connect(f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws") as socket:
        seen = []
        while "llm.started" not in seen:
            seen.append(from_json(await socket.recv())["type"])
        await socket.send('{"type": "ping"}')
        assert from_json(await socket.recv()) == {"type": "pong"}
        await socket.send("nonsense")
        assert from_json(await socket.recv())["type"] == "error"
        gate.set()
        rest = [from_json(message)["type"] async for message in socket]
    assert rest[-1] == "run.completed"
    assert socket.close_code == 1000


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/v1/runs/{NOBODY}/ws", 404),
        ("/v1/runs/nonsense/ws", 422),
        (f"/v1/runs/{NOBODY}/ws?after=-1", 422),
        (f"/v1/runs/{NOBODY}/ws?after=x", 422),
        (f"/v1/runs/{NOBODY}/ws?types=run.completed,nonsense", 422),
        (f"/v1/runs/{NOBODY}/ws?agents=a,,b", 422),
        (f"/v1/runs/{NOBODY}/ws?agents={'a' * 5000}", 422),
        (f"/v1/runs/{NOBODY}/ws?depth=-1", 422),
        (f"/v1/runs/{NOBODY}/ws?agent=a", 422),
        ("/v1/nothing/ws", 404),
        ("/v1/runs", 404),
    ],
)
async def test_a_refusal_comes_before_the_upgrade(guest: Running, path: str, status: int) -> None:
    url = f"ws://127.0.0.1:{guest.port}{path}"
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(url, additional_headers=guest.headers):
            pass
    assert refused.value.response.status_code == status
    assert from_json(refused.value.response.body or b"")["code"]


async def test_a_subscriber_that_goes_away_leaves_nothing_behind(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    run_id = await start(bottega.client, agent="requirements", graph=None)
    for _ in range(3):
        async with websockets.connect(
            f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws"
        ) as socket:
            await socket.recv()
    gate.set()
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    # The server's side of the last one is ending.
    await until(lambda: not bottega.service.wakeups.watched())
    assert not bottega.service.streams.watched()


async def test_a_stopping_server_informs_its_subscribers(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(gated(asyncio.Event(), text("never")))
    run_id = await start(bottega.client, agent="requirements", graph=None)
    async with websockets.connect(f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws") as socket:
        await model.received(1)
        seen = 0
        while seen < 3:  # llm.started is stored before the model is asked, or soon after
            seen = from_json(await socket.recv())["seq"] or seen
        bottega.service.wakeups.close()
        async for message in socket:
            seen = from_json(message)["seq"] or seen
    assert socket.close_code == 1001
    assert socket.close_reason == f"server stopping; resume after={seen}"


async def test_the_listening_connection_may_be_lost(bottega: Running, model: FakeModel) -> None:
    """Cut every connection of the server to the database; subscribers still get everything."""
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    run_id = await start(bottega.client, agent="requirements", graph=None)
    watching = asyncio.ensure_future(bottega.frames(f"/v1/runs/{run_id}/ws"))
    await model.received(1)
    await bottega.owner.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    gate.set()
    frames = await watching
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
    assert frames[-1]["type"] == "run.completed"


BREAKS = "a\u2028b\u2029c\u0085d"


async def test_a_line_of_a_stream_ends_with_a_line_feed_alone(
    bottega: Running, model: FakeModel
) -> None:
    agent = {"name": "one", "system_message": "x", "expose": ["openai", "mcp"]}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    model.decide = lambda _: text(BREAKS)
    body = {"agent": "one", "input": BREAKS}
    run_id = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()["id"]
    stream = {"accept": "application/json, text/event-stream"}
    chat = {"model": "one", "stream": True, "messages": [{"role": "user", "content": BREAKS}]}
    answer = {"model": "one", "stream": True, "input": BREAKS}
    params = {"name": "one", "arguments": {"input": BREAKS}, "_meta": {"progressToken": 1}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    only = {"accept": "text/event-stream"}
    for method, path, sent in (
        ("GET", f"/v1/runs/{run_id}/events", None),
        ("POST", "/openai/v1/chat/completions", chat),
        ("POST", "/openai/v1/responses", answer),
        ("POST", "/mcp", call),
    ):
        accept = only if method == "GET" else stream
        found = await bottega.client.request(method, path, json=sent, headers=accept)
        assert found.status_code == 200, found.text
        assert found.headers["content-type"].startswith("text/event-stream")
        said = found.content.decode()
        assert said.splitlines() == said.replace("\r\n", "\n").split("\n")[:-1], path
        assert "a\\u2028b\\u2029c\\u0085d" in said


LOSE = "DELETE FROM run_steps WHERE run_id = $1 AND last_seq > $2"
LOST = "UPDATE run_heads SET last_seq = $2 WHERE run_id = $1"


async def test_a_stream_whose_log_went_back_says_so(
    bottega: Running, model: FakeModel, settings: Settings, database_url: str
) -> None:
    """Take the newest steps of a run away, as a failover to an asynchronous standby does."""
    gate = asyncio.Event()
    model.decide = lambda request: gated(gate, text("An answer."))
    await define(bottega.client)
    run_id = await start(bottega.client, agent="requirements", graph=None)
    path = f"/v1/runs/{run_id}"
    async with (
        running(settings, database_url) as other,
        websockets.connect(f"ws://127.0.0.1:{other.port}{path}/ws") as socket,
        other.client.stream("GET", f"{path}/stream") as response,
    ):
        lines = response.aiter_lines()
        while "llm.started" not in await anext(lines):
            pass
        while (frame := from_json(await socket.recv()))["type"] != "llm.started":
            pass
        sent = frame["seq"]
        kept = await bottega.owner.fetchval(
            "SELECT min(last_seq) FROM run_steps WHERE run_id = $1", UUID(run_id)
        )
        assert kept < sent
        await bottega.owner.execute(LOSE, UUID(run_id), kept)
        await bottega.owner.execute(LOST, UUID(run_id), kept)
        await bottega.owner.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        await socket.wait_closed()
        assert socket.close_code == 4011
        assert ": the log went back: load the run again" in [line async for line in lines]
        again = await other.client.get(f"{path}/stream?after={sent}")
        assert (again.status_code, again.json()["code"]) == (409, "log_went_back")
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"ws://127.0.0.1:{other.port}{path}/ws?after={sent}")
        assert refused.value.response.status_code == 409
        gate.set()
