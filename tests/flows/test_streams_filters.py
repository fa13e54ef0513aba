"""Filters of streams, and signs of life of quiet streams."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import websockets
from pydantic_core import from_json

from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.flows.test_streams import sse
from tests.growing import growing
from tests.service import Running, running
from tests.team import define, start

Event = dict[str, Any]
IMPATIENT_S = 0.02
LISTED = ("llm.completed", "agent.started")


@asynccontextmanager
async def impatient(settings: Settings, url: str) -> AsyncIterator[Running]:
    """Serve an API without a worker, with frequent heartbeats on streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bottega.events.stream.HEARTBEAT_S", IMPATIENT_S)
        async with running(settings, url) as server:
            yield server


@pytest.fixture
async def quick(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    """An API like this for one test alone."""
    async with impatient(settings, database_url) as server:
        yield server


@pytest.fixture(scope="module")
async def shared(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """An API like this, and a team."""
    async with impatient(module_settings, module_database_url) as server:
        await define(server.client)
        yield server


@pytest.fixture(scope="module")
async def completed(shared: Running) -> tuple[str, list[Event]]:
    """The path and the events of a completed run."""
    settings, url = shared.service.settings, shared.service.database.url
    async with FakeModel() as model:
        working = settings.model_copy(update={"openai_base_url": model.base_url})
        async with running(working, url, worker=True):
            path = f"/v1/runs/{await start(shared.client)}"
            return path, await shared.frames(f"{path}/ws")


def final(event: Event) -> bool:
    return bool(event["type"] == "run.completed")


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("agents=designer,nobody", lambda event: event["agent"] == "designer"),
        ("types=llm.completed,agent.started", lambda event: event["type"] in LISTED),
        ("types=llm.delta", lambda event: False),
        ("depth=0", lambda event: True),
        (
            "agents=designer,implementer&types=agent.completed",
            lambda event: (
                event["agent"] != "requirements"
                and event["type"] == "agent.completed"
                and event["task_id"] is not None
            ),
        ),
    ],
)
async def test_filters_choose_and_the_final_event_always_passes(
    shared: Running,
    completed: tuple[str, list[Event]],
    query: str,
    wanted: Callable[[Event], bool],
) -> None:
    path, everything = completed
    expected = [event for event in everything if wanted(event) or final(event)]
    assert await shared.frames(f"{path}/ws?{query}") == expected
    assert await sse(shared.client, f"{path}/events?{query}") == expected
    after = expected[len(expected) // 2]["seq"] - 1
    rest = [event for event in expected if event["seq"] > after]
    assert await shared.frames(f"{path}/ws?after={after}&{query}") == rest
    for order, items in (("asc", expected), ("desc", expected[::-1])):
        page = await shared.client.get(f"{path}/events?limit=200&order={order}&{query}")
        assert page.json()["items"] == items


async def test_filters_by_depth_follow_the_depth_of_tasks(bottega: Running) -> None:
    """Check a chain of three: the run's own agent, its sub-agent, and the sub-agent of that."""
    chain = ["one", "two", "three"]
    for name, below in zip(chain, [["two"], ["three"], []], strict=True):
        agent: dict[str, Any] = {
            "name": name,
            "description": name,
            "system_message": f"I am {name}.",
        }
        if below:
            agent["subagents"] = {"mode": "sync", "names": below}
        assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    run_id = await start(bottega.client, agent="one", graph=None)
    everything = await bottega.frames(f"/v1/runs/{run_id}/ws")
    tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    depths = {task["id"]: task["depth"] for task in tasks}
    assert sorted(depths.values()) == [0, 1]
    for depth in (0, 1):
        expected = [event for event in everything if depths.get(event["task_id"], -1) <= depth]
        assert await bottega.frames(f"/v1/runs/{run_id}/ws?depth={depth}") == expected
        page = await bottega.client.get(f"/v1/runs/{run_id}/events?limit=200&depth={depth}")
        assert page.json()["items"] == expected


@pytest.mark.parametrize(
    "query", ["types=nonsense", "agents=Upper", "agents=", "types=", "depth=x", "after=-1"]
)
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_invalid_filters_are_refused(shared: Running, query: str, accept: str) -> None:
    path = f"/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/events?{query}"
    answer = await shared.client.get(path, headers={"accept": accept})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["parameter"] == query.split("=")[0]


async def test_heartbeats_of_a_websocket_have_no_position(shared: Running) -> None:
    async with growing(shared, defined=True) as run:
        url = f"ws://127.0.0.1:{shared.port}{run.path}/ws?types=run.completed"
        async with websockets.connect(url) as socket:
            for _ in range(3):
                await run.warn(5)
                assert from_json(await socket.recv()) == {"type": "heartbeat"}
            await run.finish()
            rest = [from_json(message) async for message in socket]
    assert rest[-1]["type"] == "run.completed"


async def test_server_sent_events_end_with_an_event_of_that_name(shared: Running) -> None:
    async with growing(shared, defined=True) as run:
        await run.warn(5)
        headers = {"accept": "text/event-stream"}
        path = f"{run.path}/events?types=run.completed"
        async with shared.client.stream("GET", path, headers=headers) as response:
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": heartbeat", ""] * 2
            await run.finish()
            rest = [line async for line in lines if line != ": heartbeat"]
    assert f"id: {run.seq}" in rest
    assert rest[-4:] == ["", "event: end", 'data: {"seq":null,"type":"end"}', ""]


async def test_a_finished_event_source_is_asked_not_to_reconnect(
    shared: Running,
) -> None:
    async with growing(shared, defined=True) as run:
        await run.finish()
    headers = {"accept": "text/event-stream", "last-event-id": str(run.seq)}
    assert (await shared.client.get(f"{run.path}/events", headers=headers)).status_code == 204
    headers["last-event-id"] = str(run.seq - 1)
    assert (await shared.client.get(f"{run.path}/events", headers=headers)).status_code == 200


async def test_server_sent_events_end_with_a_hint_when_the_server_stops(quick: Running) -> None:
    async with growing(quick) as run:
        lines = await _until_stopped(quick.client, f"{run.path}/events", quick)
    assert lines[-3:] == [": the server stops", "retry: 1000", ""]


async def _until_stopped(client: httpx2.AsyncClient, path: str, server: Running) -> list[str]:
    async with client.stream("GET", path, headers={"accept": "text/event-stream"}) as response:
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            server.service.wakeups.close()
    return lines


async def test_a_failing_server_names_the_position_to_resume(quick: Running) -> None:
    async with growing(quick) as run:
        async with websockets.connect(f"ws://127.0.0.1:{quick.port}{run.path}/ws") as socket:
            while from_json(await socket.recv())["seq"] != run.seq:
                pass
            pool = quick.owner
            await pool.execute("ALTER TABLE run_steps RENAME TO elsewhere")
            run.notifier.wake(run.run_id)
            async for _ in suppressed(socket):
                pass
        await pool.execute("ALTER TABLE elsewhere RENAME TO run_steps")
        assert socket.close_code == 1011
        assert socket.close_reason == f"internal error; resume after={run.seq}"


async def suppressed(socket: Any) -> AsyncIterator[Any]:
    """Return all messages until the stream ends, with any code."""
    with contextlib.suppress(websockets.ConnectionClosed):
        async for message in socket:
            yield message
