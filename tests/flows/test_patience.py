"""Runs during an outage of the model's server."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import websockets
from pydantic_core import from_json

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, calls, free_port, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.tools import raw_server
from tests.waiting import until

BUSY = http_error(503, {"retry-after": "120"})
"""Long enough that a test waiting for the next attempt does not end too early."""
QUICK_S = 20.0
"""Far shorter than that, and long on a busy machine."""


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url, "drain_grace_s": 0.0})


@pytest.fixture
async def patient(configured: Settings, database_url: str) -> AsyncIterator[Running]:
    """A server and worker with default patience."""
    async with running(configured, database_url, worker=True) as server:
        yield server


async def start(bottega: Running, body: dict[str, Any] | None = None, **agent: Any) -> str:
    """Start a run of a new agent; return its id."""
    name = f"agent-{len(agent)}"
    definition = {"name": name, "system_message": "Answer.", **agent}
    assert (await bottega.client.post("/v1/agents", json=definition)).status_code == 201
    run = {"agent": name, "input": "x", **(body or {})}
    answer = await bottega.client.post("/v1/runs", json=run)
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def events(bottega: Running, run_id: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of the run as they arrive."""
    url = f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws"
    async with websockets.connect(url) as socket:
        async for message in socket:
            yield from_json(message)


async def until_failed(bottega: Running, run_id: str, tries: int = 1) -> dict[str, Any]:
    """Wait until so many attempts of the run's model call have failed; return the last."""
    async with aclosing(events(bottega, run_id)) as stream:
        async for event in stream:
            if event["type"] == "llm.failed" and event["data"]["try"] == tries:
                return event
    raise AssertionError("the run is over")


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    async with asyncio.timeout(seconds):
        yield


async def ended(bottega: Running, run_id: str) -> dict[str, Any]:
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


@pytest.mark.deep
async def test_a_run_waits_for_a_model_server_that_is_started_later(
    settings: Settings, database_url: str
) -> None:
    model = FakeModel(lambda request: text("here I am"), port=free_port())
    away = settings.model_copy(update={"openai_base_url": f"http://127.0.0.1:{model.port}/v1"})
    async with running(away, database_url, worker=True) as bottega:
        run_id = await start(bottega)
        failed = await until_failed(bottega, run_id, tries=3)
        assert failed["data"]["error"]["code"] == "model_unavailable"
        assert 1000 <= failed["data"]["retry_in_ms"] <= 2000
        async with model:
            run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "here I am")


async def test_an_agent_can_have_its_own_patience(patient: Running, model: FakeModel) -> None:
    model.decide = lambda request: http_error(500)
    run = await ended(patient, await start(patient, model_patience_s=0.1))
    assert (run["status"], run["error"]["code"]) == ("failed", "model_unavailable")
    assert "model_patience_s (0.1 s)" in run["error"]["message"]
    assert len(model.requests) == 2

    shown = (await patient.client.get("/v1/agents/agent-1")).json()
    assert shown["model_patience_s"] == 0.1
    for bad in (-1, 604_801, "long"):
        body = {"name": "bad", "system_message": "x", "model_patience_s": bad}
        refused = await patient.client.post("/v1/agents", json=body)
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["pointer"] == "/model_patience_s"


async def test_the_run_s_deadline_ends_the_wait(patient: Running, model: FakeModel) -> None:
    model.decide = lambda request: BUSY
    async with within(QUICK_S):
        run = await ended(patient, await start(patient, {"timeout_s": 0.5}))
    assert (run["status"], run["error"]["code"]) == ("timeout", "timeout")


async def test_a_waiting_run_holds_no_connection_and_can_be_cancelled(
    patient: Running, model: FakeModel
) -> None:
    model.decide = lambda request: BUSY
    run_id = await start(patient)
    await until_failed(patient, run_id)
    async with within(QUICK_S):
        pool = patient.service.database.pool
        await until(lambda: pool.get_idle_size() >= pool.get_size())
        await patient.client.post(f"/v1/runs/{run_id}/cancel")
        run = await ended(patient, run_id)
    assert run["status"] == "cancelled"


