"""Semantic pull from shared memory."""

import asyncio
from collections.abc import Sequence
from math import cos, nan, radians, sin

import numpy as np
import pytest

from bottega.agents import (
    AncestorRecall,
    BaseAgent,
    HumanMessage,
    Query,
    SharedMemoryGraph,
    SystemMessage,
    tool,
)
from bottega.agents.messages import SHARED_MEMORY
from bottega.agents.shared_memory import (
    Recall,
    Recalled,
    inject_shared_memory,
    nearest,
    shared_message,
)
from bottega.errors import InvalidInputError, UnavailableError
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.text.embeddings import Vectors
from tests.domain.scripted import Notes, agent, call, let_others_run, model_of, texts
from tests.domain.test_graph import Clock, graph_of


class Compass:
    """Embedder: a text becomes the direction that its last word gives in degrees.

    Attributes:
        error: raised instead, while set.
        gate: waited for before an answer.
    """

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def embed(self, texts: Sequence[str]) -> Vectors:
        self.asked.append(list(texts))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        angles = [radians(float(text.split()[-1])) for text in texts]
        return np.array([(cos(angle), sin(angle)) for angle in angles], np.float32)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def compass() -> Compass:
    return Compass()


@pytest.fixture
def graph(clock: Clock) -> SharedMemoryGraph:
    """Build a graph of three sources whose answers reach the reader only through ``lead``."""
    return graph_of("a>lead", "b>lead", "c>lead", "lead>reader", clock=clock)


def reader(graph: SharedMemoryGraph | None) -> BaseAgent:
    it = agent()
    it.memory_graph, it.agent_id = graph, "reader"
    return it


async def begin(
    it: BaseAgent, recall: Recall, text: str = "go 0", notes: Notes | None = None
) -> list[Recalled]:
    """Run the part of a query that precedes its first model call."""
    query = Query(agent=it, messages=(HumanMessage(content=text),), recorder=notes or Notes())
    it.conversation_history += query.messages
    inject_shared_memory(query)
    return await recall.inject(query)


async def publish(graph: SharedMemoryGraph, **contents: str) -> None:
    for source, content in contents.items():
        await graph.publish(source, content)


def names(recalled: Sequence[Recalled]) -> list[str]:
    return [f"{item.source_id}@{item.version}" for item, _ in recalled]


