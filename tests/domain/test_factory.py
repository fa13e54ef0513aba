"""The agent factory, and agents' awareness of the graph."""

import logging
from typing import Any

import pytest

from bottega.agents import (
    AgentFactory,
    BaseAgent,
    CycleError,
    SharedMemoryGraph,
    SubAgentWrapper,
    SystemMessage,
    UnknownAgentError,
)
from bottega.errors import InvalidInputError
from tests.domain.scripted import Notes, ScriptedModel, answers_in, ask, model_of, texts


class Worker(BaseAgent):
    def __init__(self, **config: Any) -> None:
        super().__init__(**{"system_message": "work", **config})


def factory_of(*names: str, **more: Any) -> AgentFactory:
    factory = AgentFactory({"agent_comment": True})
    for name in names:
        factory.register(name, Worker, subagent_description=f"does {name}", **more)
    return factory


AWARENESS = """\
You are coordinating sub-agents with dependencies.

Dependency order (call upstream before downstream):
  requirements -> designer
  requirements -> implementer
  designer -> implementer

Recommended execution order: requirements, designer, implementer

Guideline: do not call an agent before its prerequisites have been executed."""


def tools_of(agent: BaseAgent) -> dict[str, SubAgentWrapper]:
    return {tool.name: tool for tool in agent.registered_tools if isinstance(tool, SubAgentWrapper)}


class TestConfiguration:
    def test_the_most_specific_setting_wins(self) -> None:
        factory = AgentFactory({"max_iterations": 1, "description": "global", "agent_name": "g"})
        factory.register("a", Worker, defaults={"max_iterations": 2, "description": "default"})
        factory.register("b", Worker, defaults={"max_iterations": 3})
        lead = factory.create(
            "a",
            subagents=["b"],
            subagent_config={"b": {"max_iterations": 4}},
            max_iterations=5,
        )
        child = lead.subagents[0]
        assert (lead.max_iterations, lead.description, lead.agent_name) == (5, "default", "g")
        assert (child.max_iterations, child.description) == (4, "global")
        assert factory.create("a").max_iterations == 2
        assert factory.create("b").max_iterations == 3

    def test_name_is_the_agents_id(self) -> None:
        agent = factory_of("a", "b").create("a", subagents=["b"])
        assert agent.agent_id == "a"
        assert agent.subagents[0].agent_id == "b"
        assert agent.memory_graph is None

    def test_registration_decides_how_a_sub_agent_is_attached(self) -> None:
        factory = factory_of("lead")
        factory.register(
            "b", Worker, subagent_name="ask_b", subagent_description="says b", stateless=True
        )
        factory.register("c", Worker, defaults={"description": "describes itself"})
        tools = tools_of(factory.create("lead", subagents=["b", "c"]))
        assert (tools["ask_b"].description, tools["ask_b"].stateless) == ("says b", True)
        assert (tools["c"].description, tools["c"].stateless) == ("describes itself", False)

    def test_each_creation_makes_new_agents(self) -> None:
        factory = factory_of("a", "b")
        first, second = (factory.create("a", subagents=["b"]) for _ in range(2))
        assert first is not second
        assert first.subagents[0] is not second.subagents[0]

    def test_instances_may_be_sub_agents(self) -> None:
        factory = factory_of("a", "b", stateless=True)
        made, own = factory.create("b"), Worker(agent_name="own", description="mine")
        lead = factory.create("a", subagents=[made, own])
        tools = tools_of(lead)
        assert tools["b"].agent is made
        assert (tools["b"].description, tools["b"].stateless) == ("does b", True)
        assert (tools["own"].agent, tools["own"].description) == (own, "mine")


class TestErrors:
    def test_unknown_name_error_lists_the_names_and_the_nearest(self) -> None:
        factory = factory_of("designer", "writer")
        with pytest.raises(UnknownAgentError) as caught:
            factory.create("desinger")
        assert "Did you mean 'designer'?" in caught.value.detail
        assert "designer, writer" in caught.value.detail
        with pytest.raises(UnknownAgentError):
            factory.create("writer", subagents=["desinger"])

    def test_configuration_for_an_unknown_agent_is_refused(self) -> None:
        with pytest.raises(UnknownAgentError, match="ghost"):
            factory_of("a", "b").create("a", subagents=["b"], subagent_config={"ghost": {}})

    def test_a_sub_agent_needs_a_description(self) -> None:
        factory = factory_of("a").register("mute", Worker)
        with pytest.raises(InvalidInputError, match="mute") as caught:
            factory.create("a", subagents=["mute"])
        assert caught.value.code == "missing_description"

    def test_cycles_are_refused_with_their_path(self) -> None:
        factory = factory_of("a", "b", "c")
        with pytest.raises(CycleError) as caught:
            factory.create("a", subagents=["a"])
        assert caught.value.path == ("a", "a")
        below = factory.create("b", subagents=[factory.create("c", subagents=["a"])])
        with pytest.raises(CycleError) as caught:
            factory.create("a", subagents=[below])
        assert caught.value.path == ("a", "b", "c", "a")

    def test_one_agent_in_two_places_is_no_cycle(self) -> None:
        factory = factory_of("lead", "left", "right", "shared")
        left, right = (factory.create(name, subagents=["shared"]) for name in ("left", "right"))
        assert len(factory.create("lead", subagents=[left, right]).subagents) == 2

    def test_agents_without_ids_are_distinct(self) -> None:
        factory = factory_of("lead", "middle")
        leaf, top = Worker(description="x"), Worker(description="y")
        top.register_agent(factory.create("middle", subagents=[leaf]), name="m", description="-")
        factory.create("lead", subagents=[top])