async def test_a_waiting_task_keeps_its_own_deadline(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    impatient = configured.model_copy(update={"subagent_max_timeout": 0.5})
    script = {"root": [swarm.dispatches("child"), swarm.awaits(), text("I go on.")]}
    # Without a time to wait, so that the next try comes within the child's own patience.
    model.decide = swarm.plays({**script, "child": [lambda request: http_error(503)]})
    async with running(impatient, database_url, worker=True) as bottega, within(QUICK_S):
        await swarm.coordinator(bottega.client)
        run_id = await swarm.start(bottega.client)
        assert (await ended(bottega, run_id))["output"] == "I go on."
        (task,) = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert task["status"] == "timeout"


@pytest.mark.parametrize("late", [False, True], ids=["before it is to stop", "after that"])
async def test_a_stopping_worker_returns_a_waiting_run_within_its_grace(
    configured: Settings, database_url: str, model: FakeModel, late: bool
) -> None:
    gate = asyncio.Event()
    model.script(gated(gate, BUSY))
    slow = configured.model_copy(update={"drain_grace_s": 120.0})
    async with running(configured, database_url) as api:
        run_id = await start(api)
        async with within(QUICK_S), running(slow, database_url, worker=True) as worker:
            if late:
                await model.received()
                asyncio.get_running_loop().call_later(0.5, gate.set)
                worker.service.stop_working.set()
            else:
                gate.set()
                await until_failed(worker, run_id)
        run = (await api.client.get(f"/v1/runs/{run_id}")).json()
        assert (run["status"], run["ended_at"]) == ("queued", None)
        model.decide = lambda request: text("here I am")
        async with running(configured, database_url, worker=True):
            run = await ended(api, run_id)
    assert run["output"] == "here I am"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "drain"]


async def test_a_stopping_worker_lets_a_running_call_finish(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(http_error(500, {"retry-after": "0"}), gated(gate, text("just in time")))
    slow = configured.model_copy(update={"drain_grace_s": 120.0})
    async with running(configured, database_url) as api:
        run_id = await start(api)
        async with within(QUICK_S), running(slow, database_url, worker=True) as worker:
            await model.received(2)
            worker.service.stop_working.set()
            asyncio.get_running_loop().call_later(0.5, gate.set)
        run = await ended(api, run_id)
    assert (run["output"], len(run["attempts"])) == ("just in time", 1)


async def test_a_stopping_worker_lets_a_tool_finish_beside_a_waiting_call(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    gate, called = asyncio.Event(), asyncio.Event()

    async def send(writer: asyncio.StreamWriter) -> None:
        called.set()
        await gate.wait()
        writer.write(raw_server.answer("sent"))

    slow = configured.model_copy(update={"drain_grace_s": 120.0, "egress_allow": ["127.0.0.1"]})
    replies: dict[str, Any] = {"waits": BUSY, "acts": calls(("mail", {}))}
    model.decide = lambda request: replies[named(request)]
    async with raw_server.RawServer(reply=send) as web, running(configured, database_url) as api:
        mail = {"type": "http", "name": "mail", "description": "x", "method": "POST"}
        await create(api, "waits")
        acts = {"name": "acts", "system_message": "You are acts."}
        acting = acts | {"tools": [mail | {"url": web.url()}]}
        assert (await api.client.post("/v1/agents", json=acting)).status_code == 201
        graph = {"name": "g", "nodes": ["waits", "acts"], "edges": []}
        await api.client.post("/v1/graphs", json=graph)
        body = {"mode": "dag", "graph": "g", "input": "x"}
        run_id = (await api.client.post("/v1/runs", json=body)).json()["id"]
        async with within(QUICK_S), running(slow, database_url, worker=True) as worker:
            await called.wait()
            await until_failed(worker, run_id)
            worker.service.stop_working.set()
            asyncio.get_running_loop().call_later(0.5, gate.set)
        replies = {"waits": text("here I am"), "acts": text("done")}
        async with running(slow, database_url, worker=True):
            run = await ended(api, run_id)
    assert run["output"] == {"waits": "here I am", "acts": "done"}
    assert len(web.requests) == 1
    (asked,) = [r["messages"] for r in model.requests if r["messages"][-1]["role"] == "tool"]
    assert "sent" in asked[-1]["content"]


@pytest.mark.deep
async def test_a_run_does_not_wait_for_the_feature_model(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    decide: Callable[[dict[str, Any]], Any] = lambda request: (  # noqa: E731
        http_error(503) if request["model"] == "thinker" else text("Built.")
    )
    model.decide = decide
    thinking = configured.model_copy(update={"memory_model": "thinker"})
    async with within(QUICK_S), running(thinking, database_url, worker=True) as bottega:
        run = await ended(bottega, await start(bottega))
    assert run["output"] == "Built."
