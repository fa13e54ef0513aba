"""Maintenance jobs beside live runs, by several workers, one of which is killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from bottega.memory.episodes.episode import Outcome
from bottega.settings import Settings
from tests import waiting
from tests.fake_model import FakeModel
from tests.memories import make_episode, store_episodes
from tests.processes import command
from tests.service import Running, running
from tests.team import define, start


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url})


async def learned_from(pool: asyncpg.Pool, age: timedelta = timedelta(hours=1)) -> None:
    """Import episodes from which patterns can be mined."""
    began = datetime.now(UTC) - age
    for number in range(16):
        good = number % 2 == 0
        order = ["finder", "writer"] if good else ["writer", "finder"]
        trace = [{"step": n, "task_id": None, "tool": agent} for n, agent in enumerate(order, 1)]
        await store_episodes(
            pool,
            make_episode(
                f"Look up order {number}",
                began + timedelta(seconds=number),
                id=UUID(int=0xE0000 + number),
                outcome=Outcome.SUCCESS if good else Outcome.FAILURE,
                task_type="lookup",
                user_id=f"user {number % 8 // 2}",
                trace=trace,
                metadata={"agents": order},
            ),
            embedded=False,
        )


async def until(owner: asyncpg.Pool, query: str) -> None:
    """Wait until a query of the database answers true."""
    await waiting.until(lambda: owner.fetchval(query))


@asynccontextmanager
async def nobody_writes_patterns(owner: asyncpg.Pool) -> AsyncIterator[None]:
    """Block every write of a pattern until this ends."""
    async with owner.acquire() as connection, connection.transaction():
        await connection.execute("LOCK TABLE patterns IN SHARE MODE")
        yield


MINING = "SELECT status = 'running' AND stage = 1 FROM memory_jobs"
WAITS = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'patterns'::regclass"


async def run_team(server: Running) -> str:
    run_id = await start(server.client)
    frames = await server.frames(f"/v1/runs/{run_id}/ws")
    assert frames[-1]["type"] == "run.completed", frames[-1]
    return run_id


async def test_live_runs_continue_during_maintenance(
    configured: Settings, database_url: str
) -> None:
    async with running(configured, database_url, worker=True) as server:
        await define(server.client)
        await learned_from(server.service.database.pool)
        async with nobody_writes_patterns(server.owner):
            where = (await server.client.post("/v1/memory/maintenance")).headers["location"]
            await until(server.owner, MINING)
            await until(server.owner, WAITS)  # in the middle of a stage
            done = await asyncio.gather(*(run_team(server) for _ in range(3)))
            assert len(set(done)) == 3
            look = (await server.client.get(where)).json()
            assert (look["status"], look["stage"]) == ("running", 1)
            assert list(look["progress"]) == ["episodes"]
        # And while the job is not blocked either.
        await run_team(server)
        await until(server.owner, "SELECT status = 'done' FROM memory_jobs")
        report = (await server.client.get(where)).json()["report"]
        assert report["patterns"]["by_state"]["CANDIDATE"] >= 1


async def test_two_workers_make_up_for_a_missed_night_once(
    configured: Settings, database_url: str
) -> None:
    async with asyncpg.create_pool(database_url, min_size=0) as owner:
        await owner.execute("UPDATE tenants SET created_at = now() - interval '9 days'")
        await learned_from(owner, timedelta(days=2))
        async with (
            running(configured, database_url, worker=True),
            running(configured, database_url, worker=True),
        ):
            await until(owner, "SELECT count(*) > 0 FROM memory_jobs WHERE status = 'done'")
            # Both have checked for due jobs by now, or will find none.
            rows = await owner.fetch("SELECT cause, tries, tick FROM memory_jobs")
            assert [(row["cause"], row["tries"]) for row in rows] == [("nightly", 1)]
            tick = rows[0]["tick"]
            assert (tick.hour, tick.minute) == (3, 0)
            assert timedelta(0) <= datetime.now(UTC) - tick < timedelta(days=1)


async def test_another_worker_continues_after_a_kill(database_url: str, model: FakeModel) -> None:
    given = {
        "DATABASE_URL": database_url,
        "OPENAI_BASE_URL": model.base_url,
        "OPENAI_API_KEY": "test-key",
    }
    async with asyncpg.create_pool(database_url, min_size=0) as owner:
        await learned_from(owner)
        await owner.execute(
            "INSERT INTO memory_jobs (tenant_id, cause) SELECT id, 'demand' FROM tenants"
        )
        async with nobody_writes_patterns(owner), command("worker", **given) as worker:
            await until(owner, MINING)
            await until(owner, WAITS)
            worker.kill()
            await worker.process.wait()
        await owner.execute("UPDATE memory_jobs SET next_at = now()")  # its lease has expired
        async with command("worker", **given):
            await until(owner, "SELECT status = 'done' FROM memory_jobs")
        row = await owner.fetchrow("SELECT tries, stage FROM memory_jobs")
        assert (row["tries"], row["stage"]) == (2, 6)
        found = "SELECT count(*) = count(DISTINCT fingerprint) AND count(*) > 0 FROM patterns"
        assert await owner.fetchval(found)
