"""Small faults at known points; ``python -m benchmarks.chaos`` has big ones at random points."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from sqlalchemy import text
from websockets.exceptions import InvalidStatus

from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.stage import Server
from benchmarks.chaos.watch import Watcher
from bottega.db import migrate
from bottega.db.failures import is_transient
from bottega.db.pool import AsyncConnection, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import UnavailableError
from tests.claims import end_leases
from tests.fake_model import FakeModel, Reply, gated
from tests.flows.test_processes import environment, gate_call
from tests.processes import Command, command
from tests.service import Running, client_of, watch
from tests.team import CALLS, asked_of, decide_in_parallel, define, start
from tests.waiting import until

NO_GRAPH = {"graph": None}
"""Its edges would put the calls in order."""
PATIENT = {"BOTTEGA_TAKEOVER_S": "60"}
"""Long enough that no lease expires in a test."""


@asynccontextmanager
async def before(database_url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Yield a proxy before the database, and the URL that goes through it."""
    address = urlsplit(database_url)
    path = f"{parse_qs(address.query)['host'][0]}/.s.PGSQL.5432"
    async with Proxy(lambda: asyncio.open_unix_connection(path)) as proxy:
        yield proxy, f"postgresql://postgres@127.0.0.1:{proxy.port}{address.path}"


def gate_specialists(model: FakeModel, *names: str) -> asyncio.Event:
    """Hold back the answers to these agents until the event is set."""
    gate, decide = asyncio.Event(), model.decide

    def gated_decide(request: dict[str, Any]) -> Reply:
        reply = decide(request)
        return gated(gate, reply) if asked_of(request) in names else reply

    model.decide = gated_decide
    return gate


async def ask(database_url: str, query: str, *arguments: object) -> list[Any]:
    connection = await asyncpg.connect(database_url)
    try:
        return list(await connection.fetch(query, *arguments))
    finally:
        await connection.close()


async def stored(database_url: str, event_type: str, count: int = 1) -> None:
    """Wait until so many events of a type are committed."""
    connection = await asyncpg.connect(database_url)
    query = "SELECT count(*) FROM run_events WHERE type = $1"
    await until(lambda: connection.fetchval(query, event_type), lambda seen: seen >= count)
    await connection.close()


async def kill(worker: Command) -> None:
    worker.kill()
    await worker.process.wait()


def assert_whole(frames: list[dict[str, Any]]) -> None:
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
    assert frames[-1]["type"] == "run.completed"


