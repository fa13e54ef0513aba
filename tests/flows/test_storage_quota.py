"""The quota of a tenant's storage: what fills it, what it refuses, and what gives room back."""

import asyncio
from operator import not_

import asyncpg
import httpx2
from pydantic_core import to_json

from bottega.settings import Settings
from bottega.tenants import operator
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_run_limits import AGENT, begin, configured
from tests.flows.test_user_erasure import erase_user
from tests.service import Running, frames, running
from tests.tenants import holder
from tests.waiting import until

LARGE = "x" * 30_000
SUMS = {"definitions", "episodes", "files", "runs", "sessions"}


async def stored(server: Running, client: httpx2.AsyncClient) -> dict[str, int]:
    """Add up what tenants store; return the client's bytes by kind."""
    await server.owner.execute("SELECT sum_storage(0)")
    answer = await client.get("/v1/scheduler")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    (quota,) = [each for each in told["quotas"] if each["name"] == "storage_bytes"]
    assert float(quota["used"]) == sum(told["storage"].values())
    return dict(told["storage"])


async def accepted(client: httpx2.AsyncClient) -> list[int]:
    """Try to store something new of each kind; return the statuses that are not of the quota."""
    run = {"agent": "a", "input": "x"}
    part = {"type": "file", "data": "eA==", "name": "x.txt", "media_type": "text/plain"}
    filed = [{"role": "user", "content": [part]}]
    task = {"original_input": "x"}
    schedule = {"name": "s", "cron": "0 3 * * *", "run": run}
    answers = [
        await client.post("/v1/runs", json=run),
        await client.post("/v1/runs", json=run | {"input": filed}),
        await client.post("/v1/agents", json=AGENT | {"name": "b"}),
        await client.put("/v1/agents/a", json={"description": "b", "system_message": "b"}),
        await client.post("/v1/apply", json={"agents": [AGENT | {"name": "c"}], "source": "s"}),
        await client.post("/v1/schedules", json=schedule),
        await client.put("/v1/schedules/s", json={"cron": "0 3 * * *", "run": run}),
        await client.post("/v1/episodes", json={"outcome": "SUCCESS", "task": task}),
        await client.post("/v1/files", files={"file": b"x"}),
        await client.post("/v1/sessions", json={"metadata": {"a": "b"}}),
        await client.patch("/v1/sessions/s", json={"metadata": {"a": "b"}}),
    ]
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["code"] == "storage_quota"
            assert "delete sessions" in answer.json()["detail"]
            assert answer.headers["retry-after"] == "60"
    return [answer.status_code for answer in answers if answer.status_code != 429]


