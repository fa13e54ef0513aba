"""The audit log: each action leaves a row in its own transaction, and no row can be changed."""

from typing import Any

import asyncpg
import httpx2
import pytest
import websockets
from pydantic_core import to_json
from sqlalchemy import text

from bottega.db.tables import DEFAULT_TENANT as TENANT
from tests.service import Running

AGENT = {"name": "a", "system_message": "x"}
RUN = {"agent": "a", "input": "x"}
SCHEDULE = {"name": "s", "cron": "0 8 * * *", "timezone": "UTC", "run": RUN}
MADE = ("agent.create", "graph.create", "schedule.create")
"""What the tests make first."""
TASK = text("""
    INSERT INTO tasks (tenant_id, run_id, id, agent, depth, status, started_at)
    VALUES (:tenant, :run, gen_random_uuid(), 'a', 1, 'running', now()) RETURNING id
""")


async def noted(client: httpx2.AsyncClient, **query: str) -> list[dict[str, Any]]:
    answer = await client.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return [each for each in found if each["action"] not in MADE]


def acts(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(entry["action"], entry["target"]) for entry in entries]


async def start(client: httpx2.AsyncClient) -> str:
    answer = await client.post("/v1/runs", json=RUN)
    run_id: str = answer.json()["id"]
    return run_id


@pytest.fixture
def client(server_: Running) -> httpx2.AsyncClient:
    """The client of a server of its own, without keys: making one would be recorded."""
    return server_.client


async def test_deletions_are_recorded(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/agents", json=AGENT)
    await client.post("/v1/graphs", json={"name": "g", "nodes": ["a"]})
    assert (await client.post("/v1/schedules", json=SCHEDULE)).status_code == 201
    assert await noted(client) == []
    for path in ("/v1/schedules/s", "/v1/graphs/g", "/v1/agents/a"):
        assert (await client.delete(path)).status_code == 204
    entries = await noted(client)
    assert acts(entries) == [("schedule.delete", "s"), ("graph.delete", "g"), ("agent.delete", "a")]
    assert {entry["actor"] for entry in entries} == {"local"}
    assert acts(await noted(client, action="graph.delete")) == [("graph.delete", "g")]
    assert acts(await noted(client, noted_after=entries[0]["at"])) == acts(entries[1:])
    assert acts(await noted(client, noted_before=entries[1]["at"])) == acts(entries[:1])


async def test_failed_requests_are_not_recorded(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/agents", json=AGENT)
    assert (await client.delete("/v1/agents/b")).status_code == 404
    assert (await client.delete("/v1/agents/a", headers={"if-match": '"7"'})).status_code == 412
    assert await noted(client) == []


async def test_the_audit_log_comes_in_pages(client: httpx2.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        await client.post("/v1/agents", json=AGENT | {"name": name})
        await client.delete(f"/v1/agents/{name}")
    path = "/v1/audit?action=agent.delete&order=desc"
    first = (await client.get(f"{path}&limit=2")).json()
    rest = (await client.get(f"{path}&cursor={first['next_cursor']}")).json()
    assert [entry["target"] for entry in first["items"] + rest["items"]] == ["c", "b", "a"]


@pytest.mark.parametrize("over", ["http", "websocket"])
async def test_a_cancelled_run_is_recorded_once(
    client: httpx2.AsyncClient, server_: Running, over: str
) -> None:
    await client.post("/v1/agents", json=AGENT)
    run_id = await start(client)
    if over == "http":
        for status in (202, 200):  # the second request changes nothing: the run has ended
            assert (await client.post(f"/v1/runs/{run_id}/cancel")).status_code == status
    else:
        async with websockets.connect(
            f"ws://127.0.0.1:{server_.port}/v1/runs/{run_id}/ws"
        ) as socket:
            await socket.send('{"type": "cancel"}')
            async for _ in socket:
                pass
    assert acts(await noted(client)) == [("run.cancel", run_id)]


@pytest.mark.parametrize("over", ["http", "websocket"])
async def test_a_cancelled_task_is_recorded(
    client: httpx2.AsyncClient, server_: Running, over: str
) -> None:
    await client.post("/v1/agents", json=AGENT)
    run_id = await start(client)
    async with server_.service.database.begin(TENANT) as tx:
        task_id = str(await tx.scalar(TASK, {"tenant": TENANT, "run": run_id}))
    if over == "http":
        path = f"/v1/runs/{run_id}/tasks/{task_id}/cancel"
        assert (await client.post(path)).status_code == 202
    else:
        async with websockets.connect(
            f"ws://127.0.0.1:{server_.port}/v1/runs/{run_id}/ws"
        ) as socket:
            await socket.send(to_json({"type": "cancel", "task_id": task_id}).decode())
            while "cancel.accepted" not in str(await socket.recv()):
                pass
    (entry,) = await noted(client)
    assert (entry["action"], entry["target"]) == ("task.cancel", task_id)
    assert entry["details"] == {"run_id": run_id}


async def test_an_action_that_cannot_be_recorded_is_not_done(
    client: httpx2.AsyncClient, server_: Running, database_url: str
) -> None:
    await client.post("/v1/agents", json=AGENT)
    run_id = await start(client)
    owner = await asyncpg.connect(database_url)
    await owner.execute("ALTER TABLE audit_log ADD CHECK (false) NOT VALID")
    await owner.close()
    assert (await client.delete("/v1/agents/a")).status_code == 500
    assert (await client.post(f"/v1/runs/{run_id}/cancel")).status_code == 500
    assert (await client.get("/v1/agents/a")).status_code == 200
    assert (await client.get(f"/v1/runs/{run_id}")).json()["status"] == "queued"


async def test_invalid_filters_are_refused(client: httpx2.AsyncClient) -> None:
    for query in ("action=%", "action=Run.Cancel", "noted_after=yesterday", "since=2026"):
        assert (await client.get(f"/v1/audit?{query}")).status_code == 422
