"""Runs outlive the loss of their database: a standby takes over, or a backup is restored."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr
from pydantic_core import from_json
from websockets import connect as connect_to

from bottega.db import migrate
from bottega.db.connect import connect
from bottega.db.failures import is_transient
from bottega.db.sessions import ConnectionTrust, SilenceTimeouts
from bottega.errors import UnavailableError
from bottega.settings import Settings
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_doctor import execute
from tests.flows.test_processes import environment
from tests.postgres import Server, servers
from tests.processes import command
from tests.service import client_of, is_stored, running, watch
from tests.team import define, start
from tests.waiting import deadline

RUNS = 10
KEY = "A" * 43 + "="


@pytest.fixture
def primary(folder: Path) -> Iterator[Server]:
    with servers(folder) as primary:
        primary.create()
        primary.start()
        migrate.upgrade(primary.url)
        yield primary


@pytest.fixture
def standby(primary: Server, folder: Path) -> Server:
    """A standby for which the primary's commits wait, so that none is lost with the primary."""
    standby = primary.standby(folder / "second")
    primary.stop()
    primary.settings["synchronous_standby_names"] = "standby"
    primary.start()
    standby.start()
    return standby


@pytest.mark.deep
@pytest.mark.parametrize("lose", [Server.kill, pytest.param(Server.freeze, marks=pytest.mark.deep)])
async def test_runs_and_their_streams_go_on_at_the_standby(
    settings: Settings,
    primary: Server,
    standby: Server,
    model: FakeModel,
    lose: Callable[[Server], None],
) -> None:
    both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    changes = {"database_url": SecretStr(both), "openai_base_url": model.base_url}
    gate = asyncio.Event()
    model.decide = lambda request: gated(gate, text("done"))
    async with (
        running(settings.model_copy(update=changes), both, worker=True) as bottega,
        AsyncExitStack() as streams,
    ):
        await define(bottega.client)
        runs = [await start(bottega.client) for _ in range(RUNS)]
        addresses = [f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws" for run_id in runs]
        sockets = [await streams.enter_async_context(connect_to(each)) for each in addresses]
        seen = [[from_json(await socket.recv())] for socket in sockets]
        await model.received(RUNS)
        lose(primary)
        standby.promote()
        gate.set()
        async with deadline(lambda: [frames[-1] for frames in seen]):
            for frames, socket in zip(seen, sockets, strict=True):
                frames += [from_json(message) async for message in socket]
        for frames in seen:
            stored = [frame for frame in frames if is_stored(frame)]
            assert [frame["seq"] for frame in stored] == list(range(1, len(stored) + 1))
            assert stored[-1]["type"] == "run.completed"
        assert len(model.requests) == RUNS
        last = await start(bottega.client)
        assert (await bottega.watch(last))[-1]["type"] == "run.completed"
        listed = (await bottega.client.get("/v1/runs")).json()["items"]
        assert {each["id"] for each in listed} == {*runs, last}


async def test_a_standby_alone_is_refused(primary: Server, standby: Server) -> None:
    with pytest.raises(UnavailableError, match="read-only standby, which takes no writes"):
        await connect(standby.url)
    reading = await connect(f"{standby.url}?target_session_attrs=any")
    assert await reading.fetchval("SELECT pg_is_in_recovery()")
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError) as refused:
        await reading.execute("INSERT INTO sessions DEFAULT VALUES")
    assert is_transient(refused.value)
    await reading.close()
    pooled = await connect(standby.url, pooled=True)  # as if a pooler still led to it
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError) as refused:
        await pooled.fetchval("SELECT 1")
    assert is_transient(refused.value)


async def test_the_server_that_accepted_the_last_connection_is_asked_first(
    primary: Server, standby: Server
) -> None:
    both = f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres"
    trust = ConnectionTrust(SilenceTimeouts())
    await (await connect(both, trust=trust)).close()
    standby.freeze()
    async with asyncio.timeout(2):  # its share of the time to connect is five seconds
        await (await connect(both, trust=trust)).close()


