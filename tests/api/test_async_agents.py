"""Definitions of agents with asynchronous sub-agents."""

from typing import Any

import httpx2
import pytest

from bottega.agents import BaseAgent
from bottega.db.tables import DEFAULT_TENANT
from bottega.definitions.agents import TASK_TOOLS
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.tools import use_async_subagents
from tests.api.test_definitions import agent, create
from tests.domain.scripted import ScriptedModel
from tests.service import Running

LIMITS = {
    "max_concurrent": 2,
    "max_queued": 3,
    "max_total_tokens": 1000,
    "max_depth": 1,
    "default_timeout": 5,
    "max_timeout": 0.5,
    "max_steps_per_subagent": 4,
}
DEFAULT_LIMITS = SubagentLimits().of_agent({"mode": "async"}) or {}
DEFAULTS = {"anonymous": True, "share_metadata": []}
CALCULATOR = {"type": "builtin", "name": "calculator"}


def orchestrator(**subagents: Any) -> dict[str, Any]:
    return agent("boss", subagents={"mode": "async", **subagents})


def http_tool(name: str) -> dict[str, Any]:
    return {"type": "http", "name": name, "description": "x", "url": "https://api.example.com/"}


async def refusal(client: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/agents", json=body)
    assert answer.status_code == 422, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_sub_agent_names_are_optional(client: httpx2.AsyncClient) -> None:
    await create(client, orchestrator())
    stored = (await client.get("/v1/agents/boss")).json()["subagents"]
    assert stored == {"mode": "async", "names": [], "limits": None, **DEFAULTS}


@pytest.mark.parametrize("name", sorted(DEFAULT_LIMITS))
async def test_a_limit_above_the_operator_s_is_refused(
    client: httpx2.AsyncClient, name: str
) -> None:
    most = DEFAULT_LIMITS[name]
    too_high = most + 1 if name != "max_depth" else 20
    body = orchestrator(limits={name: too_high})
    for method, path, sent, at in (
        ("POST", "/v1/agents", body, ""),
        ("PUT", "/v1/agents/boss", {k: v for k, v in body.items() if k != "name"}, ""),
        ("POST", "/v1/apply", {"agents": [agent("other"), body]}, "/agents/1"),
    ):
        answer = await client.request(method, path, json=sent)
        assert answer.status_code == 422, (method, answer.text)
        problem = answer.json()
        assert problem["code"] == "limit_above_operator"
        assert f"limit is {most:.15g}:" in problem["detail"]
        assert problem["errors"][0]["pointer"] == f"{at}/subagents/limits/{name}"
    await create(client, orchestrator(limits={name: most}))


async def test_the_effective_limits_are_shown(client: httpx2.AsyncClient) -> None:
    await create(client, orchestrator(limits={"max_queued": 3, "max_timeout": 100}))
    await create(client, agent("plain"))
    expected = DEFAULT_LIMITS | {"max_queued": 3, "max_timeout": 100, "default_timeout": 100}
    for path in ("/v1/agents/boss", "/v1/agents/boss/versions/1"):
        assert (await client.get(path)).json()["effective_limits"] == expected
    body = orchestrator(limits={"max_queued": 3, "max_timeout": 100})
    del body["name"]
    replaced = await client.put("/v1/agents/boss", json=body)
    assert replaced.json()["effective_limits"] == expected
    assert (await client.get("/v1/agents/plain")).json()["effective_limits"] is None
    graph = {"name": "two", "nodes": ["boss", "plain"], "edges": []}
    assert (await client.post("/v1/graphs", json=graph)).status_code == 201
    for start, limits in (
        ({"agent": "boss"}, expected),
        ({"agent": "plain"}, None),
        ({"graph": "two", "mode": "dag"}, expected),
    ):
        made = await client.post("/v1/runs", json={"input": "hello", **start})
        assert made.status_code == 202, made.text
        run = (await client.get(f"/v1/runs/{made.json()['id']}")).json()
        assert run["effective_limits"] == limits


async def test_limits_are_stored_and_can_lower_the_operator_s(
    client: httpx2.AsyncClient,
) -> None:
    limits = {**LIMITS, "spread_above": 0}
    await create(client, orchestrator(names=["a"], limits=limits))
    stored = (await client.get("/v1/agents/boss")).json()["subagents"]
    assert stored == {"mode": "async", "names": ["a"], "limits": limits, **DEFAULTS}
    lowered = SubagentLimits().lowered(**stored["limits"])
    assert {name: getattr(lowered, name) for name in limits} == limits
    await create(client, {**orchestrator(limits={"max_depth": 2}), "name": "other"})
    some = (await client.get("/v1/agents/other")).json()["subagents"]["limits"]
    assert SubagentLimits().lowered(**some).max_depth == 2


async def test_agents_may_forbid_helpers_if_they_have_others(client: httpx2.AsyncClient) -> None:
    await create(client, orchestrator(names=["a"], anonymous=False))
    assert (await client.get("/v1/agents/boss")).json()["subagents"]["anonymous"] is False
    wrongs: list[dict[str, Any]] = [{"names": []}, {"names": ["a"], "mode": "sync"}]
    for wrong in wrongs:
        problem = await refusal(client, orchestrator(**wrong, anonymous=False))
        assert problem["errors"][0]["pointer"] == "/subagents", problem


async def test_an_agent_with_one_conversation_takes_no_tasks(client: httpx2.AsyncClient) -> None:
    await create(client, {**agent("remembers", description="x"), "stateless": False})
    problem = await refusal(client, orchestrator(names=["later", "remembers"]))
    assert problem["code"] == "stateful_subagent"
    assert problem["errors"][0]["pointer"] == "/subagents/names/1"
    await create(client, orchestrator(names=["later"]))
    await create(client, {**agent("later", description="x"), "stateless": False})
    answer = await client.post("/v1/runs", json={"agent": "boss", "input": "go"})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/subagents/names/0"
    assert "'boss'" in answer.json()["detail"]
    synchronous = agent("caller", subagents={"names": ["remembers"]})
    await create(client, synchronous)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1, 1e15, "2", True, [1]])
