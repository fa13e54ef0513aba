"""The teams of runs: compiled once per version, with nothing that two runs share by mistake."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from bottega.agents import AgentEvent, BaseAgent, SubAgentWrapper
from bottega.agents.provider import LLMProvider
from bottega.engine import build_agents
from bottega.engine.build_agents import AgentDependencies, ConfigureAgent, Teams
from bottega.engine.claim import ClaimedRun
from bottega.engine.mcp import McpAccess
from bottega.errors import InvalidInputError
from bottega.secrets.lookup import SecretLookup, SecretRules
from bottega.tools.builtin import ToolDeps
from bottega.tools.egress import Egress
from bottega.tools.guard import ModelHosts
from bottega.tools.secrets import TenantSecrets
from tests.claims import claim_of
from tests.domain.scripted import ScriptedModel


def definition(**more: Any) -> dict[str, Any]:
    return {
        "description": "helps",
        "system_message": "You help.",
        "model": None,
        "max_iterations": 5,
        "tools": [],
        "tool_policy": [],
        "exit_on_success": [],
        "agent_comment": True,
        "stateless": False,
        "subagents": None,
        "recall": None,
        **more,
    }


def lead(*names: str, **more: Any) -> dict[str, Any]:
    return definition(subagents={"names": list(names), "mode": "sync"}, **more)


GRAPH = {
    "ttl_s": None,
    "nodes": [{"agent": name, "ttl_s": None} for name in ("one", "two")],
    "edges": [{"source": "one", "target": "two", "policy": "final_response_only"}],
}


def run_of(number: int = 1, **values: Any) -> ClaimedRun:
    agents = {"lead": lead("one", "two"), "one": definition(), "two": definition()}
    about = {"agent": "lead", "agents": agents, "graph_name": "g", "graph": GRAPH} | values
    return replace(claim_of(UUID(int=number)), **about)


class Counting:
    """Dependencies that count the agents that were built."""

    def __init__(
        self,
        *configure: ConfigureAgent,
        secrets: Mapping[str, str] | None = None,
        hosts: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.built = 0
        given = {} if secrets is None else secrets
        rules = SecretRules(
            keyring=lambda: None,
            environment=lambda: TenantSecrets(
                {f"BOTTEGA_SECRET_{name}": value for name, value in given.items()}
            ),
            hosts=lambda tenant, name: (hosts or {}).get(name),
            allowed=ModelHosts((), None, true).allowed,
            is_open=true,
        )
        lookup = SecretLookup(rules, no_rows)
        self.teams = Teams(
            AgentDependencies(
                models_for=self._models,
                tool_deps=ToolDeps(Egress(())),
                secrets=lookup,
                mcp=McpAccess({}, lookup),
                embedder=lambda tenant_id: pytest.fail("no agent has recall"),
                configure=configure,
            )
        )

    async def _models(
        self, run: ClaimedRun, definition: Mapping[str, Any], *, is_called: bool
    ) -> LLMProvider:
        self.built += 1
        return ScriptedModel([])


async def no_rows(tenant_id: UUID) -> list[dict[str, Any]]:
    return []


async def true() -> bool:
    return True


def children(agent: BaseAgent) -> dict[str, BaseAgent]:
    tools = agent.registered_tools
    wrappers = [tool for tool in tools if isinstance(tool, SubAgentWrapper)]
    agents = {each.name: each.agent for each in wrappers}
    assert all(isinstance(child, BaseAgent) for child in agents.values())
    return agents  # type: ignore[return-value]


async def test_runs_of_the_same_definitions_are_built_once_and_share_nothing() -> None:
    it = Counting()
    first, second = await it.teams.of(run_of(1)), await it.teams.of(run_of(2))
    assert it.built == 3
    assert first.graph is not None
    assert second.graph is not None
    await first.graph.publish("one", "said")
    await first.graph.publish("new", "said")
    assert second.graph.publication("one") is None
    assert second.graph.nodes == ("one", "two")
    assert (await it.teams.of(run_of(3))).graph.nodes == ("one", "two")  # type: ignore[union-attr]
    a, b = first.agents["lead"], second.agents["lead"]
    a.conversation_history.append(a.system_message)
    a.on(AgentEvent.QUERY_START)
    a.registered_tools.pop()
    for one, other in [(a, b), *zip(children(a).values(), children(b).values(), strict=False)]:
        assert one is not other
        assert one.memory_graph is first.graph
        assert other.memory_graph is second.graph
    assert len(b.conversation_history) == 2  # its system message, and what it knows of the graph
    assert not b.hooks
    assert list(children(b)) == ["one", "two"]
    assert children(b)["two"].memory_graph is not None


async def test_a_new_version_is_built() -> None:
    it = Counting()
    await it.teams.of(run_of())
    changed = run_of(agents={**run_of().agents, "two": definition(system_message="Other.")})
    team = await it.teams.of(changed)
    assert children(team.agents["lead"])["two"].system_message.content == "Other."
    without = await it.teams.of(run_of(graph={**GRAPH, "edges": []}))
    assert without.graph is not None
    assert without.graph.predecessors("two") == []
    assert len(without.agents["lead"].conversation_history) == 1
    assert it.built == 9


async def test_tenants_do_not_share_a_team() -> None:
    it = Counting()
    await it.teams.of(run_of())
    await it.teams.of(replace(run_of(), tenant_id=UUID(int=99)))
    assert it.built == 6


async def test_a_parent_shares_a_sub_agent_with_another() -> None:
    agents = {
        "lead": lead("one", "two"),
        "one": lead("three"),
        "two": lead("three"),
        "three": definition(),
    }
    team = await Counting().teams.of(run_of(agents=agents, graph=None, graph_name=None))
    one, two = children(team.agents["lead"]).values()
    assert children(one)["three"] is children(two)["three"]


async def test_a_plugin_configures_the_agents_of_each_run() -> None:
    seen: list[str] = []

    def configure(agent: BaseAgent, definition: Mapping[str, Any]) -> None:
        seen.append(agent.agent_name)
        agent.on(AgentEvent.QUERY_START)

    it = Counting(configure)
    for number in (1, 2):
        team = await it.teams.of(run_of(number))
        assert len(team.agents["lead"].hooks[AgentEvent.QUERY_START]) == 1
    assert seen == ["one", "two", "lead"] * 2


async def test_a_team_that_cannot_be_built_is_tried_again() -> None:
    tool = {
        "type": "http",
        "name": "look",
        "description": "Looks.",
        "method": "GET",
        "url": "https://example.com",
        "parameters": {"type": "object", "properties": {}},
        "headers": {"x-key": {"secret": "KEY"}},
    }
    agents = {"lead": definition(tools=[tool])}
    secrets: dict[str, str] = {}
    it = Counting(secrets=secrets)
    with pytest.raises(InvalidInputError) as raised:
        await it.teams.of(run_of(agents=agents))
    assert raised.value.code == "unknown_secret"
    secrets["KEY"] = "a long secret"
    team = await it.teams.of(run_of(agents=agents))
    assert [tool.name for tool in team.agents["lead"].registered_tools] == ["look"]


async def test_a_large_team_is_built_once_while_other_runs_go_on() -> None:
    names = [f"a{number}" for number in range(300)]
    run = run_of(
        agents={"lead": lead(*names), **{name: definition() for name in names}},
        graph=None,
        graph_name=None,
    )
    it = Counting()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(others())
    teams = await asyncio.gather(*(it.teams.of(run) for _ in range(5)))
    other.cancel()
    assert it.built == 301
    assert turns > 3
    assert {len(children(team.agents["lead"])) for team in teams} == {300}


async def test_the_teams_that_were_not_used_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_agents, "MOST_AGENTS", 6)
    it = Counting()
    first, second, third = (run_of(graph_name=name) for name in ("g", "h", "i"))
    for run in (first, second, first, third, first):
        await it.teams.of(run)
    assert it.built == 9
    await it.teams.of(second)
    assert it.built == 12


async def test_a_secret_goes_to_no_other_host_than_its_own() -> None:
    tool = {
        "type": "http",
        "name": "look",
        "description": "Look.",
        "method": "GET",
        "url": "https://other.example/x",
        "headers": {"x-key": {"secret": "KEY"}},
        "parameters": {"type": "object", "properties": {}},
    }
    run = run_of(agents={"lead": definition(tools=[tool])}, graph_name=None, graph=None)
    secrets = {"KEY": "secret-value"}
    await Counting(secrets=secrets, hosts={"KEY": ["other.example"]}).teams.of(run)
    with pytest.raises(InvalidInputError, match="must not be sent to other") as raised:
        await Counting(secrets=secrets, hosts={"KEY": ["own.example"]}).teams.of(run)
    assert raised.value.code == "secret_not_for_host"
