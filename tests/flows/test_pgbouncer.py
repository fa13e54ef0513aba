"""The service behind PgBouncer in transaction mode, which gives each transaction any connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from uuid import UUID, uuid4

import asyncpg
import pytest
import websockets
from pydantic import SecretStr
from pydantic_core import from_json

from bottega.db.connect import APP_ROLE
from bottega.db.pool import acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.settings import Settings
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_processes import environment
from tests.pgbouncer import Bouncer, pgbouncer
from tests.processes import command
from tests.service import client_of, is_stored, running
from tests.team import CALLS, define, start
from tests.tenants import holder

_MINE = "SELECT array_agg(DISTINCT tenant_id), current_user::text FROM sessions"


@pytest.fixture
async def bouncer(database_url: str) -> AsyncIterator[Bouncer]:
    async with pgbouncer(database_url) as bouncer:
        yield bouncer


async def test_no_connection_acts_for_the_tenant_that_it_served_before(
    database_url: str, bouncer: Bouncer, owner: asyncpg.Pool
) -> None:
    tenants = [(await holder(database_url, name)).tenant_id for name in ("one", "two")]
    for tenant_id in tenants:
        await owner.execute(
            "INSERT INTO sessions (tenant_id, id) SELECT $1, g::text FROM generate_series(1, 5) g",
            tenant_id,
        )
    processes: set[int] = set()
    async with open_database(
        database_url, pooler=bouncer.url, pool_size=20, limits={"queued_runs": 7}
    ) as database:

        async def look(tenant_id: UUID) -> None:
            async with acting_as(database.pool, tenant_id) as connection:
                assert tuple(await connection.fetchrow(_MINE)) == ([tenant_id], APP_ROLE)
                processes.add(await connection.fetchval("SELECT pg_backend_pid()"))
            async with database.begin(tenant_id) as tx:
                assert tuple(await tx.driver.fetchrow(_MINE)) == ([tenant_id], APP_ROLE)
            # A single statement names no tenant, or names it itself.
            with pytest.raises(asyncpg.PostgresError, match=r"bottega\.tenant|uuid"):
                await database.pool.fetchrow(_MINE)
            assert await database.pool.fetchval("SELECT bottega_limit('queued_runs', 1)") == 7

        await asyncio.gather(*(look(tenants[n % 2]) for n in range(60)))
    assert 1 < len(processes) <= 4  # connections of the server that all of these shared


@pytest.fixture
async def login(owner: asyncpg.Pool) -> AsyncIterator[str]:
    """Make the login that docs/operate/database.md advises: alone it may read no table."""
    name = f"server_{uuid4().hex}"
    await owner.execute(
        f"CREATE ROLE {name} LOGIN; GRANT bottega_app, bottega_user, bottega_maintenance TO {name} "
        "WITH INHERIT FALSE, SET TRUE"
    )
    yield name
    await owner.execute(f"DROP ROLE {name}")


async def test_runs_streams_and_limits_work_behind_it(
    settings: Settings, database_url: str, login: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    own_url = database_url.replace("postgres@", f"{login}@")
    assert own_url != database_url
    async with pgbouncer(database_url, login=login) as bouncer:
        changes = {
            "database_url": SecretStr(bouncer.url),
            "listen_url": SecretStr(own_url),
            "openai_base_url": model.base_url,
            "queued_runs": 1,
            "concurrent_runs": 1,
        }
        pooled = settings.model_copy(update=changes)
        await _works(pooled, own_url, model, gate)


async def _works(pooled: Settings, url: str, model: FakeModel, gate: asyncio.Event) -> None:
    async with running(pooled, url, worker=True) as bottega:
        await define(bottega.client)
        frames = await bottega.watch(await start(bottega.client))
        assert frames[-1]["type"] == "run.completed"
        model.decide = lambda request: gated(gate, text("late"))
        first = await start(bottega.client)
        await model.received(CALLS + 1)
        await start(bottega.client)
        refused = await bottega.client.post("/v1/runs", json={"agent": "designer", "input": "x"})
        assert (refused.status_code, refused.json()["code"]) == (429, "queued_runs")
        await bottega.client.post(f"/v1/runs/{first}/cancel")
        assert (await bottega.watch(first))[-1]["type"] == "run.cancelled"


async def test_a_pooler_in_the_wrong_place_is_named(bouncer: Bouncer) -> None:
    with pytest.raises(Exception, match="BOTTEGA_LISTEN_URL to the address of PostgreSQL itself"):
        async with open_database(bouncer.url):
            pass


async def test_nothing_that_a_session_kept_holds_for_the_next_transaction(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Check it for the only session, in which somebody left a tenant, a limit and a role."""
    one, two = [(await holder(database_url, name)).tenant_id for name in ("one", "two")]
    for tenant_id in (one, two):
        await owner.execute(
            "INSERT INTO sessions (tenant_id, id) SELECT $1, g::text FROM generate_series(1, 5) g",
            tenant_id,
        )
    poison = f"SET bottega.tenant = '{one}'; SET bottega.queued_runs = 99; SET ROLE bottega_system"
    async with (
        pgbouncer(database_url, size=1) as bouncer,
        open_database(database_url, pooler=bouncer.url, limits={"queued_runs": 7}) as database,
    ):
        attacker = await asyncpg.connect(bouncer.url, statement_cache_size=0)
        await attacker.execute(poison)
        await attacker.close()
        for tenant_id in (two, one, two):
            async with acting_as(database.pool, tenant_id) as connection:
                assert tuple(await connection.fetchrow(_MINE)) == ([tenant_id], APP_ROLE)
            async with database.begin(tenant_id) as tx:
                assert tuple(await tx.driver.fetchrow(_MINE)) == ([tenant_id], APP_ROLE)
            with pytest.raises(asyncpg.PostgresError, match="uuid"):  # it names no tenant
                await database.pool.fetchrow(_MINE)
            assert await database.pool.fetchval("SELECT bottega_limit('queued_runs', 1)") == 7
        left = await asyncpg.connect(bouncer.url, statement_cache_size=0)
        assert await left.fetchval("SELECT current_user") == "bottega_system"  # as it was
        await left.close()