@pytest.mark.deep
async def test_a_restore_brings_back_what_an_accident_removed(
    primary: Server, folder: Path, model: FakeModel
) -> None:
    backups = {"BACKUPS": str(folder / "backups")}
    primary.drill("Archive the log", **backups)
    service = environment(primary.url, model, BOTTEGA_SECRETS_KEY=KEY)
    gate = asyncio.Event()
    async with (
        command("serve", "--port", "0", **service) as bottega,
        client_of(bottega.port) as client,
    ):
        await define(client)
        secret = {"value": "kept by nobody else", "hosts": ["models.example"]}
        assert (await client.put("/v1/secrets/TOKEN", json=secret)).status_code == 201
        primary.drill("Take a backup", **backups)
        (base,) = (folder / "backups").glob("base-*")
        ended = await start(client, session_id="s")
        before = await watch(bottega.port, ended)
        asked = len(model.requests)
        model.decide = lambda request: gated(gate, text("late"))
        under_way = await start(client, session_id="s")
        await model.received(asked + 1)
        when = await _now(primary)
        # The accident, and what happened since.
        gate.set()
        await watch(bottega.port, under_way)
        assert (await client.delete("/v1/sessions/s")).status_code == 200
        later = await start(client)
        await watch(bottega.port, later)
        asked = len(model.requests)
    primary.drill("Restore", WHEN=when, BASE=str(base), **backups)
    async with (
        command("serve", "--port", "0", **service) as bottega,
        client_of(bottega.port) as client,
    ):
        assert await watch(bottega.port, ended) == before
        assert (await watch(bottega.port, under_way))[-1]["type"] == "run.completed"
        assert len(model.requests) == asked + 1  # the call under way, again
        assert (await client.get(f"/v1/runs/{later}")).status_code == 404
        assert await _runs(client) == {ended, under_way}
        assert (await client.get("/v1/secrets/TOKEN")).json()["version"] == 1
        again = await start(client)
        assert (await watch(bottega.port, again))[-1]["type"] == "run.completed"
    # The next day's backup is restored with all that followed it; the first is too old.
    os.utime(base, (0, 0))
    primary.drill("Take a backup", **backups)
    (base,) = (folder / "backups").glob("base-*")
    await execute(primary.url, "CREATE TABLE after_the_backup ()")
    (folder / "first.before").rename(folder / "older")
    primary.drill("Restore", WHEN="", BASE=str(base), **backups)
    await execute(primary.url, "TABLE after_the_backup")


@pytest.mark.deep
def test_a_dump_loads_on_another_server_whole(folder: Path) -> None:
    (folder / "dumps").mkdir()
    (folder / "dumps").chmod(0o777)
    dumps = {"DUMPS": str(folder / "dumps"), "OWNER": "keeper"}
    with servers(folder) as first:
        first.create()
        first.start()
        url = first.url.removesuffix("/postgres") + "/bottega"
        owner = "CREATE ROLE keeper LOGIN CREATEROLE"
        asyncio.run(execute(first.url, owner, "CREATE DATABASE bottega OWNER keeper"))
        asyncio.run(execute(url, "CREATE EXTENSION vector SCHEMA public"))
        migrate.upgrade(url.replace("postgres@", "keeper@"))
        first.drill("Dump and load", **dumps)
        second = Server(folder / "second")
        second.create()
        second.start()
        second.drill("Load a dump", **dumps)
        loaded = second.url.removesuffix("/postgres") + "/bottega"
        assert asyncio.run(migrate.is_current(loaded.replace("postgres@", "keeper@")))


async def _now(primary: Server) -> str:
    connection = await asyncpg.connect(primary.url)
    try:
        return str(await connection.fetchval("SELECT clock_timestamp()"))
    finally:
        await connection.close()


async def _runs(client: httpx2.AsyncClient) -> set[str]:
    return {run["id"] for run in (await client.get("/v1/runs")).json()["items"]}
