"""Runs behind limits and circuit breakers of model servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.clock import monotonic
from bottega.llm import fallback, gates
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, http_error, response, text
from tests.flows.test_model_servers import log_of
from tests.flows.test_patience import ended
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import Running, running
from tests.waiting import until


class Gauge:
    """Counts the requests that a model answers at the same time.

    Attributes:
        gate: opens for the answers.
        now, most: requests at this moment, and the most at one moment.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.now = self.most = 0

    def reply(self, request: dict[str, Any]) -> Reply:
        def make(body: dict[str, Any]) -> ASGIApp:
            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                self.now += 1
                self.most = max(self.most, self.now)
                await self.gate.wait()
                self.now -= 1
                await response(text("done"), body)(scope, receive, send)

            return app

        return make


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "egress_allow": ["127.0.0.1"],
            "takeover_s": 1.0,
            "drain_grace_s": 0.0,
        }
    )


@pytest.fixture
async def bottega(configured: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(configured, database_url, worker=True) as server:
        yield server


async def prepare(bottega: Running, model: FakeModel, **limits: Any) -> None:
    """Store a provider with these limits, and an agent that calls it."""
    body = {"name": "vendor", "dialect": "chat", "base_url": model.base_url} | limits
    assert (await bottega.client.post("/v1/providers", json=body)).status_code == 201
    agent = {"name": "a", "system_message": "x", "model": "vendor/m"}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201


async def start(bottega: Running, count: int) -> list[str]:
    run = {"agent": "a", "input": "x"}
    runs = [bottega.client.post("/v1/runs", json=run) for _ in range(count)]
    return [answer.json()["id"] for answer in await asyncio.gather(*runs)]


async def test_two_workers_keep_to_a_provider_s_limit(
    bottega: Running, configured: Settings, database_url: str, model: FakeModel
) -> None:
    gauge = Gauge()
    model.decide = gauge.reply
    await prepare(bottega, model, max_concurrent=2)
    async with running(configured, database_url, worker=True):
        runs = await start(bottega, 8)
        await until(lambda: gauge.now == 2)

        async def calls() -> Any:
            return (await bottega.client.get("/v1/providers/vendor")).json()["calls"]

        await until(calls, lambda seen: (seen["under_way"], seen["waiting"]) == (2, 6))
        gauge.gate.set()
        for run_id in runs:
            assert (await ended(bottega, run_id))["status"] == "completed"
    assert (gauge.most, len(model.requests)) == (2, 8)


@pytest.mark.deep
async def test_eight_worker_processes_keep_to_a_provider_s_limit(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    gauge = Gauge()
    model.decide = gauge.reply
    with_model = {**environment(database_url, model), "BOTTEGA_EGRESS_ALLOW": "127.0.0.1"}
    async with AsyncExitStack() as processes:
        bottega = await processes.enter_async_context(running(configured, database_url))
        await prepare(bottega, model, max_concurrent=4)
        for _ in range(8):
            await processes.enter_async_context(command("worker", **with_model))
        runs = await start(bottega, 80)
        await until(lambda: gauge.now == 4)
        workers = "SELECT count(DISTINCT worker_id) FROM run_heads"
        await until(lambda: bottega.owner.fetchval(workers), lambda seen: seen == 8)
        gauge.gate.set()
        for run_id in runs:
            assert (await ended(bottega, run_id))["status"] == "completed"
    assert (gauge.most, len(model.requests)) == (4, 80)


@pytest.mark.deep
async def test_a_run_that_only_waits_for_a_limit_leaves_its_place(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.engine.waiting.SUSPENDED_AFTER_S", 0.1)
    monkeypatch.setattr(gates, "_LIMITED_S", 0.5)
    gauge = Gauge()
    model.decide = gauge.reply
    await prepare(bottega, model, max_concurrent=1)
    runs = await start(bottega, 2)
    waiting = "SELECT id FROM runs WHERE status = 'queued' AND attempt > 0"
    suspended = await until(lambda: bottega.owner.fetchval(waiting))
    gauge.gate.set()
    for run_id in runs:
        assert (await ended(bottega, run_id))["status"] == "completed"
    failed = await log_of(bottega, str(suspended), "llm.failed")
    assert {each["data"]["error"]["code"] for each in failed} == {"model_limited"}
    assert gauge.most == 1


async def test_a_model_over_its_limit_is_passed_over_at_once(
    bottega: Running, model: FakeModel
) -> None:
    gauge = Gauge()
    model.decide = lambda request: (
        gauge.reply(request) if request["model"] == "m" else text("from the next")
    )
    await prepare(bottega, model, max_concurrent=1)
    agent = {"name": "b", "system_message": "x", "model": ["vendor/m", "default/n"]}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    (first,) = await start(bottega, 1)
    await until(lambda: gauge.now == 1)
    other = await bottega.client.post("/v1/runs", json={"agent": "b", "input": "x"})
    assert (await ended(bottega, other.json()["id"]))["output"] == "from the next"
    gauge.gate.set()
    assert (await ended(bottega, first))["status"] == "completed"


@pytest.mark.deep
async def test_many_runs_do_not_hammer_a_dead_server(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, is_up = 30, False

    def decide(request: dict[str, Any]) -> Reply:
        return text("back") if is_up else http_error(503)

    model.decide = decide
    monkeypatch.setattr(gates, "delay_s", lambda *_: 0.3)
    monkeypatch.setattr(fallback, "next_delay_s", lambda *_: 0.5)
    await prepare(bottega, model)

    async def breaker() -> Any:
        return (await bottega.client.get("/v1/providers/vendor")).json()["breaker"]

    runs = await start(bottega, count)
    opened = await until(
        breaker, lambda seen: seen.get("m", {}).get("state") in ("open", "half_open")
    )
    asked = len(model.requests)
    began = monotonic()
    await until(lambda: len(model.requests) >= asked + 4)
    assert (await breaker())["m"]["open_since"] == opened["m"]["open_since"]
    # From then on one call at a time tries.
    assert len(model.requests) - asked <= 2 + (monotonic() - began) / 0.3
    assert asked <= count + 2 + 5
    is_up = True
    for run_id in runs:
        assert (await ended(bottega, run_id))["status"] == "completed"
    await until(breaker, lambda seen: seen == {})
    recent = (await bottega.client.get("/v1/providers/vendor")).json()["recent"]
    assert recent["calls"] == min(100, len(model.requests))  # calls that were held back are none
    failure = {"agent": "a", "model": "m", "code": "model_unavailable", "http_status": 503}
    failure["calls"] = recent["failed"]
    times = [recent["failures"][0].pop(name) for name in ("first_at", "last_at")]
    assert times == sorted(times)
    assert opened["m"]["open_since"] < times[1]
    assert (recent["failures"], recent["errors"]) == (
        [failure],
        {"model_unavailable": recent["failed"]},
    )
