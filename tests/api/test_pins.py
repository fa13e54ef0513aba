"""Versions that runs pin: always the current ones, though each process caches them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import pytest
from pydantic_core import from_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.runs.pins import PinCache
from bottega.runs.submit import OnceKey, RunRequest, submit
from bottega.settings import Settings
from tests.service import Running, running

ROOT = {"name": "root", "system_message": "x", "subagents": {"names": ["child"]}}
CHILD: dict[str, Any] = {"name": "child", "system_message": "x", "description": "Helps."}
GRAPH: dict[str, Any] = {"name": "g", "edges": [{"source": "root", "target": "child"}]}


@pytest.fixture
async def other(
    settings: Settings, database_url: str, server_: Running
) -> AsyncIterator[httpx2.AsyncClient]:
    """The client of a second API process of the same database."""
    for path, body in (("agents", CHILD), ("agents", ROOT), ("graphs", GRAPH)):
        (await server_.client.post(f"/v1/{path}", json=body)).raise_for_status()
    async with running(settings, database_url) as second:
        yield second.client


async def post(server: Running, **fields: Any) -> httpx2.Response:
    return await server.client.post("/v1/runs", json={"agent": "root", "input": "x"} | fields)


async def pinned(server: Running, run: str) -> dict[str, Any]:
    stored = await server.owner.fetchval("SELECT pinned FROM runs WHERE id = $1", UUID(run))
    pins: dict[str, Any] = from_json(stored)
    return pins


async def pins_of(server: Running, **fields: Any) -> tuple[dict[str, int], Any]:
    answer = await post(server, **fields)
    assert answer.status_code == 202, answer.text
    pins = await pinned(server, answer.json()["id"])
    return pins["agents"], pins["graph"]


def content(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (body | changes).items() if key != "name"}


async def test_a_change_by_another_process_is_pinned_at_once(
    server_: Running, other: httpx2.AsyncClient
) -> None:
    old = {"name": "g", "version": 1}
    assert await pins_of(server_, graph="g") == ({"root": 1, "child": 1}, old)
    await other.put("/v1/agents/child", json=content(CHILD))
    assert await pins_of(server_, graph="g") == ({"root": 1, "child": 2}, old)
    await other.put("/v1/graphs/g", json=content(GRAPH, ttl_s=5))
    agents, graph = await pins_of(server_, graph="g")
    assert (agents, graph) == ({"root": 1, "child": 2}, {"name": "g", "version": 2})
    await other.put("/v1/agents/root", json=content(ROOT, subagents={"names": []}))
    assert await pins_of(server_) == ({"root": 2}, None)


async def test_a_mode_of_memory_set_by_another_process_holds_at_once(
    server_: Running, other: httpx2.AsyncClient
) -> None:
    assert (await post(server_)).json()["memory"] == "full"
    await other.put("/v1/agents/root", json=content(ROOT, memory="off"))
    assert (await post(server_)).json()["memory"] == "off"


async def test_an_agent_deleted_or_created_by_another_process_is_known_at_once(
    server_: Running, other: httpx2.AsyncClient
) -> None:
    assert (await post(server_)).status_code == 202
    await other.delete("/v1/agents/child")
    refused = await post(server_)
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_agent")
    await other.post("/v1/agents", json=CHILD)
    assert await pins_of(server_) == ({"root": 1, "child": 2}, None)


async def test_an_uncommitted_change_keeps_no_run_waiting(
    server_: Running, other: httpx2.AsyncClient
) -> None:
    async with server_.owner.acquire() as owner, owner.transaction():
        await owner.execute("UPDATE agents SET version = version, updated_at = now()")
        assert await pins_of(server_) == ({"root": 1, "child": 1}, None)


class Interrupted:
    """A pool on which something happens between the reading of pins and the run's acceptance."""

    def __init__(self, pool: asyncpg.Pool, *happens: Any) -> None:
        self.pool = pool
        self.happens = list(happens)
        self.statements: list[str] = []

    async def fetchval(self, query: str, *arguments: Any) -> Any:
        self.statements.append(query.split("(")[0])
        if "submit_run" in query and self.happens:
            await self.happens.pop(0)()
        return await self.pool.fetchval(query, *arguments)


async def test_a_change_between_reading_and_accepting_is_pinned(
    server_: Running, other: httpx2.AsyncClient
) -> None:
    new = RunRequest.of(
        {"mode": "orchestrated", "agent": "root", "input": "x", "priority": 5, "metadata": {}},
        memory="off",
        principal=None,
    )

    async def change() -> None:
        (await other.put("/v1/agents/child", json=content(CHILD))).raise_for_status()

    pool: Any = Interrupted(server_.service.database.pool, change, change)
    cache = PinCache()
    run = await submit(pool, cache, DEFAULT_TENANT, new)
    assert (await pinned(server_, str(run["id"])))["agents"] == {"root": 1, "child": 3}
    read, accept = "SELECT read_pins", "SELECT submit_run"
    assert pool.statements == [read, accept] * 3
    assert await server_.owner.fetchval("SELECT count(*) FROM runs") == 1
    pool.statements.clear()
    await submit(pool, cache, DEFAULT_TENANT, new)
    first = await submit(pool, cache, DEFAULT_TENANT, new, OnceKey("key", b"hash"))
    again = await submit(pool, cache, DEFAULT_TENANT, new, OnceKey("key", b"hash"))
    assert again == first
    assert pool.statements == [accept] * 3


async def test_many_runs_and_changes_at_once_pin_nothing_stale(
    server_: Running, other: httpx2.AsyncClient
) -> None:
    committed = [1]

    async def change() -> None:
        for _ in range(10):
            answer = await other.put("/v1/agents/child", json=content(CHILD))
            committed.append(answer.raise_for_status().json()["version"])

    async def runs() -> None:
        for _ in range(10):
            at_least = committed[-1]
            agents, _ = await pins_of(server_)
            assert agents["child"] >= at_least

    await asyncio.gather(change(), *(runs() for _ in range(4)))
    assert (await pins_of(server_))[0]["child"] == committed[-1] == 11
