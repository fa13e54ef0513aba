"""Cancelling runs and tasks."""

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import websockets
from pydantic_core import from_json

from bottega.runs.control import request_cancel
from bottega.settings import Settings
from tests.claims import end_leases
from tests.fake_model import FakeModel, Reply, calls, gated, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named, says
from tests.flows.test_processes import environment
from tests.flows.test_sent_messages import ENDING
from tests.processes import command
from tests.service import Running, client_of, running, watch
from tests.team import define, define_graph, start
from tests.waiting import until


@pytest.mark.deep
async def test_a_running_run_is_cancelled_in_another_process(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    model.script(calls(("requirements", {"query": "x"})), gated(asyncio.Event(), text("never")))
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        command("worker", **with_model),
        client_of(api.port) as client,
    ):
        await define(client)
        run_id = await start(client)
        await model.received(2)
        asked = await client.post(f"/v1/runs/{run_id}/cancel")
        assert asked.status_code == 202
        frames = await watch(api.port, run_id)
        await model.disconnected()
        run = (await client.get(f"/v1/runs/{run_id}")).json()
        again = await client.post(f"/v1/runs/{run_id}/cancel")
        tasks = (await client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert frames[-1]["type"] == "run.cancelled"
    assert (run["status"], run["stop_reason"]) == ("cancelled", "cancelled")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    assert [task["status"] for task in tasks] == ["cancelled"]
    assert len(model.requests) == 2


@pytest.mark.deep
async def test_a_cancelled_waiting_run_never_starts(database_url: str, model: FakeModel) -> None:
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        cancelled, kept = await start(client), await start(client)
        watching = asyncio.ensure_future(watch(api.port, cancelled))
        answer = await client.post(f"/v1/runs/{cancelled}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
        frames = await watching
        async with command("worker", **with_model):
            assert (await watch(api.port, kept))[-1]["type"] == "run.completed"
        run = (await client.get(f"/v1/runs/{cancelled}")).json()
    assert [frame["type"] for frame in frames] == ["run.queued", "run.cancelled"]
    assert (run["status"], run["attempts"]) == ("cancelled", [])
    assert len(model.requests) == 7


@pytest.mark.deep
async def test_a_cancellation_survives_the_worker_that_missed_it(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    model.script(gated(asyncio.Event(), text("never")))
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        async with command("worker", **with_model) as victim:
            run_id = await start(client)
            await model.received(1)
            victim.kill()
            await victim.process.wait()
        assert (await client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
    assert frames[-1]["type"] == "run.cancelled"
    assert len(model.requests) == 1


async def test_over_the_websocket(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    model.script(gated(asyncio.Event(), text("never")))
    run_id = await start(bottega.client)
    async with websockets.connect(f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws") as socket:
        await model.received(1)
        await socket.send('{"type": "cancel"}')
        types = [from_json(message)["type"] async for message in socket]
    assert "cancel.accepted" in types
    assert "run.cancelled" in types
    assert socket.close_code == 1000


async def test_a_frame_is_answered_though_it_ended_the_run(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asyncio.Event()

    async def slow_to_answer(*args: Any) -> None:
        await request_cancel(*args)
        await seen.wait()

    monkeypatch.setattr("bottega.api.routes.websocket.request_cancel", slow_to_answer)
    await define(bottega.client)
    model.script(gated(asyncio.Event(), text("never")))
    run_id = await start(bottega.client)
    types: list[str] = []
    async with websockets.connect(f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws") as socket:
        await model.received(1)
        await socket.send('{"type": "cancel"}')
        async for message in socket:
            types.append(from_json(message)["type"])
            if types[-1] == "run.cancelled":
                seen.set()
    assert types[-2:] == ["run.cancelled", "cancel.accepted"]
    assert socket.close_code == 1000


async def test_a_cancellation_at_the_very_end_is_not_lost(
    bottega: Running, model: FakeModel
) -> None:
    """Commit a cancellation after the loop has ended: the run may not complete."""
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, text("Hello.")))
    run_id = await start(bottega.client)
    await model.received(1)
    async with bottega.owner.acquire() as connection, connection.transaction():
        answer = await connection.fetchval(
            "SELECT cancel_run(tenant_id, id) FROM runs WHERE id = $1", UUID(run_id)
        )
        gate.set()
        await until(lambda: bottega.owner.fetchval(ENDING))
    frames = await watch(bottega.port, run_id)
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert answer == "requested"
    assert frames[-1]["type"] == "run.cancelled"
    assert (run["status"], run["output"]) == ("cancelled", None)
    assert len(run["attempts"]) == 1


async def test_an_unknown_run_is_not_found(bottega: Running) -> None:
    path = "/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/cancel"
    assert (await bottega.client.post(path)).status_code == 404


async def test_cancelling_a_task_ends_its_subtree_but_not_the_run(
    bottega: Running, model: FakeModel
) -> None:
    def decide(request: dict[str, Any]) -> Reply:
        answered = [message for message in request["messages"] if message["role"] == "tool"]
        match named(request), len(answered):
            case "root", 0:
                return calls(("mid", {"query": "go"}), ("other", {"query": "go"}))
            case "root", _:
                return text("; ".join(message["content"] for message in answered))
            case "mid", _:
                return calls(("leaf", {"query": "go"}))
            case "leaf", _:
                return gated(asyncio.Event(), text("never"))
        return text("other is done")

    model.decide = decide
    for name in ("leaf", "other"):
        await create(bottega, name)
    await create(bottega, "mid", subagents={"names": ["leaf"]})
    await create(bottega, "root", subagents={"names": ["mid", "other"]})
    body = {"agent": "root", "input": "x"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    path = f"/v1/runs/{run_id}"
    await model.received(4)
    async with websockets.connect(f"ws://127.0.0.1:{bottega.port}{path}/ws") as socket:
        started: list[dict[str, Any]] = []
        while sum(frame["type"] == "llm.started" for frame in started) < 4:
            started.append(from_json(await socket.recv()))
    ids = {frame["agent"]: frame["task_id"] for frame in started}
    answer = await bottega.client.post(f"{path}/tasks/{ids['mid']}/cancel")
    assert answer.status_code == 200
    assert {item["task_id"]: item["status"] for item in answer.json()["items"]} == {
        ids["mid"]: "stopped",
        ids["leaf"]: "stopped",
    }
    await model.disconnected()
    frames = await watch(bottega.port, run_id)
    assert frames[-1]["type"] == "run.completed"
    run = (await bottega.client.get(path)).json()
    assert run["output"] == "Error: somebody cancelled this task; other is done"
    failed = [frame["agent"] for frame in frames if frame["type"] == "agent.failed"]
    assert failed == ["leaf", "mid"]
    tasks = (await bottega.client.get(f"{path}/tasks")).json()["items"]
    assert {task["agent"]: task["status"] for task in tasks} == {
        "mid": "cancelled",
        "leaf": "cancelled",
        "other": "completed",
    }
    again = await bottega.client.post(f"{path}/tasks/{ids['mid']}/cancel")
    assert {item["status"] for item in again.json()["items"]} == {"already_final"}
    unknown = await bottega.client.post(f"{path}/tasks/{run_id}/cancel")
    assert unknown.status_code == 404
    # It stays cancelled in a repetition that keeps finished work.
    before = len(model.requests)
    retry = await bottega.client.post(f"{path}/retry", json={"from": "last_step"})
    frames = await watch(bottega.port, retry.json()["id"])
    assert frames[-1]["type"] == "run.completed"
    assert len(model.requests) == before


@pytest.mark.deep
async def test_a_cancelled_task_stays_so_when_the_run_is_resumed(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    model.decide = says(a=gated(asyncio.Event(), text("never")))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    async with running(configured, database_url, worker=True) as bottega:
        await define_graph(bottega.client, "g", ("a", "b"))
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(1)
    async with running(configured, database_url) as bottega:
        (task,) = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
        path = f"/v1/runs/{run_id}/tasks/{task['id']}/cancel"
        answer = await bottega.client.post(path)
        assert answer.status_code == 202
        assert [item["status"] for item in answer.json()["items"]] == ["stopping"]
    async with running(configured, database_url, worker=True) as bottega:
        frames = await watch(bottega.port, run_id)
        tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert frames[-1]["type"] == "run.failed"
    assert {task["agent"]: task["status"] for task in tasks} == {"a": "cancelled", "b": "failed"}
    assert len(model.requests) == 1


async def test_a_run_whose_worker_is_dead_ends_at_once(database_url: str, model: FakeModel) -> None:
    with_model = environment(database_url, model)
    model.script(gated(asyncio.Event(), text("never")))
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model) as victim,
    ):
        await define(client)
        run_id = await start(client)
        await model.received(1)
        victim.kill()
        await victim.process.wait()
        connection = await asyncpg.connect(database_url)
        await end_leases(connection)
        await connection.close()
        answer = await client.post(f"/v1/runs/{run_id}/cancel")
        frames = await watch(api.port, run_id)
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    assert frames[-1]["type"] == "run.cancelled"
