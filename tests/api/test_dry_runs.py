"""Dry runs: what they show, that they store nothing and call nothing, and their limits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from pydantic_core import from_json

from bottega.api.routes.graphs import DryRuns
from bottega.dry_run.result import MOST_CHARACTERS
from bottega.dry_run.result import dry_run as made
from bottega.errors import LimitedError, UnavailableError
from bottega.tools.builtin import NOT_CALLED
from tests.api.test_bad_input import problem
from tests.rows import unchanged
from tests.service import Running
from tests.team import define, define_graph
from tests.tenants import holder

MINE, THEIRS = UUID(int=1), UUID(int=2)
SUM = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
PAY = {
    "type": "http",
    "name": "pay",
    "description": "Pays.",
    "method": "POST",
    "url": "https://bank.example/pay/{sum}",
    "parameters": SUM,
}


@pytest.fixture(scope="module")
async def team(shared: Running, shared_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """The client of a tenant with some teams, whose dry runs change no row."""
    administrator = await holder(shared_url, f"tenant-{uuid4().hex}")
    async with administrator.client(shared) as client:
        await define(client)
        await define_graph(client, "chain", ("first", "second"), ("second", "third"))
        payer = {
            "name": "payer",
            "description": "Pays.",
            "system_message": "You pay.",
            "tools": [PAY, {"type": "builtin", "name": "calculator"}],
            "tool_policy": [{"tool_name": "pay"}, {"tool_name": "calculator"}],
            "approval": "always",
        }
        made = await client.post("/v1/agents", json=payer)
        assert made.status_code == 201, made.text
        await client.post("/v1/graphs", json={"name": "payers", "nodes": ["payer"]})
        await client.post("/v1/graphs", json={"name": "ghosts", "nodes": ["ghost"]})
        desk = {"nodes": [{"agent": "first", "router": True}, "second", "third"]}
        desk["edges"] = [{"source": "first", "target": each} for each in ("third", "second")]
        await client.post("/v1/graphs", json={"name": "desk", "output": "third", **desk})
        inner = {"name": "sub", "type": "graph", "graph": "desk"}
        await client.post("/v1/graphs", json={"name": "desks", "nodes": [inner]})
        async with unchanged(shared_url, without=("api_keys",)):
            yield client


async def dry_run(client: httpx2.AsyncClient, graph: str, **asked: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/graphs/{graph}/dry-run", json={"input": "Build it.", **asked})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("graph", ["desk", "desks"])
async def test_a_router_takes_one_edge(team: httpx2.AsyncClient, graph: str) -> None:
    found = await dry_run(team, graph)
    assert [task["agent"] for task in found["tasks"]] == ["first", "third"]
    if graph == "desk":
        assert found["nodes"] == [
            {"name": "first", "status": "completed", "reason": None},
            {"name": "second", "status": "skipped", "reason": "first chose third"},
            {"name": "third", "status": "completed", "reason": None},
        ]


async def test_a_graph_shows_who_receives_what_from_whom(team: httpx2.AsyncClient) -> None:
    found = await dry_run(team, "chain")
    assert found["levels"] == [["first"], ["second"], ["third"]]
    received = {
        task["agent"]: [(each["source"], each["version"]) for each in task["received"]]
        for task in found["tasks"]
    }
    assert received == {"first": [], "second": [("first", 1)], "third": [("second", 1)]}
    first, second, third = found["tasks"]
    assert second["received"][0]["content"] == first["output"]
    assert first["output"] in second["messages"][1]["content"]  # as the model sees it
    assert second["messages"][0] == {
        "role": "system",
        "content": "You are second.",
        "tool_calls": [],
        "tool_call_id": None,
    }
    assert third["messages"][-1]["content"] == third["output"] == found["output"]
    assert found["mode"] == "dag"
    assert found["error"] is None


async def test_a_coordinator_asks_its_team(team: httpx2.AsyncClient) -> None:
    found = await dry_run(team, "software", agent="coordinator")
    root, *others = found["tasks"]
    assert (root["agent"], root["parent"]) == ("coordinator", None)
    assert {task["parent"] for task in others} == {1}
    assert [task["agent"] for task in others] == ["requirements", "designer", "implementer"]
    assert [each["source"] for each in others[2]["received"]] == ["requirements", "designer"]
    tools = {each["agent"]: each["tools"] for each in found["agents"]}["coordinator"]
    assert [tool["agent"] for tool in tools] == ["requirements", "designer", "implementer"]


async def test_tools_with_effects_are_not_called(team: httpx2.AsyncClient) -> None:
    """Check it of a tool that the agent must call and that needs an approval."""
    found = await dry_run(team, "payers", input="Pay 2 + 3.")
    (task,) = found["tasks"]
    results = [each["content"] for each in task["messages"] if each["role"] == "tool"]
    assert results == [NOT_CALLED, "5"]
    (agent,) = found["agents"]
    assert [(tool["name"], tool["called"]) for tool in agent["tools"]] == [
        ("pay", False),
        ("calculator", True),
    ]


async def test_it_refuses_what_a_run_refuses(team: httpx2.AsyncClient) -> None:
    for asked, graph in (({"agent": "nobody"}, "software"), ({}, "ghosts")):
        answers = [
            await team.post(f"/v1/graphs/{graph}/dry-run", json={"input": "x", **asked}),
            await team.post(
                "/v1/runs",
                json={
                    "input": "x",
                    "graph": graph,
                    "mode": "orchestrated" if asked else "dag",
                    **asked,
                },
            ),
        ]
        dry, real = (answer.json() for answer in answers)
        assert (dry["code"], dry["detail"]) == (real["code"], real["detail"])
        assert answers[0].status_code == answers[1].status_code == 422
    unknown = await team.post("/v1/graphs/nothing/dry-run", json={"input": "x"})
    assert problem(unknown, 404)["code"] == "not_found"
    too_long = await team.post("/v1/graphs/chain/dry-run", json={"input": "x" * 20_001})
    assert problem(too_long, 422)["errors"][0]["pointer"] == "/input"


async def test_dry_runs_of_a_tenant_and_their_time_are_bounded() -> None:
    dry_runs = DryRuns(longest_s=0.05)
    answers = await asyncio.gather(
        *(dry_runs.answer(MINE, {}) for _ in range(6)),
        dry_runs.answer(THEIRS, {}),
        return_exceptions=True,
    )
    limited = [place for place, each in enumerate(answers) if isinstance(each, LimitedError)]
    assert limited == [4, 5]
    ended = [place for place, each in enumerate(answers) if isinstance(each, UnavailableError)]
    assert ended == [0, 1, 2, 3, 6]


ENDLESS = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"


@pytest.mark.parametrize("ends", [ENDLESS, "import sys; sys.exit(3)", "import os; os.abort()"])
async def test_a_dry_run_that_needs_too_much_is_ended(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Check it of too much CPU time, and of too little memory."""
    command = "bottega.api.routes.graphs.dry_run_command"
    monkeypatch.setattr(command, lambda: (["python3", "-c", ends], {}))
    with pytest.raises(UnavailableError) as refused:
        await DryRuns().answer(MINE, {})
    assert refused.value.code == "dry_run_too_large"


async def test_an_answer_stays_small() -> None:
    """Check it of agents whose prompts are far longer than the whole answer may be."""
    agents = [f"agent-{number}" for number in range(250)]
    definition = {
        "description": "",
        "stateless": True,
        "subagents": None,
        "system_message": "x" * 100_000,
        "max_iterations": 1,
        "tool_policy": [],
        "exit_on_success": [],
        "agent_comment": True,
        "tools": [],
        "recall": None,
    }
    plan = {
        "graph": "large",
        "version": 1,
        "agent": None,
        "content": {
            "ttl_s": None,
            "nodes": [{"agent": name, "ttl_s": None} for name in agents],
            "edges": [],
        },
        "agents": dict.fromkeys(agents, definition),
        "versions": dict.fromkeys(agents, 1),
        "input": "x",
    }
    answer = await made(plan)
    assert len(answer) < MOST_CHARACTERS
    found = from_json(answer)
    assert len(found["tasks"]) == 250
    assert found["longest_text"] == len(found["tasks"][0]["messages"][0]["content"]) == 2_000
