"""Shared memory in queries: injection and publication."""

from hashlib import sha256
from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    AssistantMessage,
    BaseAgent,
    HookDecision,
    HumanMessage,
    ModelError,
    SharedMemoryGraph,
    SystemMessage,
    tool,
)
from bottega.agents.shared_memory import fence
from tests.domain.scripted import Notes, agent, ask, call, human, model_of, texts
from tests.domain.test_graph import Clock


def member(graph: SharedMemoryGraph, agent_id: str, *answers: Any, **config: Any) -> BaseAgent:
    it = agent(*answers, **config)
    it.memory_graph, it.agent_id = graph, agent_id
    return it


def shared(source: str, content: str) -> str:
    mark = sha256(content.encode()).hexdigest()[:8]
    return (
        f"Shared context from {source}:\n<shared-context-{mark}>{content}</shared-context-{mark}>"
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def graph(clock: Clock) -> SharedMemoryGraph:
    graph = SharedMemoryGraph(clock=clock)
    graph.add_edge("requirements", "designer")
    graph.add_edge("requirements", "implementer")
    graph.add_edge("designer", "implementer")
    return graph


async def publish_both(graph: SharedMemoryGraph, suffix: str = "") -> None:
    await graph.publish("designer", f"design{suffix}")
    await graph.publish("requirements", f"needs{suffix}")


class TestInjection:
    async def test_context_follows_the_system_message_in_graph_order(
        self, graph: SharedMemoryGraph
    ) -> None:
        await publish_both(graph)
        it = member(graph, "implementer", "ok")
        await it.execute_query_async("build")
        assert model_of(it).last == [
            "system",
            shared("requirements", "needs"),
            shared("designer", "design"),
            "build",
        ]
        block = it.conversation_history[1]
        assert isinstance(block, SystemMessage)
        assert block.metadata == {
            "shared_memory": True,
            "shared_memory_source": "requirements",
            "shared_memory_version": 1,
        }

    async def test_context_follows_awareness(self, graph: SharedMemoryGraph) -> None:
        await graph.publish("requirements", "needs")
        it = member(graph, "designer", "ok")
        it.conversation_history += [
            SystemMessage(content="plan"),
            SystemMessage(content="aware", metadata={"orchestrator_awareness": True}),
        ]
        await it.execute_query_async("go")
        assert model_of(it).last == [
            "system",
            "plan",
            "aware",
            shared("requirements", "needs"),
            "go",
        ]

    async def test_context_is_pulled_once_per_query(self, graph: SharedMemoryGraph) -> None:
        await graph.publish("requirements", "needs")

        @tool("meanwhile", "-")
        async def meanwhile() -> None:
            await graph.publish("requirements", "changed")

        notes = Notes()
        it = member(graph, "designer", call("meanwhile"), "ok", tools=[meanwhile])
        await it.execute_query_async("go", recorder=notes)
        first, second = (texts(request) for request in model_of(it).requests)
        assert second[: len(first)] == first
        assert notes.about("injected") == [("designer", "requirements@1")]

    async def test_each_new_query_gets_the_current_block(
        self, graph: SharedMemoryGraph, clock: Clock
    ) -> None:
        graph.add_agent("designer", ttl_s=10)
        await publish_both(graph)
        it = member(graph, "implementer", "one", "two", "three")
        await it.execute_query_async("first")
        await graph.publish("requirements", "more needs")
        await it.execute_query_async("second")
        assert model_of(it).last == [
            "system",
            shared("requirements", "more needs"),
            shared("designer", "design"),
            "first",
            "one",
            "second",
        ]
        clock.forward(11)
        await it.execute_query_async("third")
        assert shared("designer", "design") not in model_of(it).last
        graph.clear_published_data()
        model_of(it).answers[:] = ["four"]
        await it.execute_query_async("fourth")
        assert model_of(it).last[:2] == ["system", "first"]

    async def test_hooks_before_the_call_see_the_context(self, graph: SharedMemoryGraph) -> None:
        await graph.publish("requirements", "needs")
        it, seen = member(graph, "designer", "ok"), []
        it.on(AgentEvent.BEFORE_LLM_CALL).do(
            lambda status: seen.extend(texts(status.conversation_history))
        )
        await it.execute_query_async("go")
        assert seen[1].startswith("Shared context from requirements:")

    async def test_nothing_to_share_leaves_no_trace(self, graph: SharedMemoryGraph) -> None:
        notes = Notes()
        for agent_id in ("designer", "stranger"):
            it = member(graph, agent_id, "ok")
            await it.execute_query_async("go", recorder=notes)
            assert model_of(it).last == ["system", "go"]
        assert notes.about("injected") == notes.about("warning") == []

    async def test_agent_without_graph_or_id_shares_nothing(self, graph: SharedMemoryGraph) -> None:
        await graph.publish("requirements", "needs")
        it = agent("ok")
        it.memory_graph = graph
        await it.execute_query_async("go")
        other = agent("ok")
        other.agent_id = "designer"
        await other.execute_query_async("go")
        assert model_of(it).last == model_of(other).last == ["system", "go"]
        assert graph.publication("designer") is None

    async def test_sub_agent_that_starts_too_early_causes_one_warning(
        self, graph: SharedMemoryGraph
    ) -> None:
        await graph.publish("designer", "design")
        notes, child = Notes(), member(graph, "implementer", call("x"), "ok")
        lead = agent(ask("implementer"), "done")
        lead.register_agent(child, name="implementer", description="-")
        await lead.execute_query_async("go", recorder=notes)
        [(who, code, text)] = notes.about("warning")
        assert (who, code) == ("implementer", "predecessor_not_published")
        assert "requirements" in text
        assert "designer" not in text


class TestFence:
    def test_fence_is_the_same_for_the_same_content(self) -> None:
        assert fence("x") == fence("x") == sha256(b"x").hexdigest()[:8]

    def test_content_that_holds_its_fence_gets_a_longer_one(self) -> None:
        # Content that holds the start of its own hash, found by trying.
        text = next(t for n in range(10**6) if sha256((t := f"{n}").encode()).hexdigest()[0] in t)
        assert fence(text) not in text

    def test_unusual_unicode_is_fenced(self) -> None:
        assert len(fence("\ud800")) == 8


class TestPublication:
    async def test_accepted_answer_is_published(self, graph: SharedMemoryGraph) -> None:
        notes = Notes()
        await member(graph, "designer", "the design").execute_query_async("go", recorder=notes)
        published = graph.publication("designer")
        assert published is not None
        assert published.content == "the design"
        assert [line[1] for line in notes.lines] == ["started", "model", "published", "ended"]
        assert notes.about("published") == [("designer", "designer@1")]

    @pytest.mark.parametrize("decision", [HookDecision.RETRY, HookDecision.FAIL])
    async def test_draft_is_never_visible(
        self, graph: SharedMemoryGraph, decision: HookDecision
    ) -> None:
        graph.add_edge("requirements", "designer", "full_history")
        it = member(graph, "requirements", "draft", "final")
        seen = []
        it.on(AgentEvent.BEFORE_FINAL_RESPONSE).when(lambda s: s.iteration == 1).inject(
            human("no good")
        ).handle(decision)
        it.on(AgentEvent.QUERY_END).do(lambda s: seen.append(graph.publication("requirements")))
        await it.execute_query_async("go")
        if decision is HookDecision.FAIL:
            assert seen == [None]
            return
        [item] = graph.pull_for("designer")
        assert item.version == 1
        assert item.content == "final\n\nConversation:\nuser: go\nuser: no good"

    async def test_transformed_answer_is_published_as_transformed(
        self, graph: SharedMemoryGraph
    ) -> None:
        it = member(graph, "designer", "the design")
        it.on(AgentEvent.BEFORE_FINAL_RESPONSE).transform(
            lambda value, status: AssistantMessage(content=value.content.upper())
        )
        await it.execute_query_async("go")
        assert content_of(graph, "designer") == "THE DESIGN"

    @pytest.mark.parametrize("answer", ["", "  \n", ModelError("gone")])
    async def test_empty_answer_is_not_published(
        self, graph: SharedMemoryGraph, answer: str | Exception
    ) -> None:
        await member(graph, "designer", answer).execute_query_async("go")
        assert graph.publication("designer") is None

    async def test_exhaustion_publishes_nothing(self, graph: SharedMemoryGraph) -> None:
        said = AssistantMessage(content="partly", tool_calls=(call("x"),))
        it = member(graph, "designer", said, max_iterations=1)
        assert (await it.execute_query_async("go")).content == "partly"
        assert graph.publication("designer") is None

    @pytest.mark.parametrize(
        "event", [AgentEvent.BEFORE_LLM_CALL, AgentEvent.AFTER_LLM_CALL, AgentEvent.QUERY_START]
    )
    async def test_stop_value_is_published(
        self, graph: SharedMemoryGraph, event: AgentEvent
    ) -> None:
        it = member(graph, "designer", "x")
        it.on(event).handle(HookDecision.STOP, AssistantMessage(content="stopped"))
        await it.execute_query_async("go")
        assert content_of(graph, "designer") == "stopped"

    @pytest.mark.parametrize("config", [{"agent_comment": False}, {"exit_on_success": ["give"]}])
    async def test_tool_results_that_end_the_query_are_published(
        self, graph: SharedMemoryGraph, config: dict[str, Any]
    ) -> None:
        give = tool("give", "-")(lambda: {"a": 1})
        await member(graph, "designer", call("give"), tools=[give], **config).execute_query_async(
            "go"
        )
        assert content_of(graph, "designer") == '{"a":1}'

    async def test_orchestrator_outside_the_graph_adds_no_node(
        self, graph: SharedMemoryGraph
    ) -> None:
        notes = Notes()
        await member(graph, "lead", "done").execute_query_async("go", recorder=notes)
        assert not graph.has_node("lead")
        assert notes.about("published") == []

    async def test_policies_carry_the_content_of_their_query_only(
        self, graph: SharedMemoryGraph
    ) -> None:
        graph.add_edge("requirements", "designer", "tool_results")
        graph.add_edge("requirements", "implementer", "full_history")
        graph.add_edge("before", "requirements")
        await graph.publish("before", "context")

        @tool("note", "-")
        async def note(text: str) -> str:
            if text == "bad":
                raise ValueError("no")
            return f"noted {text}"

        it = member(
            graph, "requirements", call("note", text="one"), "first", [call("note", text="two"),
            call("note", "2", text="bad")], "second", tools=[note],
        )  # fmt: skip
        it.conversation_history.append(
            SystemMessage(content="aware", metadata={"orchestrator_awareness": True})
        )
        await it.execute_query_async("old")
        await it.execute_query_async("new")
        assert graph.pull_for("designer")[0].content == ("second\n\nTool results:\nnote: noted two")
        assert graph.pull_for("implementer")[0].content == (
            "second\n\nConversation:\n"
            "user: new\n"
            'assistant called note with {"text":"two"}\n'
            'assistant called note with {"text":"bad"}\n'
            "tool note: noted two\n"
            "tool note failed: ValueError: no"
        )

    async def test_stateless_copy_publishes_for_its_agent(self, graph: SharedMemoryGraph) -> None:
        child = member(graph, "designer", "one", "two")
        lead = agent([ask("designer", "a"), call("designer", "2", query="b")], "done")
        lead.register_agent(child, name="designer", description="-", stateless=True)
        await lead.execute_query_async("go")
        published = graph.publication("designer")
        assert published is not None
        assert published.version == 2
        assert len(child.conversation_history) == 1


def content_of(graph: SharedMemoryGraph, agent_id: str) -> str:
    published = graph.publication(agent_id)
    assert published is not None
    return published.content


async def test_memory_set_by_hand_is_read_at_run_time(graph: SharedMemoryGraph) -> None:
    await graph.publish("requirements", "needs")
    it = agent("one", "two")
    await it.execute_query_async("first")
    it.memory_graph, it.agent_id = graph, "designer"
    await it.execute_query_async([HumanMessage(content="second")])
    assert model_of(it).last == [
        "system",
        shared("requirements", "needs"),
        "first",
        "one",
        "second",
    ]
