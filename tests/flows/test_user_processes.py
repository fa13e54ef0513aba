"""Erasure of an end user by real processes, and of a thousand runs."""

import time
from typing import Any

import asyncpg
import pytest

from tests.fake_model import FakeModel, text
from tests.flows.test_processes import environment
from tests.flows.test_tenant_deletion import AGENT
from tests.flows.test_user_erasure import counts, rows_of
from tests.processes import command
from tests.service import Running, client_of
from tests.waiting import until

USER = "ada.lovelace"
BY = {"agent": "solo", "input": "x", "user": USER}


async def is_gone(client: Any) -> None:
    await until(
        lambda: client.get(f"/v1/users/{USER}"), lambda answer: answer.status_code == 404, within=60
    )


@pytest.mark.deep
async def test_an_erasure_survives_kill_9_and_lost_connections(
    database_url: str, model: FakeModel, owner: asyncpg.Pool
) -> None:
    """Kill the process in the middle of an erasure, and cut off the next one's connections."""
    model.decide = lambda request: text("fine")
    with_model = environment(database_url, model)
    async with (
        command("serve", "--port", "0", **with_model) as victim,
        client_of(victim.port) as client,
    ):
        assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
        for session in map(str, range(6)):
            said = BY | {"session_id": f"s-{session}"}
            await client.post("/v1/runs?wait=30", json=said)
        kept = (await client.post("/v1/runs?wait=30", json=BY | {"user": "bob"})).json()
        async with owner.acquire() as holding, holding.transaction():
            await holding.execute("SELECT FROM sessions WHERE user_id = $1 FOR UPDATE", USER)
            assert (await client.delete(f"/v1/users/{USER}")).status_code == 202
            runs = "SELECT count(*) FROM runs WHERE user_id = $1"
            await until(lambda: owner.fetchval(runs, USER), lambda left: not left)
            victim.kill()
            await victim.process.wait()
    assert await owner.fetchval("SELECT count(*) FROM sessions WHERE user_id = $1", USER) == 6
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        async with owner.acquire() as holding, holding.transaction():
            await holding.execute("SELECT FROM sessions WHERE user_id = $1 FOR UPDATE", USER)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            await until(lambda: owner.fetchval(waiting))
            await holding.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'bottega' AND datname = current_database()"
            )
        await is_gone(client)
        assert await rows_of(owner, USER) == {}
        assert (await client.get(f"/v1/runs/{kept['id']}")).status_code == 200


@pytest.mark.deep
async def test_a_thousand_runs_are_erased_in_fifteen_seconds(
    bottega: Running, model: FakeModel
) -> None:
    """Measure it with a run a session, each with its episode; a run writes the rows of all."""
    model.decide = lambda request: text("fine")
    client = bottega.client
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
    said = BY | {"session_id": "s-0"}
    assert (await client.post("/v1/runs?wait=30", json=said)).json()["status"] == "completed"
    await until(
        lambda: bottega.owner.fetchval("SELECT count(*) FROM episode_vectors"), lambda made: made
    )
    await multiply(bottega.owner, 1000)
    before = await counts(bottega.owner, USER)
    assert before["runs"] == before["sessions"] == before["episodes"] == 1000
    began = time.monotonic()
    assert (await client.delete(f"/v1/users/{USER}")).status_code == 202
    await is_gone(client)
    took = time.monotonic() - began
    print(f"erased {before} in {took:.1f} s")
    assert took < 15
    assert await rows_of(bottega.owner, USER) == {}


async def multiply(owner: asyncpg.Pool, number: int) -> None:
    """Copy the only run, with its session, episode and other rows, to make as many."""
    copied = {
        "sessions": ("id",),
        "conversations": ("session_id", "id"),
        "runs": ("id", "session_id"),
        "run_steps": ("run_id",),
        "episodes": ("id", "run_id", "session_id"),
        "episode_bodies": ("episode_id",),
        "episode_state": ("episode_id",),
        "episode_search": ("episode_id", "session_id"),
        "episode_vectors": ("episode_id", "session_id"),
        "run_learning": ("run_id", "episode_id"),
    }
    async with owner.acquire() as connection, connection.transaction():
        for table, columns in copied.items():
            names = await connection.fetch(
                "SELECT attname AS name FROM pg_attribute WHERE attrelid = $1::text::regclass"
                " AND attnum > 0 AND NOT attisdropped AND attgenerated = ''",
                table,
            )
            texts = {"session_id"} | ({"id"} if table == "sessions" else set())
            changed = {
                each: "'s-' || n" if each in texts else f"md5(t.{each}::text || n)::uuid"
                for each in columns
            }
            values = [changed.get(row["name"], f't."{row["name"]}"') for row in names]
            listed = ", ".join(f'"{row["name"]}"' for row in names)
            await connection.execute(
                f"INSERT INTO {table} ({listed}) SELECT {', '.join(values)}"
                f" FROM {table} t CROSS JOIN generate_series(1, {number - 1}) AS n"
            )
