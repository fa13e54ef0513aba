"""Parameters of model calls: of agents, and of runs for their agents."""

import asyncio
from typing import Any

import pytest

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.team import define_graph


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


ALL = {
    "temperature": 0.5,
    "top_p": 1,
    "max_output_tokens": 100,
    "reasoning_effort": "low",
    "verbosity": "high",
    "seed": 7,
    "stop": ["END"],
    "parallel_tool_calls": False,
    "service_tier": "flex",
    "extra_body": {"top_k": 4},
}
CLOCK = [{"type": "builtin", "name": "current_time"}]


async def ask(bottega: Running, **body: Any) -> dict[str, Any]:
    answer = await bottega.client.post("/v1/runs?wait=30", json={"input": "go", **body})
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


def temperatures(model: FakeModel) -> list[tuple[str, Any]]:
    return [(named(request), request.get("temperature")) for request in model.requests]


async def test_parameters_are_versioned_and_shown(bottega: Running) -> None:
    await create(bottega, "one", params=ALL, tool_choice_scope="all")
    body = {"system_message": "You.", "params": {"seed": 8}}
    answer = await bottega.client.put("/v1/agents/one", json=body)
    assert (answer.json()["version"], answer.json()["params"]) == (2, {"seed": 8})
    first = (await bottega.client.get("/v1/agents/one/versions/1")).json()
    assert (first["params"], first["tool_choice_scope"]) == (ALL, "all")
    (listed,) = (await bottega.client.get("/v1/agents")).json()["items"]
    assert listed["params"] == {"seed": 8}


async def test_overrides_must_fit_the_dialects_of_the_agent_s_models(bottega: Running) -> None:
    server = {"name": "r", "dialect": "responses", "base_url": "https://203.0.114.1/v1"}
    assert (await bottega.client.post("/v1/providers", json=server)).status_code == 201
    await create(bottega, "one", model=["m", "r/m"], params={"temperature": 1})
    run = {"agent": "one", "input": "x", "overrides": {"one": {"params": {"stop": ["x"]}}}}
    answer = await bottega.client.post("/v1/runs", json=run)
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_param")
    assert answer.json()["errors"][0]["pointer"] == "/overrides/one/params/stop"


async def test_overrides_are_checked_kept_and_repeated(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "one")
    overrides: dict[str, Any] = {"other": {"params": {"seed": 1}}}
    answer = await bottega.client.post(
        "/v1/runs", json={"agent": "one", "input": "x", "overrides": overrides}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_agent")
    assert answer.json()["errors"][0]["pointer"] == "/overrides/other"

    overrides = {"one": {"params": {"temperature": None, "seed": 1}}}
    run = await ask(bottega, agent="one", overrides=overrides)
    assert (run["status"], run["overrides"]) == ("completed", overrides)
    second = await bottega.client.post(f"/v1/runs/{run['id']}/retry", json={"from": "start"})
    assert second.json()["overrides"] == overrides
    schedule = {"name": "s", "cron": "0 0 * * *", "run": {"agent": "one", "input": "x"}}
    schedule["run"] = {"agent": "one", "input": "x", "overrides": overrides}
    stored = await bottega.client.post("/v1/schedules", json=schedule)
    assert stored.json()["run"]["overrides"] == overrides


async def test_a_team_s_calls_have_their_agents_parameters(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "member", params={"temperature": 0.1, "seed": 3})
    await create(bottega, "lead", subagents={"names": ["member"]}, params={"temperature": 0.2})
    model.decide = lambda request: (
        calls(("member", {"query": "go"})) if len(model.requests) in (1, 4) else text("done")
    )
    await ask(bottega, agent="lead")
    changed = {"member": {"params": {"temperature": None, "seed": 4}}}
    await ask(bottega, agent="lead", overrides=changed)
    assert temperatures(model) == [
        *(("lead", 0.2), ("member", 0.1), ("lead", 0.2)),
        *(("lead", 0.2), ("member", None), ("lead", 0.2)),
    ]
    assert [r["seed"] for r in model.requests if "seed" in r] == [3, 4]


async def test_nodes_and_asynchronous_tasks_have_their_parameters(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    overrides = {name: {"params": {"temperature": at}} for name, at in (("a", 0.1), ("b", 0.2))}
    await ask(bottega, mode="dag", graph="g", overrides=overrides)
    assert temperatures(model) == [("a", 0.1), ("b", 0.2)]

    dispatch = calls(
        ("dispatch_subagent", {"agent": "worker", "prompt": "a"}),
        ("dispatch_subagent", {"prompt": "b"}),
    )
    model.requests.clear()
    model.decide = swarm.plays(
        {"root": [dispatch, swarm.awaits(), text("done")], "a": [text("x")], "b": [text("y")]}
    )
    await swarm.agent(bottega.client, "worker")
    await swarm.coordinator(
        bottega.client,
        subagents={"mode": "async", "names": ["worker"]},
        params={"temperature": 0.4, "tool_choice": "required"},
    )
    changed = {"worker": {"params": {"temperature": 0.3}}}
    run_id = await swarm.start(bottega.client, overrides=changed)
    assert (await bottega.watch(run_id))[-1]["type"] == "run.completed"
    of_prompt = {swarm.prompt_of(request): request for request in model.requests}
    assert [of_prompt[name]["temperature"] for name in ("a", "b")] == [0.3, 0.4]
    assert "tool_choice" not in of_prompt["b"]


async def test_the_choice_of_tools_holds_for_the_first_call_also_after_a_crash(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(calls(("current_time", {})), gated(gate, text("never read")))
    update = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    configured = settings.model_copy(update=update)
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "one", tools=CLOCK)
        choice = {"params": {"tool_choice": {"name": "current_time"}, "temperature": 0.5}}
        body = {"agent": "one", "input": "go", "overrides": {"one": choice}}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(2)
    gate.set()
    model.script(text("done"))
    async with running(configured, database_url, worker=True) as bottega:
        assert (await bottega.watch(run_id))[-1]["type"] == "run.completed"
    first, second, third = model.requests
    assert first["tool_choice"]["function"]["name"] == "current_time"
    assert "tool_choice" not in second
    assert third == second
    assert third["temperature"] == 0.5


async def test_a_choice_that_names_no_tool_of_the_agent_is_refused(bottega: Running) -> None:
    await create(bottega, "one", tools=CLOCK)
    choice = {"one": {"params": {"tool_choice": {"name": "nothing"}}}}
    body = {"agent": "one", "input": "go", "overrides": choice}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_tool")
    assert (await bottega.client.get("/v1/runs")).json()["items"] == []