class TestChoice:
    async def test_nearest_are_recalled(self, graph: SharedMemoryGraph) -> None:
        await publish(
            graph,
            a="The invoices are sent on the first of the month",
            b="Users log in with e-mail and password; the session ends after an hour",
            c="The garden is watered at night",
            lead="Go on",
        )
        recall = Recall(BuiltinEmbedder(), k=1)
        found = await begin(reader(graph), recall, "Write the login page: password, session")
        assert names(found) == ["b@1"]

    async def test_at_most_k_are_recalled_in_graph_order(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="30", b="80", c="10")
        found = await begin(reader(graph), Recall(compass, k=2))
        assert names(found) == ["a@1", "c@1"]
        assert [score for _, score in found] == [0.866, 0.9848]
        assert names(await begin(reader(graph), Recall(compass, k=9))) == ["a@1", "b@1", "c@1"]

    async def test_ties_are_broken_by_distance_in_the_graph(self, compass: Compass) -> None:
        graph = graph_of("far>b", "b>lead", "a>lead", "lead>reader")
        await publish(graph, far="40", a="40", b="40.001")
        assert names(await begin(reader(graph), Recall(compass, k=1))) == ["b@1"]
        assert names(await begin(reader(graph), Recall(compass, k=2))) == ["b@1", "a@1"]

    async def test_directly_read_sources_are_not_recalled(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        graph.add_edge("b", "reader", "tool_results")  # besides the path through lead
        await publish(graph, a="50", b="0", lead="0")
        it = reader(graph)
        assert names(await begin(it, Recall(compass, k=3))) == ["a@1"]
        assert compass.asked == [["50"], ["go 0"]]
        sources = [m.metadata.get("shared_memory_source") for m in it.conversation_history]
        assert sources == [None, "b", "lead", "a", None]

    async def test_expired_content_is_not_recalled(
        self, graph: SharedMemoryGraph, clock: Clock, compass: Compass
    ) -> None:
        graph.add_agent("a", ttl_s=10)
        await publish(graph, a="0", b="50")
        recall = Recall(compass, k=2)
        assert names(await begin(reader(graph), recall)) == ["a@1", "b@1"]
        clock.forward(11)
        assert names(await begin(reader(graph), recall)) == ["b@1"]

    async def test_recall_uses_the_state_of_the_direct_pull(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10")
        compass.gate = asyncio.Event()
        asked = asyncio.ensure_future(begin(reader(graph), Recall(compass, k=3)))
        await let_others_run()
        await publish(graph, a="0", b="0")
        compass.gate.set()
        assert names(await asked) == ["a@1"]

    @pytest.mark.parametrize("where", ["alone", "nothing published", "stranger"])
    async def test_embedder_is_not_called_if_nothing_can_be_recalled(
        self, where: str, compass: Compass
    ) -> None:
        graph = {"alone": None, "nothing published": graph_of("a>lead", "lead>reader")}.get(
            where, graph_of("a>b")
        )
        assert await begin(reader(graph), Recall(compass, k=3)) == []
        assert compass.asked == []

    def test_score_that_is_no_number_is_left_out(self) -> None:
        assert nearest([], [], 3) == []
        graph = graph_of("a>b")
        asyncio.run(publish(graph, a="x"))
        [item] = graph.pull_for("b")
        assert nearest([item, item], [nan, -0.5], 3) == [(item, -0.5)]

    def test_k_is_at_least_1(self, compass: Compass) -> None:
        with pytest.raises(InvalidInputError):
            Recall(compass, k=0)


class TestMessage:
    async def test_recalled_message_is_fenced_and_marked_and_follows_the_direct_ones(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="60", lead="plan")
        it = reader(graph)
        it.conversation_history += [
            SystemMessage(content="aware", metadata={"orchestrator_awareness": True}),
            HumanMessage(content="earlier"),
        ]
        [(item, score)] = await begin(it, Recall(compass, k=1))
        [direct] = graph.pull_for("reader")
        assert texts(it.conversation_history) == [
            "system",
            "aware",
            shared_message(direct).content,
            shared_message(item).content,
            "earlier",
            "go 0",
        ]
        assert it.conversation_history[3].metadata == {
            "shared_memory": True,
            "shared_memory_source": "a",
            "shared_memory_version": 1,
            "shared_memory_recalled": True,
            "shared_memory_score": 0.5,
        }
        assert score == 0.5

    async def test_without_direct_messages_it_takes_their_place(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="0")
        it = reader(graph)
        await begin(it, Recall(compass, k=1))
        shown = [
            message.metadata.get("shared_memory_source") for message in it.conversation_history
        ]
        assert shown == [None, "a", None]

    async def test_each_query_recalls_for_itself(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="0", b="90")
        it, recall = reader(graph), Recall(compass, k=1)
        assert names(await begin(it, recall)) == ["a@1"]
        assert names(await begin(it, recall, "go 90")) == ["b@1"]
        shown = [
            message.metadata.get("shared_memory_source") for message in it.conversation_history
        ]
        assert shown == [None, "b", None, None]


class TestFailure:
    @pytest.mark.parametrize("error", [UnavailableError("gone"), ValueError("odd")])
    async def test_failing_embedder_is_a_warning_and_the_next_query_tries_again(
        self, graph: SharedMemoryGraph, compass: Compass, error: Exception
    ) -> None:
        await publish(graph, a="0", lead="plan")
        it, recall, notes = reader(graph), Recall(compass, k=1), Notes()
        compass.error = error
        assert await begin(it, recall, notes=notes) == []
        assert len(it.conversation_history) == 3  # the direct one is there
        [(who, code, text)] = notes.about("warning")
        assert (who, code) == ("reader", "recall_failed")
        assert f"{type(error).__name__}: {error}" in text
        compass.error = None
        assert names(await begin(it, recall)) == ["a@1"]

    async def test_embedder_with_the_wrong_shape_counts_as_failing(
        self, graph: SharedMemoryGraph
    ) -> None:
        class OneTooFew(Compass):
            async def embed(self, texts: Sequence[str]) -> Vectors:
                return (await super().embed(texts))[1:]

        await publish(graph, a="0")
        notes = Notes()
        assert await begin(reader(graph), Recall(OneTooFew(), k=1), notes=notes) == []
        assert "shape (0, 2)" in notes.about("warning")[0][2]


class TestEmbeddingOnce:
    async def test_publication_is_embedded_once(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10", b="20")
        it, recall = reader(graph), Recall(compass, k=1)
        for text in ("first 0", "second 0"):
            await begin(it, recall, text)
        assert compass.asked == [["10", "20"], ["first 0"], ["second 0"]]
        await publish(graph, b="5")
        assert names(await begin(reader(graph), recall, "third 0")) == ["b@2"]
        assert compass.asked[3:] == [["5"], ["third 0"]]

    async def test_restarted_version_numbers_are_not_confused(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10")
        recall = Recall(compass, k=1)
        await begin(reader(graph), recall)
        graph.clear_published_data()
        await publish(graph, a="60")
        [(item, score)] = await begin(reader(graph), recall)
        assert (item.version, score) == (1, 0.5)

    async def test_concurrent_queries_share_one_embedding(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10", b="20")
        compass.gate = asyncio.Event()
        recall = Recall(compass, k=2)
        first, second, third = (
            asyncio.ensure_future(begin(reader(graph), recall, f"{name} 0")) for name in "xyz"
        )
        await let_others_run()
        await let_others_run()
        first.cancel()  # the query that started it
        await let_others_run()
        compass.gate.set()
        assert names(await second) == names(await third) == ["a@1", "b@1"]
        assert first.cancelled()
        assert sorted(compass.asked) == [["10", "20"], ["y 0"], ["z 0"]]

    async def test_concurrent_queries_share_the_failure_too(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10")
        compass.gate, compass.error = asyncio.Event(), UnavailableError("gone")
        recall, notes = Recall(compass, k=2), Notes()
        queries = [
            asyncio.ensure_future(begin(reader(graph), recall, notes=notes)) for _ in range(3)
        ]
        await let_others_run()
        compass.gate.set()
        assert await asyncio.gather(*queries) == [[], [], []]
        assert len(notes.about("warning")) == 3
        assert compass.asked == [["10"]]

    def test_one_recall_serves_one_event_loop_after_another(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        asyncio.run(publish(graph, a="10"))
        recall = Recall(compass, k=1)
        compass.gate = asyncio.Event()

        async def given_up() -> None:
            begun = asyncio.ensure_future(begin(reader(graph), recall))
            await let_others_run()
            begun.cancel()

        asyncio.run(given_up())
        compass.gate = None
        for _ in range(2):
            assert names(asyncio.run(begin(reader(graph), recall))) == ["a@1"]
        assert compass.asked == [["10"], ["10"], ["go 0"], ["go 0"]]


class TestInAQuery:
    async def test_recall_happens_once_per_query_and_is_recorded(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10", lead="plan")

        @tool("meanwhile", "-")
        async def meanwhile() -> None:
            await publish(graph, a="0", b="0")

        notes = Notes()
        it = agent(call("meanwhile"), "ok", tools=[meanwhile])
        it.memory_graph, it.agent_id, it.recall = graph, "reader", Recall(compass, k=2)
        await it.execute_query_async("go 0", recorder=notes)
        first, second = (texts(request) for request in model_of(it).requests)
        assert len(first) == 4
        assert second[:4] == first
        assert notes.about("injected") == [("reader", "lead@1")]
        assert notes.about("recalled") == [("reader", "a@1")]

    async def test_failing_embedder_does_not_stop_the_query(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        await publish(graph, a="10")
        compass.error = UnavailableError("gone")
        notes, it = Notes(), agent("ok")
        it.memory_graph, it.agent_id, it.recall = graph, "reader", Recall(compass, k=2)
        response = await it.execute_query_async("go 0", recorder=notes)
        assert response.content == "ok"
        assert [line[1] for line in notes.about("warning")] == ["recall_failed"]
        assert notes.about("recalled") == []

    async def test_recalled_content_is_not_published_again(
        self, graph: SharedMemoryGraph, compass: Compass
    ) -> None:
        graph.add_edge("reader", "next", "full_history")
        await publish(graph, a="10")
        it = agent("ok")
        it.memory_graph, it.agent_id, it.recall = graph, "reader", Recall(compass, k=2)
        await it.execute_query_async("go 0")
        [item] = graph.pull_for("next")
        assert item.content == "ok\n\nConversation:\nuser: go 0"


async def test_ancestors_mode_gives_all_that_lies_upstream_in_order() -> None:
    graph = SharedMemoryGraph()
    for source, target in (("a", "b"), ("b", "c"), ("c", "it"), ("x", "b"), ("it", "later")):
        graph.add_edge(source, target)
    it = agent("done", agent_name="it")
    it.memory_graph, it.agent_id, it.recall = graph, "it", AncestorRecall()
    for name in ("later", "c", "b", "a", "x"):
        await graph.publish(name, f"{name}'s answer")
    await it.execute_query_async("unrelated words")
    given = [m for m in it.conversation_history if SHARED_MEMORY in m.metadata]
    assert [m.metadata["shared_memory_source"] for m in given] == ["c", "a", "x", "b"]
    assert ["shared_memory_score" in m.metadata for m in given] == [False] * 4
    await it.execute_query_async("again")
    again = [m for m in it.conversation_history if SHARED_MEMORY in m.metadata]
    assert [m.metadata["shared_memory_source"] for m in again] == ["c", "a", "x", "b"]