async def test_of_parallel_calls_only_those_without_an_answer_are_made_again(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    model.decide = decide_in_parallel
    gate = gate_specialists(model, "designer", "implementer")
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        async with command("worker", **with_model) as victim:
            run_id = await start(client, **NO_GRAPH)
            await model.received(4)
            await stored(database_url, "llm.completed", 2)  # the coordinator's, the analyst's
            await kill(victim)
        gate.set()
        async with command("worker", **with_model):
            assert_whole(await watch(api.port, run_id))
    asked = Counter(map(asked_of, model.requests))
    assert asked == {"coordinator": 2, "requirements": 1, "designer": 2, "implementer": 2}


async def test_a_run_goes_on_when_its_database_is_back(folder: Path, model: FakeModel) -> None:
    server = await asyncio.to_thread(Server, folder)
    await asyncio.to_thread(migrate.upgrade, server.url)
    with_model = environment(server.url, model, **PATIENT)
    gate = asyncio.Event()
    gate_call(model, 4, gate)
    try:
        async with (
            command("serve", "--no-worker", "--port", "0", **with_model) as api,
            command("worker", **with_model) as worker,
            client_of(api.port) as client,
        ):
            await define(client)
            run_id = await start(client)
            watching = asyncio.ensure_future(watch(api.port, run_id))
            await model.received(4)
            await asyncio.to_thread(server.crash)
            refused = await client.get(f"/v1/runs/{run_id}")
            gate.set()
            await worker.says("stamina.retry_scheduled")  # the answer cannot be stored
            await asyncio.to_thread(server.start)
            assert_whole(await watching)
            run = (await client.get(f"/v1/runs/{run_id}")).json()
    finally:
        await asyncio.to_thread(server.close)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start"]
    assert len(model.requests) == CALLS


_SWEPT = "UPDATE last_sweep SET at = now() - interval '0.4 s', since = now() - $1 * interval '1 s'"


async def test_a_lease_survives_an_outage_of_the_database(
    database_url: str, bottega: Running, model: FakeModel
) -> None:
    """Check it after an outage longer than the lease: the worker is not considered dead."""
    await define(bottega.client)
    gate_call(model, 1, asyncio.Event())
    await start(bottega.client)
    await model.received(1)
    connection = await asyncpg.connect(database_url)
    async with connection.transaction():
        await end_leases(connection)
        for since, found in ((0.5, 0), (2.0, 1)):
            await connection.execute(_SWEPT, since)
            assert await connection.fetchval("SELECT sweep(1.0)") == found
    await connection.close()


async def test_runs_that_crash_together_are_resumed_separately(
    database_url: str, bottega: Running, model: FakeModel
) -> None:
    """Check it because one of them may crash its workers; the others must not suffer."""
    await define(bottega.client)
    gate_specialists(model, "coordinator")
    for _ in range(8):
        await start(bottega.client)
    await model.received(8)
    connection = await asyncpg.connect(database_url)
    async with connection.transaction():
        await end_leases(connection)
        died = """UPDATE runs SET attempts = attempts || '[{"number": 2, "cause": "crash"}]'"""
        await connection.execute(died)
        await connection.execute(_SWEPT, 2.0)
        assert await connection.fetchval("SELECT sweep(1.0)") == 8
        later = await connection.fetch("SELECT until FROM run_waits")
    await connection.close()
    assert len(set(later)) == len(later) == 8


_END_SESSIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'bottega'
"""


async def watched(port: int | None, run_id: str) -> list[dict[str, Any]]:
    """Return all events of a run, once its server has a connection again."""

    async def look() -> list[dict[str, Any]]:
        try:
            return await watch(port, run_id)
        except InvalidStatus as refused:
            if refused.response.status_code != 503:
                raise
            return []

    return await until(look)


async def test_a_session_that_the_server_ended_fails_no_run(
    database_url: str, model: FakeModel
) -> None:
    """Check it when the server's last message has arrived but the connection's end has not."""
    gate = asyncio.Event()
    gate_call(model, 2, gate)
    with_model = environment(database_url, model, **PATIENT)
    async with (
        before(database_url) as (proxy, through),
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        command("worker", **{**with_model, "DATABASE_URL": through}) as worker,
        client_of(api.port) as client,
    ):
        await define(client)
        run_id = await start(client)
        await model.received(2)
        proxy.closing.clear()
        await ask(database_url, _END_SESSIONS)
        watching = asyncio.ensure_future(watched(api.port, run_id))
        retried = asyncio.ensure_future(worker.says("stamina.retry_scheduled"))
        gate.set()
        await asyncio.wait([watching, retried], return_when=asyncio.FIRST_COMPLETED)
        proxy.closing.set()
        assert_whole(await watching)
        retried.cancel()
    assert len(model.requests) == CALLS


async def test_a_session_that_the_server_ended_is_no_internal_error(
    database_url: str, model: FakeModel
) -> None:
    async with (
        before(database_url) as (proxy, through),
        command("serve", "--no-worker", "--port", "0", **environment(through, model)) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        run_id = await start(client)
        path = f"/v1/runs/{run_id}/events"
        assert (await client.get(path)).status_code == 200
        proxy.closing.clear()
        await ask(database_url, _END_SESSIONS)
        answer = await client.get(path)
        proxy.closing.set()
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        await until(lambda: client.get(path), lambda seen: seen.status_code == 200)


async def test_every_route_recognises_a_lost_connection(database_url: str) -> None:
    async with before(database_url) as (proxy, through), open_database(through) as database:
        async with database.pool.acquire() as one, database.pool.acquire() as other:
            connection = AsyncConnection(one)
            await connection.scalar(text("SELECT 1"))
            await other.fetchval("SELECT 1")
            proxy.cut()
            for use in (connection.scalar(text("SELECT 2")), other.fetchval("SELECT 2")):
                with pytest.raises(Exception) as caught:  # noqa: PT011 (any that is transient)
                    await use
                assert is_transient(caught.value)
        with pytest.raises(asyncpg.DivisionByZeroError) as wrong:
            async with database.begin(DEFAULT_TENANT) as tx:
                await tx.scalar(text("SELECT 1 / 0"))
        assert not is_transient(wrong.value)
        await proxy.close()
        with pytest.raises(UnavailableError) as away:
            await database.connect()
        assert is_transient(away.value)


async def test_a_zombie_writes_nothing_and_cannot_lose_its_run(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    zombie_s, owner_s = asyncio.Event(), asyncio.Event()
    gate_call(model, 1, zombie_s)
    gate_call(model, 2, owner_s)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model) as zombie,
    ):
        await define(client)
        run_id = await start(client)
        await model.received(1)
        zombie.process.send_signal(signal.SIGSTOP)
        async with command("worker", **with_model) as owner:
            await model.received(2)  # it took over the run
            zombie.process.send_signal(signal.SIGCONT)
            zombie_s.set()
            await zombie.says("run.fenced")
            await kill(owner)
        owner_s.set()
        # the sweep found it, and the former zombie took it
        assert_whole(await watch(api.port, run_id))
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "crash", "crash"]
    writers = await ask(database_url, "SELECT attempt FROM run_events ORDER BY seq")
    assert writers == sorted(writers)
    assert len(model.requests) == CALLS + 2


async def test_cancelling_a_run_cuts_off_all_its_parallel_calls(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    model.decide = decide_in_parallel
    gate_specialists(model, "requirements", "designer", "implementer")
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        command("worker", **with_model),
        client_of(api.port) as client,
    ):
        await define(client)
        run_id = await start(client, **NO_GRAPH)
        await model.received(4)
        assert (await client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
        frames = await watch(api.port, run_id)
        await model.disconnected(3)
    assert frames[-1]["type"] == "run.cancelled"
    assert len(model.requests) == 4


async def test_a_draining_worker_finishes_its_run(database_url: str, model: FakeModel) -> None:
    with_model = environment(database_url, model, BOTTEGA_DRAIN_GRACE_S="60")
    gate = asyncio.Event()
    gate_call(model, 3, gate)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model) as leaving,
    ):
        await define(client)
        drained = await start(client)
        await model.received(3)
        leaving.process.send_signal(signal.SIGTERM)
        async with command("worker", **with_model):
            assert_whole(await watch(api.port, await start(client)))
            gate.set()
            assert_whole(await watch(api.port, drained))
            assert await leaving.process.wait() == 0
        run = (await client.get(f"/v1/runs/{drained}")).json()
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start"]
    assert len(model.requests) == 2 * CALLS


async def test_crashes_are_counted_over_all_workers(database_url: str, model: FakeModel) -> None:
    with_model = environment(
        database_url, model, BOTTEGA_TAKEOVER_S="1", **{"bottega.container.MAX_CRASHES": "2"}
    )
    gate_specialists(model, "requirements")
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        run_id = await start(client)
        for requests in (2, 3):
            async with command("worker", **with_model) as victim:
                await model.received(requests)
                await kill(victim)
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    assert frames[-1]["type"] == "run.failed"
    assert run["error"]["code"] == "crashed"
    assert "2 workers died" in run["error"]["message"]
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "crash", "crash"]
    assert Counter(map(asked_of, model.requests)) == {"coordinator": 1, "requirements": 2}


@pytest.mark.parametrize("over", ["WebSocket", "SSE"])
async def test_a_subscriber_whose_connection_is_cut_misses_nothing(
    bottega: Running, model: FakeModel, over: str
) -> None:
    gate = asyncio.Event()
    gate_call(model, 4, gate)
    await define(bottega.client)
    dial = lambda: asyncio.open_connection("127.0.0.1", bottega.port)  # noqa: E731
    async with Proxy(dial) as front:
        run_id = await start(bottega.client)
        watcher = Watcher(run_id, over)
        watching = asyncio.ensure_future(watcher.watch(lambda: front.port))
        await model.received(4)
        await until(lambda: len(watcher.seen) >= 10)
        front.cut()
        gate.set()
        await watching
    last = await bottega.owner.fetchval("SELECT max(seq) FROM run_events")
    assert (watcher.whole, watcher.seen[-1], watcher.resumed) == (True, last, 1)
