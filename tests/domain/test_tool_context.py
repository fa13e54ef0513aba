"""Context of tool calls, and annotations by tools and hooks."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest

from bottega.agents import (
    AgentEvent,
    Caller,
    CancelScope,
    SharedMemoryGraph,
    ToolContext,
    ToolStatus,
    tool,
)
from bottega.agents.query import task_id_at
from bottega.errors import InvalidInputError
from tests.domain.scripted import agent, ask, call, team
from tests.waiting import until

ADA = Caller(uuid4(), "acme", "ada", "s1")


def noting(seen: list[ToolContext], name: str = "note") -> Any:
    @tool(name=name, description="Notes a text.")
    def note(text: str, context: ToolContext) -> str:
        seen.append(context)
        return text

    return note


async def test_tool_learns_for_whom_it_works_and_its_schema_does_not_say_so() -> None:
    seen: list[ToolContext] = []
    note = noting(seen)
    assert set(note.create_schema()["properties"]) == {"text"}
    it = agent(call("note", text="hi"), "done", tools=[note], agent_name="it")
    response = await it.execute_query_async("go", caller=ADA)
    assert response.tool_results[0].result == "hi"
    (context,) = seen
    assert (context.run_id, context.tenant, context.user, context.session_id) == (
        ADA.run_id,
        "acme",
        "ada",
        "s1",
    )
    assert (context.agent, context.task_id) == ("it", None)
    assert context.tool_call_id == response.tool_results[0].tool_call_id


async def test_tool_of_a_sub_agent_has_its_task_and_the_caller_of_the_root() -> None:
    seen: list[ToolContext] = []
    reader = agent(call("note", text="x"), "read", tools=[noting(seen)])
    lead = team(ask("reader", "go"), "done", reader=reader)
    async for _ in lead.stream("go", caller=ADA):
        pass
    assert isinstance(ADA.run_id, UUID)
    assert [each.task_id for each in seen] == [task_id_at(ADA.run_id, ((1, 0),))]
    assert seen[0].user == "ada"


async def test_a_model_cannot_give_the_context() -> None:
    it = agent(call("note", text="hi", context={"user": "root"}), "done", tools=[noting([])])
    (result,) = (await it.execute_query_async("go")).tool_results
    assert result.status is ToolStatus.ERROR
    assert "context" in str(result.error)


async def test_class_takes_the_context_in_execute() -> None:
    @tool(name="greet", description="Greets.")
    @dataclass
    class Greet:
        word: str

        async def execute(self, context: ToolContext | None = None) -> str:
            return f"{self.word} {context and context.user}"

    it = agent(call("greet", word="hi"), "done", tools=[Greet])
    (result,) = (await it.execute_query_async("go", caller=ADA)).tool_results
    assert result.result == "hi ada"


def test_field_for_the_context_is_refused_with_the_way_out() -> None:
    class Wrong:
        context: ToolContext

        def execute(self) -> None: ...

    with pytest.raises(TypeError, match=r"declare execute\(self, context"):
        tool(name="wrong", description="Wrong.")(Wrong)


async def test_thread_of_a_timed_out_tool_learns_that_it_may_stop() -> None:
    stopped = threading.Event()

    @tool(name="slow", description="Works for long.", timeout_s=0.05)
    def slow(cancel_in: ToolContext) -> None:
        if cancel_in.cancel.wait(30):
            stopped.set()

    it = agent(call("slow"), "done", tools=[slow])
    (result,) = (await it.execute_query_async("go")).tool_results
    assert "timed out" in str(result.error)
    await until(stopped.is_set)


def test_scope_says_that_a_call_is_over() -> None:
    scope = CancelScope()
    assert (scope.is_cancelled, scope.wait(0)) == (False, False)
    scope.cancel()
    assert (scope.is_cancelled, scope.wait(30)) == (True, True)


async def test_tools_and_hooks_annotate_what_is_published() -> None:
    @tool(name="look", description="Looks up.")
    def look(context: ToolContext) -> str:
        context.annotate(source="web", pages=[1, 2])
        return "found"

    @tool(name="broken", description="Breaks.")
    def broken(context: ToolContext) -> str:
        context.annotate(broken=True)
        raise ValueError("no")

    it = agent([call("look"), call("broken")], "done")
    it.register_tool(look)
    it.register_tool(broken)
    it.memory_graph, it.agent_id = SharedMemoryGraph(), "it"
    it.memory_graph.add_edge("it", "next")
    it.on(AgentEvent.BEFORE_FINAL_RESPONSE).do(lambda status: status.annotate(pages=2))
    await it.execute_query_async("go")
    (item,) = it.memory_graph.pull_for("next")
    assert item.metadata == {"source": "web", "pages": 2}
    restored = SharedMemoryGraph.from_dict(it.memory_graph.to_dict())
    assert restored.pull_for("next")[0].metadata == item.metadata


@pytest.mark.parametrize(
    ("value", "text"), [(object(), "JSON values"), ("x" * 9000, "8,192 are allowed")]
)
def test_bad_annotations_are_refused(value: object, text: str) -> None:
    context = ToolContext()
    context.annotate(good=1)
    with pytest.raises(InvalidInputError, match=text):
        context.annotate(bad=value)
    assert context.annotations == {"good": 1}


async def test_hooks_are_not_replayed_without_a_journal() -> None:
    seen = []
    it = agent("done")
    for event in (AgentEvent.BEFORE_LLM_CALL, AgentEvent.QUERY_END):
        it.on(event).do(lambda status: seen.append(status.replayed))
    await it.execute_query_async("go")
    assert seen == [False, False]


def test_publications_from_several_threads_all_count() -> None:
    graph = SharedMemoryGraph()
    graph.add_edge("a", "reader")
    failures: list[Exception] = []

    def publish(number: int) -> None:
        async def all_of_them() -> None:
            for turn in range(100):
                await graph.publish("a", f"{number} {turn}")
                await graph.publish(f"new {number} {turn}", "x")
                graph.pull_for("reader")
                graph.get_topological_order()

        try:
            asyncio.run(all_of_them())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    published = graph.publication("a")
    assert published is not None
    assert published.version == 400
    assert len(graph.nodes) == 402
    assert graph.pull_for("reader")[0].content == published.content