class TestAwareness:
    def graph(self) -> SharedMemoryGraph:
        graph = SharedMemoryGraph()
        graph.add_edge("requirements", "designer")
        graph.add_edge("designer", "implementer")
        graph.add_edge("requirements", "implementer")
        return graph

    def team(self, *names: str, graph: SharedMemoryGraph | None = None) -> BaseAgent:
        factory = factory_of("requirements", "designer", "implementer", "other")
        factory.register("lead", Worker)
        factory.with_memory_graph(graph or self.graph())
        return factory.create("lead", subagents=names)

    def test_its_exact_text_follows_the_system_message(self) -> None:
        lead = self.team("implementer", "designer", "requirements")
        assert texts(lead.conversation_history)[0] == "work"
        assert texts(lead.conversation_history)[1:] == [AWARENESS]
        message = lead.conversation_history[1]
        assert isinstance(message, SystemMessage)
        assert message.metadata == {"orchestrator_awareness": True}

    def test_awareness_names_the_tools_and_only_these_sub_agents(self) -> None:
        factory = factory_of("lead", "designer").with_memory_graph(self.graph())
        factory.register("requirements", Worker, subagent_name="ask", subagent_description="-")
        text = factory.create("lead", subagents=["designer", "requirements"]).conversation_history
        assert (
            "  ask -> designer\n\nRecommended execution order: ask, designer\n" in text[1].content
        )
        assert "implementer" not in text[1].content

    def test_order_is_that_of_the_whole_graph(self) -> None:
        graph = SharedMemoryGraph()
        for name in ("implementer", "designer", "requirements"):
            graph.add_agent(name)
        graph.add_edge("requirements", "hidden")
        graph.add_edge("hidden", "implementer")
        graph.add_edge("designer", "implementer")
        lead = self.team("implementer", "designer", "requirements", graph=graph)
        assert "order: designer, requirements, implementer" in lead.conversation_history[1].content

    @pytest.mark.parametrize("names", [(), ("designer",), ("requirements", "other")])
    def test_without_an_edge_among_them_there_is_no_awareness(self, names: tuple[str, ...]) -> None:
        assert texts(self.team(*names).conversation_history) == ["work"]

    def test_without_a_graph_there_is_no_awareness(self) -> None:
        lead = factory_of("a", "b", "c").create("a", subagents=["b", "c"])
        assert len(lead.conversation_history) == 1

    def test_sub_agent_outside_the_graph_causes_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        factory = factory_of("lead", "designer", "other").with_memory_graph(self.graph())
        with caplog.at_level(logging.WARNING):
            factory.create("lead", subagents=["designer", "other"])
        assert [code for code, _ in factory.warnings] == ["subagent_not_in_graph"]
        assert "'other'" in factory.warnings[0][1]
        assert factory.warnings[0][1] in caplog.text

    def test_all_share_the_one_graph(self) -> None:
        graph = self.graph()
        lead = self.team("designer", "requirements", graph=graph)
        assert {lead.memory_graph, *(child.memory_graph for child in lead.subagents)} == {graph}

    def test_agent_made_by_hand_joins_by_its_name(self) -> None:
        graph = self.graph()
        factory = factory_of("lead", "requirements").with_memory_graph(graph)
        mine = Worker(agent_name="designer", description="-")
        lead = factory.create("lead", subagents=["requirements", mine])
        assert (mine.agent_id, mine.memory_graph) == ("designer", graph)
        assert "requirements -> designer" in lead.conversation_history[1].content


async def test_a_team_from_end_to_end() -> None:
    """Context flows along the edges, not through the orchestrator."""
    graph = SharedMemoryGraph()
    graph.add_edge("requirements", "designer")
    graph.add_edge("requirements", "implementer")
    graph.add_edge("designer", "implementer")
    factory = AgentFactory().with_memory_graph(graph)
    for name in ("requirements", "designer", "implementer"):
        factory.register(
            name,
            Worker,
            subagent_description=name,
            stateless=True,
            defaults={"provider": ScriptedModel(f"{name} text")},
        )
    asked = ScriptedModel(
        ask("requirements"), [ask("implementer"), ask("designer")], "all is built"
    )
    factory.register("coordinator", Worker, defaults={"provider": asked})
    lead = factory.create("coordinator", subagents=["requirements", "designer", "implementer"])
    notes = Notes()
    response = await lead.execute_query_async("build", recorder=notes)
    assert response.content == "all is built"
    assert answers_in(lead) == ["requirements text", "implementer text", "designer text"]
    assert notes.about("injected") == [
        ("designer", "requirements@1"),
        ("implementer", "requirements@1", "designer@1"),
    ]
    assert notes.about("published") == [
        ("requirements", "requirements@1"),
        ("designer", "designer@1"),
        ("implementer", "implementer@1"),
    ]
    assert notes.about("warning") == []
    assert "designer text" in model_of(lead.subagents[2]).last[2]
    assert response.usage.model_calls == 6
