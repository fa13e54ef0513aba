"""Ending runs from outside."""

import asyncio

import websockets
from pydantic_core import from_json

from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_processes import client_of, environment
from tests.processes import command
from tests.service import Running, watch
from tests.team import define, start


async def test_a_run_under_way_is_cut_off_in_another_process(
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


async def test_a_run_that_waits_never_starts(database_url: str, model: FakeModel) -> None:
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


async def test_a_wish_outlives_the_worker_that_did_not_hear_it(
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


async def test_an_unknown_run_is_not_found(bottega: Running) -> None:
    path = "/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/cancel"
    assert (await bottega.client.post(path)).status_code == 404
