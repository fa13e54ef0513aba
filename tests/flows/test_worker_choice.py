"""The choice of the worker for a new run, with real worker processes."""

import asyncio
from uuid import UUID

import asyncpg

from tests.fake_model import FakeModel
from tests.flows.test_processes import environment, gate_call
from tests.processes import Command, command
from tests.service import client_of, watch
from tests.team import define, start
from tests.waiting import until

LEASES = "SELECT worker_id FROM worker_leases ORDER BY worker_id"
BUSY = "SELECT is_busy FROM worker_leases WHERE worker_id = $1"
HOLDERS = "SELECT worker_id FROM run_heads"


async def ids(owner: asyncpg.Pool, count: int) -> list[UUID]:
    """Wait for so many workers; return their ids, in the order in which they get runs."""
    rows = await until(lambda: owner.fetch(LEASES), lambda rows: len(rows) == count)
    return [row["worker_id"] for row in rows]


async def test_a_dead_worker_is_passed_over_after_one_run(
    database_url: str, owner: asyncpg.Pool, model: FakeModel
) -> None:
    with_model = environment(database_url, model, BOTTEGA_TAKEOVER_S="60")
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model) as one,
    ):
        (early,) = await ids(owner, 1)
        async with command("worker", **with_model) as other:
            dead, alive = await ids(owner, 2)
            victim: Command = one if dead == early else other
            victim.kill()
            await victim.process.wait()
            await define(client)
            frames = await watch(api.port, await start(client))
            assert frames[-1]["type"] == "run.completed"
            assert await owner.fetchval(BUSY, dead)
            assert await owner.fetchval("SELECT free_worker()") == str(alive)


async def test_a_full_worker_is_passed_over_at_once(
    database_url: str, owner: asyncpg.Pool, model: FakeModel
) -> None:
    more = {"BOTTEGA_WORKER_CONCURRENCY": "2", "BOTTEGA_TAKEOVER_S": "60"}
    with_model = environment(database_url, model, **more)
    gate = asyncio.Event()
    for call in (1, 2):
        gate_call(model, call, gate)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model),
        command("worker", **with_model),
    ):
        first, second = await ids(owner, 2)
        await define(client)
        held = []
        for count in (1, 2):
            held.append(await start(client))
            await model.received(count)  # the last run's call must be none of these
        await until(lambda: owner.fetchval(BUSY, first))
        assert await owner.fetch(HOLDERS) == [(first,), (first,)]
        assert await owner.fetchval("SELECT free_worker()") == str(second)
        frames = await watch(api.port, await start(client))
        assert frames[-1]["type"] == "run.completed"
        gate.set()
        for run in held:
            assert (await watch(api.port, run))[-1]["type"] == "run.completed"