async def test_a_transaction_that_waited_too_long_leaves_none_behind(database_url: str) -> None:
    async with (
        pgbouncer(database_url, size=1) as bouncer,
        open_database(database_url, pooler=bouncer.url, pool_size=2) as database,
    ):
        async with database.pool.acquire() as busy, busy.transaction():
            with pytest.raises(TimeoutError):
                await database.pool.fetchval("SELECT 1", timeout=0.1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), database.begin(DEFAULT_TENANT):
                    pass
        async with asyncio.timeout(5), database.begin(DEFAULT_TENANT) as tx:
            assert await tx.driver.fetchval("SELECT 1") == 1
        async with asyncio.timeout(5):
            assert await database.pool.fetchval("SELECT 1") == 1


async def test_a_retry_needs_one_session(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Check it because some retries could take all sessions, and each wait for another one."""
    async with pgbouncer(database_url, size=1) as bouncer:
        changes = {
            "database_url": SecretStr(bouncer.url),
            "listen_url": SecretStr(database_url),
            "openai_base_url": model.base_url,
        }
        pooled = settings.model_copy(update=changes)
        async with running(pooled, database_url, worker=True) as bottega:
            await define(bottega.client)
            run_id = await start(bottega.client)
            await bottega.watch(run_id)
            body = {"from": "last_step"}
            again = await bottega.client.post(f"/v1/runs/{run_id}/retry", json=body)
            assert again.status_code == 202
            assert (await bottega.watch(again.json()["id"]))[-1]["type"] == "run.completed"


async def test_a_pooler_before_another_database_is_refused(
    database_url: str, module_database_url: str, bouncer: Bouncer
) -> None:
    with pytest.raises(Exception, match="lead to different databases"):
        async with open_database(module_database_url, pooler=bouncer.url):
            pass


@pytest.mark.deep
async def test_runs_survive_the_death_of_a_worker_and_of_pgbouncer(
    database_url: str, bouncer: Bouncer, model: FakeModel
) -> None:
    urls = {"DATABASE_URL": bouncer.url, "BOTTEGA_LISTEN_URL": database_url}
    pooled = environment(database_url, model, **urls)
    gate = asyncio.Event()
    model.decide = lambda request: gated(gate, text("done"))
    async with (
        command("serve", "--no-worker", "--port", "0", **pooled) as api,
        command("worker", **pooled) as victim,
        command("worker", **pooled),
        client_of(api.port) as client,
        AsyncExitStack() as streams,
    ):
        await define(client)
        runs = [await start(client) for _ in range(20)]
        sockets = []
        for run_id in runs:
            address = f"ws://127.0.0.1:{api.port}/v1/runs/{run_id}/ws"
            sockets.append(await streams.enter_async_context(websockets.connect(address)))
        seen = [[from_json(await socket.recv())] for socket in sockets]
        await model.received(20)
        victim.kill()
        await bouncer.kill()
        gate.set()
        await bouncer.start()
        for frames, socket in zip(seen, sockets, strict=True):
            frames += [from_json(message) async for message in socket]
            stored = [frame for frame in frames if is_stored(frame)]
            assert [frame["seq"] for frame in stored] == list(range(1, len(stored) + 1))
            assert stored[-1]["type"] == "run.completed"
