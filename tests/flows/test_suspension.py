"""Runs that wait long for a model: suspended without a worker, and claimed again."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from bottega.engine import waiting
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_patience import ended, start
from tests.flows.test_waiting import pending, resolve
from tests.service import Running, running, watch
from tests.waiting import until

BUSY = http_error(503, {"retry-after": "0.5"})


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """A server that suspends runs at once, with one run at a time of each tenant."""
    monkeypatch.setattr(waiting, "SUSPENDED_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "AWAITED_HERE_S", 0.1)
    configured = settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "concurrent_runs": 1,
            "takeover_s": 1.0,
            "drain_grace_s": 0.0,
        }
    )
    async with running(configured, database_url, worker=True) as server:
        yield server


async def row(bottega: Running, run_id: str) -> Any:
    query = "SELECT status, attempt, attempts FROM runs WHERE id = $1"
    return await bottega.owner.fetchrow(query, UUID(run_id))


async def until_suspended(bottega: Running, run_id: str) -> None:
    async def is_suspended() -> bool:
        found = await row(bottega, run_id)
        return bool(found["status"] == "waiting")

    await until(is_suspended)


async def test_a_run_that_waits_long_leaves_its_place_and_is_claimed_again(
    bottega: Running, model: FakeModel
) -> None:
    tools = [{"type": "builtin", "name": "calculator"}]
    model.script(calls(("calculator", {"expression": "1+1"})))
    model.decide = lambda request: (
        text("other") if request["messages"][-1]["content"] == "y" else BUSY
    )
    run_id = await start(bottega, tools=tools)
    await until_suspended(bottega, run_id)
    other = await bottega.client.post("/v1/runs", json={"agent": "agent-1", "input": "y"})
    assert (await ended(bottega, other.json()["id"]))["output"] == "other"
    model.decide = lambda request: text("at last")
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "at last")
    causes = [attempt["cause"] for attempt in run["attempts"]]
    assert causes[0] == "start"
    assert set(causes[1:]) == {"model"}
    events = await watch(bottega.port, run_id)
    told = {
        (event["type"], event["data"]["reason"])
        for event in events
        if event["type"] in ("run.waiting", "run.resumed")
    }
    assert told == {("run.waiting", "model"), ("run.resumed", "model")}
    tried = [
        event["data"]["try"]
        for event in await watch(bottega.port, run_id)
        if event["type"] == "llm.failed"
    ]
    assert tried == list(range(1, len(tried) + 1))


NEVER = {"feature": "output", "op": "eq", "value": "done"}
IN_GRAPH = {"type": "graph", "name": "team", "graph": "team"}
FOR_EACH = {"from": "run", "pointer": "/metadata/list"}
KINDS: dict[str, dict[str, Any]] = {
    "agent": {"agent": "clerk"},
    "graph": IN_GRAPH,
    "loop": {**IN_GRAPH, "loop": {"until": NEVER, "max": 1, "on_max": "continue"}},
    "elements": {**IN_GRAPH, "for_each": FOR_EACH},
    "child runs": {**IN_GRAPH, "for_each": {**FOR_EACH, "spread_above": 0}},
}


async def start_with_pauses(
    bottega: Running, backoff_s: float, kind: str = "agent", **run: Any
) -> str:
    """Start a run of a graph whose node gives an answer that has to be better."""
    await swarm.agent(bottega.client, "clerk")
    checks = [{"type": "contains", "value": "VAT"}]
    retry = {"max": 1, "backoff_s": backoff_s}
    node = {**KINDS[kind], "success_check": checks, "retry": retry}
    team = {"name": "team", "nodes": ["clerk"], "edges": []}
    graph = {"name": "bills", "nodes": [node], "edges": []}
    for each in (team, graph):
        stored = await bottega.client.post("/v1/graphs", json=each)
        assert stored.status_code == 201, stored.text
    body = {"graph": "bills", "mode": "dag", "input": "x", **run}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@pytest.mark.deep
async def test_a_pause_between_tries_holds_no_place(bottega: Running, model: FakeModel) -> None:
    model.script(text("net"))
    model.decide = lambda request: text("with VAT")
    run_id = await start_with_pauses(bottega, 1.5)
    await until_suspended(bottega, run_id)
    shown = (await bottega.client.get("/v1/runs?waiting_for=time")).json()["items"]
    assert [each["id"] for each in shown] == [run_id]
    assert shown[0]["waiting"]["reason"] == "time"
    assert shown[0]["waiting"]["until"] > shown[0]["waiting"]["since"]
    for table in ("run_heads", "run_queue"):
        assert await bottega.owner.fetchval(f"SELECT count(*) FROM {table}") == 0
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "with VAT")
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "time"]
    log = await watch(bottega.port, run_id)
    told = {each["type"]: each["data"]["reason"] for each in log if "reason" in each["data"]}
    assert told.items() >= {("run.waiting", "time"), ("run.resumed", "time")}
    answered, again = (
        datetime.fromisoformat(next(each["at"] for each in events if each["type"] == kind))
        for kind, events in (("llm.completed", log), ("llm.started", log[::-1]))
    )
    assert (again - answered).total_seconds() >= 1.5
    assert len(model.requests) == 2


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["graph", "loop", "elements", "child runs"])
async def test_a_graph_in_a_node_has_one_pause_between_tries(
    bottega: Running, model: FakeModel, kind: str
) -> None:
    model.script(text("net"), BUSY)
    model.decide = lambda request: text("with VAT")
    run_id = await start_with_pauses(bottega, 1.5, kind, metadata={"list": ["a"]})
    run = await ended(bottega, run_id)
    assert run["status"] == "completed", run
    assert "with VAT" in run["output"]
    if kind == "child runs":
        found = await bottega.client.get(f"/v1/runs?parent_run_id={run_id}")
        (run,) = found.json()["items"]
    # The model is away in the second try: no pause comes before that again.
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "time", "model"]
    assert len(model.requests) == 3


async def test_a_pause_ends_at_the_deadline_and_with_a_cancellation(
    bottega: Running, model: FakeModel
) -> None:
    model.decide = lambda request: text("net")
    run_id = await start_with_pauses(bottega, 600.0, timeout_s=1.0)
    assert (await ended(bottega, run_id))["status"] == "timeout"
    body = {"graph": "bills", "mode": "dag", "input": "x"}
    other = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    await until_suspended(bottega, other)
    assert (await bottega.client.post(f"/v1/runs/{other}/cancel")).status_code == 202
    assert (await row(bottega, other))["status"] == "cancelled"


async def test_a_run_that_waits_for_its_client_says_so(bottega: Running, model: FakeModel) -> None:
    tool = {"type": "client", "name": "locate", "description": "Where.", "parameters": {}}
    model.script(calls(("locate", {})))
    run_id = await start(bottega, tools=[tool])
    await until_suspended(bottega, run_id)
    (shown,) = (await bottega.client.get("/v1/runs?waiting_for=client")).json()["items"]
    assert (shown["id"], shown["waiting"]["reason"]) == (run_id, "client")
    events = (await bottega.client.get(f"/v1/runs/{run_id}/events?limit=100")).json()["items"]
    assert events[-1]["type"] == "run.waiting"
    assert events[-1]["data"]["reason"] == "client"


@pytest.mark.deep
async def test_patience_goes_on_over_attempts(bottega: Running, model: FakeModel) -> None:
    model.decide = lambda request: BUSY
    run = await ended(bottega, await start(bottega, model_patience_s=3))
    assert (run["status"], run["error"]["code"]) == ("failed", "model_unavailable")
    assert len(run["attempts"]) > 1


@pytest.mark.deep
async def test_the_deadline_ends_a_suspended_run(bottega: Running, model: FakeModel) -> None:
    model.decide = lambda request: BUSY
    run = await ended(bottega, await start(bottega, {"timeout_s": 2.0}))
    assert (run["status"], run["error"]["code"]) == ("timeout", "timeout")


async def test_a_suspended_run_can_be_cancelled(bottega: Running, model: FakeModel) -> None:
    model.decide = lambda request: http_error(503, {"retry-after": "120"})
    run_id = await start(bottega)
    await until_suspended(bottega, run_id)
    (listed,) = (await bottega.client.get("/v1/runs?waiting_for=model")).json()["items"]
    assert (listed["id"], listed["waiting"]["reason"]) == (run_id, "model")
    assert listed["waiting"]["since"] < listed["waiting"]["until"]
    assert (await bottega.client.get("/v1/runs?waiting_for=person")).json()["items"] == []
    (waits,) = (await bottega.client.get("/v1/scheduler")).json()["waiting"]
    assert (waits["reason"], waits["agent"], waits["runs"]) == ("model", "agent-0", 1)
    assert waits["oldest_at"] == listed["waiting"]["since"]
    assert waits["error"]["code"] == "model_unavailable"
    assert "HTTP 503" in waits["error"]["message"]
    waiting = 'bottega_runs_waiting{reason="model"} 1.0'
    assert waiting in (await bottega.client.get("/metrics")).text
    assert (await bottega.client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
    assert (await ended(bottega, run_id))["status"] == "cancelled"
    left = await bottega.owner.fetchval("SELECT count(*) FROM run_queue")
    assert left == 0


async def test_suspended_runs_take_turns_for_one_place(bottega: Running, model: FakeModel) -> None:
    model.decide = lambda request: BUSY
    first = await start(bottega)
    more = [
        (await bottega.client.post("/v1/runs", json={"agent": "agent-0", "input": "x"})).json()
        for _ in range(3)
    ]
    await until_suspended(bottega, more[-1]["id"])
    model.decide = lambda request: text("done")
    async with asyncio.timeout(60):
        for run_id in (first, *(each["id"] for each in more)):
            assert (await ended(bottega, run_id))["status"] == "completed"


async def test_a_suspended_run_comes_before_newer_runs_that_wait(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = lambda request: (
        gated(gate, text("new")) if request["messages"][-1]["content"] == "y" else BUSY
    )
    suspended = await start(bottega)
    await until_suspended(bottega, suspended)
    new = [
        (await bottega.client.post("/v1/runs", json={"agent": "agent-0", "input": "y"})).json()
        for _ in range(3)
    ]
    queued = "SELECT is_due FROM run_queue WHERE run_id = $1"
    await until(lambda: bottega.owner.fetchval(queued, UUID(suspended)))
    model.decide = lambda request: gated(gate, text("at last"))
    gate.set()
    last = await ended(bottega, new[-1]["id"])
    run = await ended(bottega, suspended)
    assert run["status"] == "completed"
    assert run["attempts"][-1]["started_at"] < last["started_at"]


async def test_a_run_with_tasks_waits_for_a_model_and_then_for_people(
    bottega: Running, model: FakeModel
) -> None:
    """Let one task fail to reach its model, one ask for an approval, and one be over."""
    is_away = True

    def away(request: dict[str, Any]) -> Any:
        return BUSY if is_away else text("slow is done")

    asks = calls(("calculator", {"expression": "1+1"}))
    model.decide = swarm.plays(
        {
            "root": [
                swarm.dispatches("slow", "asks", "over", agent="clerk"),
                swarm.awaits(),
                swarm.reports,
            ],
            "slow": [away],
            "asks": [asks, text("asks is done")],
        }
    )
    tools = [{"type": "builtin", "name": "calculator", "approval": "always"}]
    await swarm.agent(bottega.client, "clerk", tools=tools)
    await swarm.coordinator(bottega.client, subagents={"names": ["clerk"]})
    run_id = await swarm.start(bottega.client)
    await until_suspended(bottega, run_id)
    is_away = False
    (interrupt,) = await pending(bottega)
    await resolve(bottega, interrupt, decision="approve")
    run = await ended(bottega, run_id)
    assert run["output"] == "\n".join(
        f"completed: {name} is done" for name in ("slow", "asks", "over")
    )
    causes = [attempt["cause"] for attempt in run["attempts"]]
    assert causes[-1] == "interrupt"
    assert set(causes[1:-1]) == {"model"}
    assert sum(swarm.prompt_of(request) == "over" for request in model.requests) == 1
