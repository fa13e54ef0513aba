"""Parameters of model calls: of agents, and of runs for their agents."""

from typing import Any

from tests.fake_model import FakeModel
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running

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


async def test_overrides_must_fit_the_dialect_of_the_agent_s_model(bottega: Running) -> None:
    await create(bottega, "one", provider="responses", params={"temperature": 1})
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


async def test_a_run_whose_choice_names_no_tool_of_the_agent_fails(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "one", tools=CLOCK)
    choice = {"one": {"params": {"tool_choice": {"name": "nothing"}}}}
    run = await ask(bottega, agent="one", overrides=choice)
    assert (run["status"], run["error"]["code"]) == ("failed", "unknown_tool")
    assert not model.requests