async def test_each_limit_has_bounds(refusing: Running, name: str, value: Any) -> None:
    refused = await refusal(refusing.client, orchestrator(limits={name: value}))
    assert refused["errors"][0]["pointer"] == f"/subagents/limits/{name}"


async def test_unknown_limits_are_refused(refusing: Running) -> None:
    for name in ("max_concurrent_global", "gc_ttl"):
        refused = await refusal(refusing.client, orchestrator(limits={name: 1}))
        assert refused["errors"][0]["pointer"] == f"/subagents/limits/{name}"


async def test_limits_of_synchronous_sub_agents_are_refused(client: httpx2.AsyncClient) -> None:
    refused = await refusal(client, agent("boss", subagents={"names": ["a"], "limits": LIMITS}))
    assert refused["errors"][0]["pointer"] == "/subagents/limits"
    assert "mode 'async'" in refused["detail"]
    await create(client, agent("boss", subagents={"names": ["a"], "limits": None}))


@pytest.mark.parametrize("name", TASK_TOOLS)
async def test_the_names_of_task_tools_are_reserved(client: httpx2.AsyncClient, name: str) -> None:
    body = {**orchestrator(), "tools": [http_tool(name)]}
    assert name in (await refusal(client, body))["detail"]
    await create(client, {**body, "subagents": {"names": ["a"]}})  # synchronous: reserves no names


def test_an_asynchronous_agent_gets_the_task_tools() -> None:
    boss = BaseAgent(system_message="x", provider=ScriptedModel())
    use_async_subagents(boss, SubagentRegistry())
    assert sorted(tool.name for tool in boss.registered_tools) == sorted(TASK_TOOLS)


async def test_rules_may_name_tools_but_not_sub_agents(client: httpx2.AsyncClient) -> None:
    rule = {"tool_name": "await_subagent", "require_success": True}
    good = {**orchestrator(names=["critic"]), "tools": [CALCULATOR], "tool_policy": [rule]}
    await create(client, {**good, "exit_on_success": ["dispatch_subagent", "calculator"]})
    for change in (
        {"exit_on_success": ["critic"]},
        {"tool_policy": [{"tool_name": "critic"}]},
    ):
        assert (await refusal(client, {**good, **change}))["detail"].endswith("critic")
    sync = {**good, "name": "sync", "subagents": {"names": ["critic"]}}
    await create(client, {**sync, "exit_on_success": ["critic"], "tool_policy": []})
    assert "await_subagent" in (await refusal(client, {**sync, "name": "bad"}))["detail"]


async def test_a_sub_agent_and_a_tool_may_have_the_same_name(client: httpx2.AsyncClient) -> None:
    """Check that the name is used in dispatches, and that no tool has it."""
    await create(client, {**orchestrator(names=["calculator"]), "tools": [CALCULATOR]})


async def test_circles_and_missing_sub_agents_are_refused_by_name(
    client: httpx2.AsyncClient,
) -> None:
    await create(client, agent("a", "b"), orchestrator(names=["a"]))
    body = {"system_message": "x", "subagents": {"mode": "async", "names": ["boss"]}}
    await create(client, {**body, "name": "b", "subagents": None})
    answer = await client.put("/v1/agents/b", json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "cycle")
    assert "b -> boss -> a -> b" in answer.json()["detail"]
    run = {"agent": "boss", "input": "x"}
    assert (await client.post("/v1/runs", json=run)).json()["code"] == "missing_description"
    await client.delete("/v1/agents/b")
    refused = (await client.post("/v1/runs", json=run)).json()
    assert (refused["code"], "'b' (sub-agent of a)" in refused["detail"]) == ("unknown_agent", True)


async def test_a_run_pins_all_agents_that_it_may_dispatch_to(server_: Running) -> None:
    client = server_.client
    await create(client, agent("a"), orchestrator(names=["a"]))
    answer = await client.post("/v1/runs", json={"agent": "boss", "input": "x"})
    assert answer.status_code == 202, answer.text
    pinned = await server_.owner.fetchval("SELECT pinned ->> 'agents' FROM runs")
    assert pinned == '{"a": 1, "boss": 1}'


async def test_definitions_of_earlier_versions_can_still_be_read(server_: Running) -> None:
    client = server_.client
    await create(client, agent("a"), agent("boss", "a"))
    stored = """
        UPDATE agent_versions SET definition = jsonb_set(definition, '{subagents}',
            (definition -> 'subagents') - 'limits') WHERE tenant_id = $1 AND name = 'boss'
    """
    await server_.owner.execute(stored, DEFAULT_TENANT)
    shown = (await client.get("/v1/agents/boss")).json()["subagents"]
    assert shown == {"mode": "sync", "names": ["a"], "limits": None, **DEFAULTS}
    answer = await client.post("/v1/runs", json={"agent": "boss", "input": "x"})
    assert answer.status_code == 202
