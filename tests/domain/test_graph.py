"""The shared-memory graph."""

import asyncio
import json
import timeit
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from bottega.agents import (
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolMessage,
    ToolResult,
)
from bottega.agents.messages import ToolStatus
from bottega.errors import CycleError, InvalidInputError
from bottega.graph.shared_memory import (
    MemoryItem,
    PropagationPolicy,
    Publication,
    SharedMemoryGraph,
)
from tests.domain.scripted import call

FINAL, TOOLS, FULL = PropagationPolicy


class Clock:
    """Clock that the test moves."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def graph_of(
    *edges: str, ttl_s: float | None = None, clock: Clock | None = None
) -> SharedMemoryGraph:
    graph = SharedMemoryGraph(ttl_s, clock or Clock())
    for edge in edges:
        graph.add_edge(*edge.split(">"))
    return graph


def pulled(items: list[MemoryItem]) -> list[str]:
    return [f"{item.source_id}@{item.version}:{item.content}" for item in items]


class TestStructure:
    def test_adding_an_agent_twice_changes_nothing(self) -> None:
        graph = graph_of()
        graph.add_agent("a")
        graph.add_agent("a")
        assert graph.nodes == ("a",)
        assert graph.has_node("a")
        assert not graph.has_node("b")

    def test_an_edge_adds_its_ends_and_may_change_its_policy(self) -> None:
        graph = graph_of("a>b")
        assert graph.nodes == ("a", "b")
        assert graph.edge_policy("a", "b") is FINAL
        graph.add_edge("a", "b", "full_history")
        assert graph.edge_policy("a", "b") is FULL
        assert graph.get_edges_for_nodes(["a", "b"]) == [("a", "b")]

    @pytest.mark.parametrize(
        ("edges", "new", "path"),
        [
            ((), "a>a", ("a", "a")),
            (("a>b",), "b>a", ("b", "a", "b")),
            (("a>b", "b>c", "c>d"), "d>b", ("d", "b", "c", "d")),
        ],
    )
    def test_a_cycle_is_refused_at_once_with_its_path(
        self, edges: tuple[str, ...], new: str, path: tuple[str, ...]
    ) -> None:
        graph = graph_of(*edges)
        before = graph.to_dict()
        with pytest.raises(CycleError) as caught:
            graph.add_edge(*new.split(">"))
        assert caught.value.path == path
        assert " -> ".join(path) in caught.value.detail
        assert graph.to_dict() == before

    def test_the_order_breaks_ties_by_insertion(self) -> None:
        # Plain breadth-first (networkx) would put d before b.
        graph = SharedMemoryGraph()
        for name in "abcd":
            graph.add_agent(name)
        graph.add_edge("c", "b")
        graph.add_edge("a", "d")
        assert graph.get_topological_order() == ["a", "c", "b", "d"]

    def test_order_of_some_agents_is_the_whole_order_filtered(self) -> None:
        graph = SharedMemoryGraph()
        for name in "cba":
            graph.add_agent(name)
        graph.add_edge("a", "b")
        graph.add_edge("b", "c")
        assert graph.get_topological_order(["c", "a", "ghost"]) == ["a", "c"]
        assert graph.get_topological_order([]) == []

    def test_order_follows_changes(self) -> None:
        graph = graph_of("b>a")
        assert graph.get_topological_order() == ["b", "a"]
        graph.add_agent("c")
        graph.add_edge("c", "b")
        assert graph.get_topological_order() == ["c", "b", "a"]

    def test_edges_for_nodes_connect_the_given_nodes_in_order(self) -> None:
        graph = graph_of("b>c", "a>c", "a>b", "c>d")
        assert graph.get_edges_for_nodes(["c", "b", "a", "x"]) == [
            ("a", "b"),
            ("a", "c"),
            ("b", "c"),
        ]

    def test_neighbours_and_ancestors(self) -> None:
        graph = graph_of("a>b", "b>c", "a>c", "x>y")
        assert graph.predecessors("c") == ["a", "b"]
        assert graph.successors("a") == ["b", "c"]
        assert graph.ancestors("c") == {"a", "b"}
        assert graph.ancestors("ghost") == set()
        graph.add_edge("y", "a")
        assert graph.ancestors("c") == {"a", "b", "x", "y"}


class TestPublishing:
    async def test_publication_keeps_text_time_metadata_and_a_rising_version(self) -> None:
        clock = Clock()
        graph = graph_of("a>b", clock=clock)
        first = await graph.publish("a", "one", {"k": 1})
        clock.forward(5)
        second = await graph.publish("a", "two")
        assert (first.version, first.content, first.metadata) == (1, "one", {"k": 1})
        assert (second.version, second.timestamp - first.timestamp) == (2, timedelta(seconds=5))
        assert graph.publication("a") == second
        assert pulled(graph.pull_for("b")) == ["a@2:two"]

    async def test_concurrent_publications_each_get_a_version(self) -> None:
        graph = graph_of("a>b")
        done = await asyncio.gather(*(graph.publish("a", str(n)) for n in range(20)))
        assert sorted(each.version for each in done) == list(range(1, 21))

    async def test_an_unknown_id_adds_the_node(self) -> None:
        graph = graph_of()
        await graph.publish("new", "x")
        assert graph.nodes == ("new",)

    async def test_clear_removes_publications_only(self) -> None:
        graph = graph_of("a>b")
        before = graph.to_dict()
        await graph.publish("a", "x")
        graph.clear_published_data()
        assert graph.to_dict() == before
        assert graph.publication("a") is None
        assert graph.pull_for("b") == []
        assert (await graph.publish("a", "x")).version == 1

    async def test_restore_brings_back_newer_versions_of_known_agents(self) -> None:
        source, graph = graph_of("a>b"), graph_of("a>b")
        old, new = await source.publish("a", "old"), await source.publish("a", "new")
        assert graph.restore(new)
        assert not graph.restore(old)
        assert not graph.restore(Publication("ghost", "x", 1, old.timestamp))
        assert pulled(graph.pull_for("b")) == ["a@2:new"]
        assert (await graph.publish("a", "newer")).version == 3


class TestPulling:
    async def test_pull_returns_direct_predecessors_that_published_in_topological_order(
        self,
    ) -> None:
        graph = graph_of("z>y", "y>x", "z>x", "w>x", "v>w", "u>x")
        for name in ("w", "y", "z", "v"):
            await graph.publish(name, name.upper())
        assert pulled(graph.pull_for("x")) == ["z@1:Z", "y@1:Y", "w@1:W"]

    async def test_pull_without_predecessors_or_publications_is_empty(self) -> None:
        graph = graph_of("a>b")
        assert graph.pull_for("ghost") == []
        assert graph.pull_for("b") == []
        assert graph.pull_for("a") == []
        assert graph.unpublished_predecessors("b") == ["a"]
        assert graph.unpublished_predecessors("ghost") == []
        await graph.publish("a", "x")
        assert graph.unpublished_predecessors("b") == []

    async def test_edge_or_node_added_later_counts(self) -> None:
        graph = graph_of("a>c")
        await graph.publish("a", "A")
        assert pulled(graph.pull_for("c")) == ["a@1:A"]
        assert graph.pull_for("d") == []
        graph.add_edge("b", "a")
        graph.add_edge("b", "c")
        graph.add_edge("c", "d")
        await graph.publish("b", "B")
        await graph.publish("c", "C")
        assert pulled(graph.pull_for("c")) == ["b@1:B", "a@1:A"]
        assert pulled(graph.pull_for("d")) == ["c@1:C"]

    async def test_indirect_pull_returns_all_ancestors_nearest_first(self) -> None:
        graph = graph_of("a>b", "a>c", "b>d", "c>d", "a>d", "x>a")
        graph.add_edge("c", "d", FULL)
        for name in "xabcd":
            await graph.publish(name, name, messages=["secret"])
        items = graph.pull_for_indirect("d")
        assert [item.source_id for item in items] == ["a", "b", "c", "x"]
        assert {item.policy for item in items} == {FINAL}
        assert {item.content for item in items} == {"a", "b", "c", "x"}
        assert graph.pull_for_indirect("ghost") == []

    async def test_pull_is_fast(self) -> None:
        graph = SharedMemoryGraph(ttl_s=60)
        for number in range(1000):
            graph.add_agent(f"n{number}")
        for number in range(0, 900, 45):
            graph.add_edge(f"n{number}", "n999")
        for number in range(999):
            graph.add_edge(f"n{number}", f"n{number + 1}")
            await graph.publish(f"n{number}", "text")
        assert len(graph.pull_for("n999")) == 21
        best = min(timeit.repeat(lambda: graph.pull_for("n999"), number=200, repeat=20)) / 200
        assert best < 20e-6


class TestTTL:
    async def test_expired_content_is_not_pulled(self) -> None:
        clock = Clock()
        graph = graph_of("a>b", ttl_s=10, clock=clock)
        await graph.publish("a", "x")
        clock.forward(10)
        assert len(graph.pull_for("b")) == len(graph.pull_for_indirect("b")) == 1
        clock.forward(0.1)
        assert graph.pull_for("b") == graph.pull_for_indirect("b") == []
        await graph.publish("a", "y")
        assert pulled(graph.pull_for("b")) == ["a@2:y"]

    async def test_ttl_of_a_node_has_precedence(self) -> None:
        clock = Clock()
        graph = graph_of("a>c", "b>c", ttl_s=10, clock=clock)
        graph.add_agent("b", ttl_s=100)
        await graph.publish("a", "A")
        await graph.publish("b", "B")
        clock.forward(50)
        assert pulled(graph.pull_for("c")) == ["b@1:B"]
        graph.add_agent("b", ttl_s=20)
        assert graph.pull_for("c") == []

    async def test_node_may_have_a_ttl_where_the_graph_has_none(self) -> None:
        clock = Clock()
        graph = SharedMemoryGraph(clock=clock)
        graph.add_agent("a", ttl_s=1)
        graph.add_edge("a", "b")
        await graph.publish("a", "A")
        clock.forward(2)
        assert graph.pull_for("b") == []

    async def test_republished_content_keeps_its_time(self) -> None:
        clock = Clock()
        graph = graph_of("a>b", ttl_s=10, clock=clock)
        first = await graph.publish("a", "x")
        clock.forward(11)
        again = graph_of("a>b", ttl_s=10, clock=clock)
        await again.publish("a", "x", version=1, timestamp=first.timestamp)
        assert again.pull_for("b") == []

    async def test_named_sources_are_pulled_at_any_age(self) -> None:
        clock = Clock()
        graph = graph_of("a>c", "b>c", "x>a", ttl_s=10, clock=clock)
        for name in "abx":
            await graph.publish(name, name.upper())
        clock.forward(11)
        assert pulled(graph.pull_for("c", {"a"})) == ["a@1:A"]
        assert pulled(graph.pull_for_indirect("c", {"b", "x"})) == ["b@1:B", "x@1:X"]
        assert graph.pull_for("c", set()) == []

    @pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
    def test_ttl_is_a_positive_number(self, ttl_s: float) -> None:
        with pytest.raises(InvalidInputError, match="ttl_s"):
            SharedMemoryGraph(ttl_s=ttl_s)
        with pytest.raises(InvalidInputError, match="ttl_s"):
            SharedMemoryGraph().add_agent("a", ttl_s=ttl_s)


RESULTS = [
    ToolResult(tool_call_id="1", tool_name="search", result={"hits": [1]}),
    ToolResult(tool_call_id="2", tool_name="read", status=ToolStatus.ERROR, error="gone"),
]
MESSAGES: list[StandardMessage] = [
    SystemMessage(content="prompt"),
    HumanMessage(content="find it"),
    AssistantMessage(content="let me see", tool_calls=(call("search", q="x"), call("read"))),
    ToolMessage(tool_results=(RESULTS[0],)),
    ToolMessage(tool_results=(RESULTS[1],)),
]


class TestPolicies:
    async def test_each_policy_carries_its_content(self) -> None:
        graph = graph_of("a>final")
        graph.add_edge("a", "tools", TOOLS)
        graph.add_edge("a", "full", FULL)
        await graph.publish("a", "found", tool_results=RESULTS, messages=MESSAGES)
        texts = {name: graph.pull_for(name)[0].content for name in ("final", "tools", "full")}
        assert texts["final"] == "found"
        assert texts["tools"] == 'found\n\nTool results:\nsearch: {"hits":[1]}'
        assert texts["full"] == (
            "found\n\nConversation:\n"
            "user: find it\n"
            "assistant: let me see\n"
            'assistant called search with {"q":"x"}\n'
            "assistant called read with {}\n"
            'tool search: {"hits":[1]}\n'
            "tool read failed: gone"
        )
        assert graph.pull_for("full")[0].policy is FULL

    async def test_plain_text_and_similar_objects_are_accepted(self) -> None:
        graph = graph_of("a>b")
        graph.add_edge("a", "b", TOOLS)
        alike = SimpleNamespace(tool_name="t", status="success", result="r", error=None)
        await graph.publish("a", "x", tool_results=["ready made", alike])
        assert graph.pull_for("b")[0].content == "x\n\nTool results:\nready made\nt: r"

    async def test_without_additions_content_is_the_answer_alone(self) -> None:
        graph = graph_of()
        graph.add_edge("a", "b", TOOLS)
        graph.add_edge("a", "c", FULL)
        await graph.publish("a", "x")
        assert graph.pull_for("b")[0].content == graph.pull_for("c")[0].content == "x"

    def test_names_of_policies_on_the_wire(self) -> None:
        assert [str(policy) for policy in PropagationPolicy] == [
            "final_response_only",
            "tool_results",
            "full_history",
        ]


class TestSerialisation:
    async def build(self) -> SharedMemoryGraph:
        graph = graph_of("a>b", ttl_s=60)
        graph.add_edge("a", "c", FULL)
        graph.add_edge("b", "c", TOOLS)
        graph.add_agent("b", ttl_s=5)
        await graph.publish("a", "A", {"k": [1]}, tool_results=RESULTS, messages=MESSAGES)
        return graph

    async def test_to_dict_and_back_through_json(self) -> None:
        graph = await self.build()
        clock = Clock()
        again = SharedMemoryGraph.from_dict(json.loads(json.dumps(graph.to_dict())), clock=clock)
        assert again.to_dict() == graph.to_dict()
        assert again.pull_for("c") == graph.pull_for("c")
        assert again.get_topological_order() == graph.get_topological_order()
        clock.forward(61)
        assert again.pull_for("c") == []
        assert (await again.publish("a", "AA")).version == 2
        published = graph.publication("a")
        assert published is not None
        assert published.version == 1

    async def test_dict_with_a_cycle_is_refused(self) -> None:
        data = (await self.build()).to_dict()
        data["edges"].append({"source": "c", "target": "a", "policy": "tool_results"})
        with pytest.raises(CycleError):
            SharedMemoryGraph.from_dict(data)

    async def test_mermaid_shows_edges_policies_and_published_agents(self) -> None:
        assert (await self.build()).to_mermaid() == (
            "flowchart LR\n"
            '  n0["a"]:::published\n'
            '  n1["b"]\n'
            '  n2["c"]\n'
            "  n0 --> n1\n"
            "  n0 -->|full_history| n2\n"
            "  n1 -->|tool_results| n2\n"
            "  classDef published fill:#d6f5d6,stroke:#2e7d32\n"
        )

    async def test_dot_shows_edges_policies_and_published_agents(self) -> None:
        assert (await self.build()).to_dot() == (
            "digraph shared_memory {\n"
            "  rankdir=LR;\n"
            "  node [shape=box];\n"
            '  "a" [style=filled, fillcolor="#d6f5d6"];\n'
            '  "b";\n'
            '  "c";\n'
            '  "a" -> "b";\n'
            '  "a" -> "c" [label="full_history"];\n'
            '  "b" -> "c" [label="tool_results"];\n'
            "}\n"
        )

    def test_names_cannot_break_out_of_a_drawing(self) -> None:
        graph = SharedMemoryGraph()
        graph.add_agent('x"]\n<b>\\')
        assert '["x#quot;] #lt;b>\\"]' in graph.to_mermaid()
        assert '"x\\"]\\n<b>\\\\";' in graph.to_dot()


def test_many_edges_are_added_with_one_search_for_cycles() -> None:
    names = [f"a{number}" for number in range(500)]
    edges = [
        (names[at], names[at + step], PropagationPolicy.FINAL_RESPONSE_ONLY)
        for step in range(1, 11)
        for at in range(500 - step)
    ]
    one_by_one, at_once = SharedMemoryGraph(), SharedMemoryGraph()
    for edge in edges[:300]:
        one_by_one.add_edge(*edge)
    at_once.add_edges(edges[:300])
    assert at_once.get_topological_order() == one_by_one.get_topological_order()
    assert at_once.to_dot() == one_by_one.to_dot()

    took = timeit.timeit(lambda: SharedMemoryGraph().add_edges(edges), number=1)
    checked = timeit.timeit(lambda: SharedMemoryGraph().add_edges(edges[:500]), number=1)
    assert took < 40 * checked + 0.1  # a search for each edge: 1.2 s

    closing = (names[9], names[3], PropagationPolicy.FINAL_RESPONSE_ONLY)
    with pytest.raises(CycleError) as raised:
        at_once.add_edges([*edges, closing])
    assert raised.value.path[0] == raised.value.path[-1] == names[9]
    assert raised.value.path[1] == names[3]
    assert at_once.to_dot() == one_by_one.to_dot()  # nothing was added