async def test_a_full_tenant_stores_nothing_new_until_it_deletes(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    limited = configured(settings, model, tenant_storage_bytes=100_000)
    one, other = [await holder(database_url, name) for name in ("one", "other")]
    async with (
        running(limited, database_url, worker=True) as server,
        one.client(server) as full,
        other.client(server) as free,
    ):
        for client in (full, free):
            await client.post("/v1/agents", json=AGENT)
        (under_way,) = await begin(full, session_id="s")
        await model.received(1)
        # Definitions and files count, too.
        file = (await full.post("/v1/files", files={"file": LARGE.encode()})).json()["id"]
        await full.put("/v1/agents/a", json={"description": "b", "system_message": LARGE})
        await begin(full, session_id="s", input=LARGE)
        found = await stored(server, full)
        assert found["files"] == len(LARGE) < min(found["definitions"], found["runs"])
        await begin(full, session_id="s", input=LARGE)
        await stored(server, full)

        assert await accepted(full) == []
        gate.set()  # what was taken in before ends as always
        events = await frames(server.port, f"/v1/runs/{under_way}/ws", one.headers)
        assert events[-1]["type"] == "run.completed"
        assert (await full.get("/v1/runs")).status_code == 200
        assert (await stored(server, free)).keys() == SUMS
        await begin(free)

        assert (await full.delete(f"/v1/files/{file}")).status_code == 204
        assert (await full.delete("/v1/sessions/s")).status_code == 200
        left = await stored(server, full)
        assert left == {**dict.fromkeys(SUMS, 0), "definitions": left["definitions"]}
        assert await accepted(full) == [202, 202, 201, 200, 200, 201, 200, 201, 201, 201, 404]


async def test_a_run_counts_what_it_copies_and_what_its_end_stores(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    answer = {"a": LARGE}
    gate = asyncio.Event()
    model.script(text(to_json(answer).decode()), gated(gate, text("done")))
    async with running(configured(settings, model), database_url, worker=True) as server:
        client = server.client
        await client.post("/v1/agents", json=AGENT)
        await client.post("/v1/sessions", json={"id": "s"})
        await server.owner.execute(
            """
            INSERT INTO session_memory (
                tenant_id, session_id, agent, version, content, details, run_id, published_at)
            SELECT tenant_id, id, 'b', 1, $1, '{}', uuidv7(), now() FROM sessions
            """,
            LARGE,
        )
        (run_id,) = await begin(client, session_id="s", output_schema={"type": "object"})
        await server.frames(f"/v1/runs/{run_id}/ws")
        first = await stored(server, client)
        # Published answers; the answer in the log, in both outputs, and in the turn.
        assert 5 * len(LARGE) < first["runs"] < 5.5 * len(LARGE)

        retried = (await client.post(f"/v1/runs/{run_id}/retry", json={})).json()["id"]
        await model.received(2)  # it has begun, so what it copies is stored
        await client.post(f"/v1/runs/{retried}/cancel")
        await server.frames(f"/v1/runs/{retried}/ws")
        second = await stored(server, client)
        assert len(LARGE) < second["runs"] - first["runs"] < 1.5 * len(LARGE)


TABLES = {
    "episodes": ("episodes",),
    "files": ("files",),
    "runs": ("runs",),
    "sessions": ("sessions", "session_memory"),
}


async def recounted(server: Running) -> dict[str, int]:
    """Add up the bytes of the tables themselves, by kind."""
    return {
        kind: sum(
            [
                await server.owner.fetchval(f"SELECT coalesce(sum(bytes), 0) FROM {table}")
                for table in tables
            ]
        )
        for kind, tables in TABLES.items()
    }


async def test_retention_and_erasure_give_room_back(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = lambda request: text("done")
    file = {"type": "file", "data": "eA==", "name": "x.txt", "media_type": "text/plain"}
    asked = [{"role": "user", "content": [file, {"type": "text", "text": LARGE}]}]
    async with running(configured(settings, model), database_url, worker=True) as server:
        client = server.client

        async def compared() -> dict[str, int]:
            told = await stored(server, client)
            del told["definitions"]
            assert told == await recounted(server)
            return told

        await client.post("/v1/agents", json=AGENT)
        ids = await begin(client, 2, input=LARGE, session_id="old")
        ids += await begin(client, input=asked, session_id="hers", user="ada")
        for run_id in ids:
            await server.frames(f"/v1/runs/{run_id}/ws")
        await until(lambda: server.owner.fetchval("SELECT count(*) FROM episode_work"), not_)
        first = await compared()
        assert all(first.values())

        await server.owner.execute(
            "UPDATE runs SET ended_at = ended_at - interval '31 days' WHERE session_id = 'old'"
        )
        await operator.prune(database_url, {"runs": 30.0})
        second = await compared()
        assert first["runs"] - second["runs"] > 2 * len(LARGE)

        await erase_user(server, "ada")
        third = await compared()
        assert (third["runs"], third["files"]) == (0, 0)
        assert third["episodes"] < second["episodes"]


async def test_a_full_tenant_may_replace_by_less(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    limited = configured(settings, model, tenant_storage_bytes=30_000)
    run = {"agent": "a", "input": LARGE}
    schedule = {"cron": "0 3 * * *", "run": run}
    async with running(limited, database_url) as server:
        client = server.client
        await client.post("/v1/agents", json=AGENT)
        await client.post("/v1/sessions", json={"id": "s", "metadata": {"a": "x" * 500}})
        assert (await client.put("/v1/schedules/s", json=schedule)).status_code == 201
        await stored(server, client)

        async def refused(metadata: str, input_: str) -> list[bool]:
            changed = schedule | {"run": run | {"input": input_}}
            answers = [
                await client.patch("/v1/sessions/s", json={"metadata": {"a": metadata}}),
                await client.put("/v1/schedules/s", json=changed),
            ]
            return [answer.status_code == 429 for answer in answers]

        assert await refused("y" * 501, LARGE + "x") == [True, True]
        assert await refused("y" * 500, LARGE) == [False, False]
        assert await refused("y", "x") == [False, False]


async def test_processes_add_up_together_once_in_a_while(database_url: str) -> None:
    owner = await asyncpg.connect(database_url)
    try:
        await owner.execute("SELECT sum_storage(3600)")
        await owner.execute(
            "INSERT INTO storage_changes (tenant_id, kind, bytes) SELECT id, 'runs', 7 FROM tenants"
        )
        await owner.execute("SELECT sum_storage(3600)")
        assert await owner.fetchval("SELECT count(*) FROM tenant_storage") == 0
        await owner.execute("UPDATE last_sum SET at = now() - interval '2 hours'")
        await owner.execute("SELECT sum_storage(3600)")
        assert await owner.fetchval("SELECT bytes FROM tenant_storage") == 7
    finally:
        await owner.close()
