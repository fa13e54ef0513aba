"""Many runs that wait, over several real processes, workers of which are killed on the way."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx2
import pytest

from benchmarks.chaos.stage import Server
from bottega.db import migrate
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_interrupts import ASK, decide, pending
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch
from tests.waiting import until

RUNS = 10


def ask_once(request: dict[str, Any]) -> Any:
    answered = request["messages"][-1]["role"] == "tool"
    return text("done") if answered else calls(("ask_user", {"question": "Which colour?"}))


async def count(client: httpx2.AsyncClient, status: str) -> int:
    page = (await client.get("/v1/runs", params={"status": status})).json()
    return len(page["items"])


@pytest.mark.deep
async def test_workers_die_while_runs_begin_and_end_to_wait(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model, **{"bottega.container.MAX_CRASHES": "10"})
    model.decide = ask_once
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as first,
        command("serve", "--no-worker", "--port", "0", **with_model) as second,
        client_of(first.port) as one,
        client_of(second.port) as other,
    ):
        agent = {"name": "asks", "system_message": "You ask.", "tools": [ASK]}
        assert (await one.post("/v1/agents", json=agent)).status_code == 201
        body = {"agent": "asks", "input": "x", "memory": "off"}
        async with command("worker", **with_model) as victim:
            runs = [(await one.post("/v1/runs", json=body)).json()["id"] for _ in range(RUNS)]
            await until(lambda: count(one, "waiting"))
            victim.kill()
            await victim.process.wait()
        async with command("worker", **with_model) as victim:
            await until(lambda: count(one, "waiting"), lambda found: found == RUNS)
            asked = [(await pending(one, run_id))[0] for run_id in runs]
            answers = [
                asyncio.ensure_future(decide(client, each, answer="red"))
                for each in asked
                for client in (one, other, one)
            ]
            await until(lambda: count(one, "completed"))
            victim.kill()
            await victim.process.wait()
            statuses = Counter(status for status, _ in await asyncio.gather(*answers))
        async with command("worker", **with_model):
            logs = [await watch(second.port, run_id) for run_id in runs]
    assert statuses == {200: RUNS, 409: 2 * RUNS}
    for log in logs:
        kinds = Counter(event["type"] for event in log)
        assert log[-1]["type"] == "run.completed"
        once = ("interrupt.created", "run.waiting", "interrupt.resolved", "tool.completed")
        assert [kinds[kind] for kind in once] == [1, 1, 1, 1]


@pytest.mark.deep
async def test_runs_wait_over_a_crash_of_the_database(folder: Path, model: FakeModel) -> None:
    """Crash PostgreSQL while runs wait, and once more while they are decided."""
    model.decide = ask_once
    server = Server(folder)
    await asyncio.to_thread(migrate.upgrade, server.url)
    with_model = environment(server.url, model, **{"bottega.container.MAX_CRASHES": "10"})
    try:
        async with (
            command("serve", "--no-worker", "--port", "0", **with_model) as api,
            command("worker", **with_model),
            client_of(api.port) as client,
        ):
            agent = {"name": "asks", "system_message": "You ask.", "tools": [ASK]}
            assert (await client.post("/v1/agents", json=agent)).status_code == 201
            body = {"agent": "asks", "input": "x", "memory": "off"}
            runs = [(await client.post("/v1/runs", json=body)).json()["id"] for _ in range(RUNS)]
            await until(lambda: count(client, "waiting"), lambda found: found == RUNS)
            await restarted(server)
            await until(lambda: answers(client))
            assert await count(client, "waiting") == RUNS
            asked = [(await pending(client, run_id))[0] for run_id in runs]
            first, *rest = asked
            assert await decide(client, first, answer="red") == (200, ANY)
            deciding = [asyncio.ensure_future(decided(client, each)) for each in rest]
            await until(lambda: count(client, "completed"))
            await restarted(server)
            await asyncio.gather(*deciding)
            logs = [await watch(api.port, run_id) for run_id in runs]
    finally:
        server.close()
    for log in logs:
        kinds = Counter(event["type"] for event in log)
        assert log[-1]["type"] == "run.completed"
        once = ("interrupt.created", "run.waiting", "interrupt.resolved", "tool.completed")
        assert [kinds[kind] for kind in once] == [1, 1, 1, 1]


async def restarted(server: Server) -> None:
    """Crash the database and start it again."""
    await asyncio.to_thread(server.crash)
    await asyncio.to_thread(server.start)


async def answers(client: httpx2.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def decided(client: httpx2.AsyncClient, interrupt: Any) -> None:
    """Decide until the server has it, whether or not it says so."""
    await until(lambda: decide(client, interrupt, answer="red"), lambda said: said[0] in (200, 409))
