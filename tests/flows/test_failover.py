"""A database that fails over under load, by Debian's Patroni and etcd."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import pytest
import websockets
from pydantic_core import from_json

from bottega.db import migrate
from tests.fake_model import FakeModel, Reply, gated, text
from tests.flows.test_processes import environment
from tests.patroni import PASSWORD, Cluster, Node, cluster
from tests.processes import Command, command
from tests.service import client_of
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

LONGEST_S, PLANNED_S = 25, 3
WITHIN_S = 90
FINAL = ("run.completed", "run.failed", "run.timeout", "run.cancelled")


class Load:
    """A client that starts runs one after the other, and remembers when each was accepted."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.accepted: dict[str, float] = {}
        self._client = client

    async def run(self) -> None:
        while True:
            body = {"agent": "clerk", "input": f"run {len(self.accepted)}"}
            with contextlib.suppress(httpx2.HTTPError):
                answer = await self._client.post("/v1/runs", json=body)
                if answer.status_code == 202:
                    self.accepted[answer.json()["id"]] = time.monotonic()
                else:
                    assert answer.status_code == 503, answer.text
                    assert int(answer.headers["retry-after"]) > 0

    def gap_s(self) -> float:
        """Return the longest time without an accepted run."""
        return max(after - before for before, after in pairwise(self.accepted.values()))


async def watched(port: int | None, run_id: str) -> list[dict[str, Any]]:
    """Watch a run to its end as a client does, which reconnects behind its last event."""
    events: list[dict[str, Any]] = []
    while not (events and events[-1]["type"] in FINAL):
        after = events[-1]["seq"] if events else 0
        url = f"ws://127.0.0.1:{port}/v1/runs/{run_id}/ws?after={after}"
        with contextlib.suppress(websockets.WebSocketException):
            async with websockets.connect(url) as socket:
                async for message in socket:
                    if (frame := from_json(message)).get("seq"):
                        events.append(frame)
                assert socket.close_code in (1000, 1001, 1011), socket.close_reason
    return events


@asynccontextmanager
async def serving(
    nodes: Cluster, model: FakeModel
) -> AsyncIterator[tuple[Command, httpx2.AsyncClient]]:
    """Run an API and a worker beside the cluster."""
    await asyncio.to_thread(migrate.upgrade, nodes.url)
    settings = environment(nodes.url, model, BOTTEGA_MEMORY="off", BOTTEGA_REQUESTS_PER_S="1000")
    async with (
        command("serve", "--no-worker", "--port", "0", **settings) as api,
        command("worker", **settings),
        client_of(api.port) as client,
    ):
        body = {"name": "clerk", "system_message": "You answer."}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
        yield api, client


async def end_of(client: httpx2.AsyncClient, run_id: str) -> str | None:
    """Return a run's final status; ``None``: it is not over, or the database is away."""
    found = await client.get(f"/v1/runs/{run_id}")
    if found.status_code == 503:
        return None
    assert found.status_code == 200, found.text
    status: str = found.json()["status"]
    return status if f"run.{status}" in FINAL else None


@pytest.mark.parametrize("planned", [False, True], ids=["killed", "planned"])
async def test_no_accepted_run_and_no_finished_call_is_lost(folder: Path, planned: bool) -> None:
    asked: defaultdict[str, list[float]] = defaultdict(list)

    def decide(request: dict[str, Any]) -> Reply:
        asked[request["messages"][-1]["content"]].append(time.time())
        return text("An answer.")

    async with (
        FakeModel(decide, token_delay_s=0.05) as model,
        cluster(folder, synchronous=True) as nodes,
        serving(nodes, model) as (api, client),
    ):
        load = Load(client)
        loading = asyncio.ensure_future(load.run())
        await until(lambda: len(load.accepted) >= 20, within=WITHIN_S)
        watching = asyncio.gather(*(watched(api.port, each) for each in [*load.accepted][-5:]))
        if planned:
            await nodes.switch_over()
        else:
            await (await nodes.primary()).kill()
        before = len(load.accepted)
        await until(lambda: len(load.accepted) >= before + 20, within=WITHIN_S)
        loading.cancel()
        print(f"longest time without an accepted run: {load.gap_s():.1f} s")
        for run_id in load.accepted:
            assert await until(partial(end_of, client, run_id), within=WITHIN_S) == "completed"
        for events in await watching:
            assert [each["seq"] for each in events] == list(range(1, len(events) + 1))
        for run_id in load.accepted:
            log = (await client.get(f"/v1/runs/{run_id}/events")).json()["items"]
            (done,) = [each for each in log if each["type"] == "llm.completed"]
            stored_at = datetime.fromisoformat(done["at"]).timestamp()
            wanted = (await client.get(f"/v1/runs/{run_id}")).json()["input"]
            assert [at for at in asked[wanted] if at > stored_at] == []
        assert load.gap_s() <= (PLANNED_S if planned else LONGEST_S)


async def test_an_asynchronous_failover_says_what_it_lost(folder: Path) -> None:
    gate = asyncio.Event()
    async with (
        FakeModel(lambda request: gated(gate, text("An answer."))) as model,
        cluster(folder, synchronous=False) as nodes,
        serving(nodes, model) as (api, client),
    ):
        primary, standby = await nodes.primary(), await nodes.standby()
        kept = await post(client, "kept")
        url = f"ws://127.0.0.1:{api.port}/v1/runs/{kept}/ws"
        async with websockets.connect(url) as socket:
            await read_until(socket, "llm.started")
            await until(lambda: has_all(primary, standby), within=WITHIN_S)
            standby.freeze_receiver()
            sent = await client.post(f"/v1/runs/{kept}/messages", json={"content": "more"})
            assert sent.status_code == 202, sent.text
            await read_until(socket, "message.received")
            lost = await post(client, "lost")
            await primary.kill()
            standby.end_receiver()
            async with asyncio.timeout(WITHIN_S):
                await socket.wait_closed()
            assert socket.close_code == 4011
        gone = await client.get(f"/v1/runs/{lost}")
        assert gone.status_code == 404
        assert "failed over" in gone.json()["detail"]
        gate.set()
        assert await until(partial(end_of, client, kept), within=WITHIN_S) == "completed"


async def post(client: httpx2.AsyncClient, text: str) -> str:
    answer = await client.post("/v1/runs", json={"agent": "clerk", "input": text})
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def read_until(socket: websockets.ClientConnection, kind: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while from_json(await socket.recv()).get("type") != kind:
            pass


async def has_all(primary: Node, standby: Node) -> bool:
    """Return true if the standby has received all that the primary wrote."""
    places = []
    for node, place in ((primary, "pg_current_wal_lsn"), (standby, "pg_last_wal_receive_lsn")):
        url = f"postgresql://bottega:{PASSWORD}@127.0.0.1:{node.port}/bottega"
        connection = await asyncpg.connect(url)
        places.append(await connection.fetchval(f"SELECT {place}()::text"))
        await connection.close()
    return len(set(places)) == 1
