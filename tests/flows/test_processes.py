"""Several real processes on one database, some of them killed."""

import asyncio
import signal
from collections import Counter

import asyncpg
import pytest

from bottega.events.types import FINAL_EVENT_TYPES
from tests.fake_model import FakeModel, gated
from tests.processes import cold_command, command
from tests.service import client_of, watch
from tests.team import CALLS, asked_of, define, start
from tests.terminals import terminal
from tests.waiting import until

TAKEOVER_S = "2"


def environment(database_url: str, model: FakeModel, **more: str) -> dict[str, str]:
    return {
        "DATABASE_URL": database_url,
        "OPENAI_API_KEY": "test-key",
        "OPENAI_BASE_URL": model.base_url,
        "BOTTEGA_TAKEOVER_S": TAKEOVER_S,
        **more,
    }


@pytest.mark.deep
async def test_two_apis_and_two_workers_share_the_work(database_url: str, model: FakeModel) -> None:
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as first,
        command("serve", "--no-worker", "--port", "0", **with_model) as second,
        cold_command("worker", **with_model),
        command("worker", **with_model),
        client_of(first.port) as client,
    ):
        await define(client)
        runs = [await start(client) for _ in range(10)]
        logs = await asyncio.gather(*(watch(second.port, run_id) for run_id in runs))
    for frames in logs:
        assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
        assert frames[-1]["type"] == "run.completed"
        kinds = Counter(frame["type"] for frame in frames)
        assert kinds["run.started"] == 1
        assert kinds["llm.completed"] == CALLS
    assert len(model.requests) == CALLS * len(runs)
    assert not await left_in_queue(database_url)


async def test_a_killed_worker_s_run_is_resumed_where_it_stopped(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    gate = asyncio.Event()
    gate_call(model, 4, gate)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        async with command("worker", **with_model) as victim:
            run_id = await start(client)
            await model.received(4)  # three answers are stored, the fourth is awaited
            victim.kill()
            await victim.process.wait()
        gate.set()
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
    assert run["status"] == "completed"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "crash"]
    kinds = Counter(frame["type"] for frame in frames)
    assert kinds["run.resumed"] == 1
    assert sum(kinds[kind] for kind in FINAL_EVENT_TYPES) == 1
    assert kinds["agent.started"] == 4
    assert kinds["memory.published"] == 3
    # Only the interrupted call is made again; no stored answer is asked for twice.
    assert len(model.requests) == CALLS + 1
    assert Counter(map(asked_of, model.requests))["designer"] == 2
    assert run["usage"]["model_calls"] == CALLS


@pytest.mark.deep
async def test_a_stopping_worker_hands_its_run_back(database_url: str, model: FakeModel) -> None:
    with_model = environment(database_url, model, BOTTEGA_DRAIN_GRACE_S="0")
    gate = asyncio.Event()
    gate_call(model, 2, gate)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        async with command("worker", **with_model) as leaving:
            run_id = await start(client)
            await model.received(2)
            leaving.process.send_signal(signal.SIGTERM)
            assert await leaving.process.wait() == 0
        await model.disconnected()
        assert (await client.get(f"/v1/runs/{run_id}")).json()["status"] == "queued"
        gate.set()
        async with command("worker", **with_model):
            await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    assert run["status"] == "completed"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "drain"]
    assert len(model.requests) == CALLS + 1


@pytest.mark.deep
async def test_a_worker_alone_starts_again_at_a_hangup_and_loses_no_run(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model, BOTTEGA_DRAIN_GRACE_S="0")
    gate = asyncio.Event()
    gate_call(model, 2, gate)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model) as worker,
    ):
        await define(client)
        run_id = await start(client)
        await model.received(2)

        def has_started_twice_more() -> bool:
            worker.process.send_signal(signal.SIGHUP)  # at any moment of its end and its start
            return sum("is ready" in line for line in worker.log) > 2

        await until(has_started_twice_more)
        gate.set()
        assert (await watch(api.port, run_id))[-1]["type"] == "run.completed"
        worker.process.send_signal(signal.SIGHUP)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.process.wait() == 0


def test_a_worker_ends_with_its_terminal(database_url: str) -> None:
    settings = {"DATABASE_URL": database_url, "OPENAI_API_KEY": "test-key"}
    with terminal("worker", **settings) as worker:
        worker.says("is ready")
        worker.close()
        assert worker.ends() in (0, 120)  # 120: there is no place for its last lines


def gate_call(model: FakeModel, number: int, gate: asyncio.Event) -> None:
    """Let the fake model hold back its answer to its ``number``-th request."""
    decide = model.decide

    def gated_decide(request: dict[str, object]) -> object:
        reply = decide(request)
        return gated(gate, reply) if len(model.requests) == number else reply

    model.decide = gated_decide  # type: ignore[assignment]


async def left_in_queue(database_url: str) -> int:
    connection = await asyncpg.connect(database_url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM run_queue"))
    finally:
        await connection.close()
