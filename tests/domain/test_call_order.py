"""The order of calls to sub-agents within one message."""

from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    BaseAgent,
    HookContractError,
    HookDecision,
    ModelError,
    SharedMemoryGraph,
)
from tests.domain.scripted import (
    Notes,
    agent,
    answers_in,
    ask,
    let_others_run,
    model_of,
    team,
)


def graph_of(*edges: str) -> SharedMemoryGraph:
    graph = SharedMemoryGraph()
    for edge in edges:
        graph.add_edge(*edge.split(">"))
    return graph


class TestOrder:
    """Calls in one message to sub-agents that a path of the graph links."""

    def order_of(
        self, graph: SharedMemoryGraph, *asked: str, stateless: bool = True
    ) -> tuple[BaseAgent, list[str]]:
        order: list[str] = []

        def answering(name: str) -> Any:
            async def answer(messages: Any) -> str:
                order.append(f"+{name}")
                await let_others_run()
                order.append(f"-{name}")
                return f"{name}'s"

            return answer

        members = {name: agent(answering(name)) for name in asked}
        lead = team([ask(name) for name in asked], "done", stateless=stateless, **members)
        for member in members.values():
            member.memory_graph = graph
        return lead, order

    async def test_dependent_calls_run_in_dependency_order_and_pass_context(self) -> None:
        lead, order = self.order_of(graph_of("a>b", "b>c"), "c", "a", "b")
        await lead.execute_query_async("go")
        assert order == ["+a", "-a", "+b", "-b", "+c", "-c"]
        assert answers_in(lead) == ["c's", "a's", "b's"]

    async def test_path_through_uncalled_nodes_counts(self) -> None:
        lead, order = self.order_of(graph_of("a>x", "x>y", "y>c"), "c", "a")
        await lead.execute_query_async("go")
        assert order == ["+a", "-a", "+c", "-c"]

    async def test_independent_calls_run_side_by_side(self) -> None:
        lead, order = self.order_of(graph_of("a>c", "b>c"), "c", "a", "b")
        await lead.execute_query_async("go")
        assert order == ["+a", "+b", "-a", "-b", "+c", "-c"]

    async def test_failed_predecessor_does_not_block_the_next_but_warns(self) -> None:
        lead, order = self.order_of(graph_of("a>b"), "b", "a")
        child = lead.subagents[1]
        model_of(child).answers[:] = [ModelError("gone")]
        notes = Notes()
        await lead.execute_query_async("go", recorder=notes)
        assert order == ["+b", "-b"]
        [(who, code, text)] = notes.about("warning")
        assert (who, code) == ("b", "predecessor_not_published")
        assert "a" in text

    async def test_later_message_gets_the_context_that_an_earlier_one_published(self) -> None:
        graph = graph_of("a>b")
        a, b = agent("from a"), agent("from b")
        lead = team(ask("a"), ask("b"), "done", a=a, b=b)
        a.memory_graph = b.memory_graph = graph
        notes = Notes()
        await lead.execute_query_async("go", recorder=notes)
        assert notes.about("warning") == []
        assert notes.about("injected") == [("b", "a@1")]

    async def test_predecessor_that_breaks_the_query_starts_no_other_call(self) -> None:
        lead, order = self.order_of(graph_of("a>b"), "b", "a")
        lead.subagents[1].on(AgentEvent.QUERY_START).handle(HookDecision.RETRY)
        with pytest.raises(HookContractError):
            await lead.execute_query_async("go")
        assert order == []
