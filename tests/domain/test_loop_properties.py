"""Properties of every query, for any model, tools and hooks."""

import asyncio
from itertools import cycle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents import (
    AgentEvent,
    AgentStatus,
    AssistantMessage,
    AssistantResponse,
    BaseAgent,
    HookDecision,
    HumanMessage,
    ModelError,
    SharedMemoryGraph,
    ToolCall,
    ToolRequirement,
    ToolResult,
    tool,
)
from bottega.agents.hooks import CONTRACTS
from bottega.agents.messages import check_history
from tests.domain.scripted import ScriptedModel, let_others_run
from tests.examples import examples

MAX = 4

NAMES = ["good", "bad", "invented", "malformed", "child"]
plain_answers = st.sampled_from(["", "text", ModelError("gone"), KeyError("bug")])
calls = st.lists(st.sampled_from([*NAMES, "thread"]), min_size=1, max_size=3)
calls_in_order = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3) | st.just(["thread"])
"""Calls whose tools end in the same order each time: a call in a thread is alone."""
answers = plain_answers | calls
deeds = st.sampled_from([*HookDecision, "raise", "inject", "inject_at", "nothing"])
plans = st.dictionaries(st.sampled_from(AgentEvent), st.lists(deeds, min_size=1, max_size=4))


class Checkpoints:
    """Counter that cancels the query at the nth checkpoint."""

    def __init__(self, cancel_at: int) -> None:
        self.left = cancel_at
        self.query: asyncio.Task[Any] | None = None

    async def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0 and self.query is not None:
            self.query.cancel()
        await let_others_run()


def message_of(names: list[str]) -> AssistantMessage:
    calls = (
        ToolCall(id="same", name=name, malformed="{" if name == "malformed" else None)
        if name != "child"
        else ToolCall(id="same", name=name, arguments={"query": "go"})
        for name in names
    )
    return AssistantMessage(content="thinking", tool_calls=tuple(calls))


def endless(script: list[Any], points: Checkpoints) -> ScriptedModel:
    """Build a model that repeats the script for ever."""
    said = cycle(script)

    async def say(messages: Any) -> Any:
        await points.pass_by()
        answer = next(said)
        return message_of(answer) if isinstance(answer, list) else answer

    return ScriptedModel(*[say] * 100)


def tools_of(points: Checkpoints) -> list[Any]:
    @tool("good", "-")
    async def good() -> str:
        await points.pass_by()
        return "well"

    @tool("bad", "-")
    async def bad() -> str:
        await points.pass_by()
        raise ValueError("no")

    return [good, bad, tool("thread", "-")(lambda: 1), tool("malformed", "-")(lambda: 1)]


VALUES: dict[type | None, Any] = {
    None: None,
    AssistantMessage: AssistantMessage(content="hooked"),
    ToolCall: ToolCall(id="x", name="good"),
    ToolResult: ToolResult(tool_call_id="x", tool_name="x", result="hooked"),
    AssistantResponse: AssistantResponse(content="hooked"),
}


def plant(agent: BaseAgent, event: AgentEvent, plan: list[Any]) -> None:
    """Add hooks that follow ``plan``, one action each time the event fires."""
    contract = CONTRACTS[event]
    turns = cycle(plan)
    now: list[Any] = [None]

    def turn(status: AgentStatus) -> None:
        now[0] = next(turns)
        if now[0] == "raise":
            raise RuntimeError("hook")

    def is_now(deed: Any) -> Any:
        return lambda status: now[0] == deed

    def note(status: AgentStatus) -> HumanMessage:
        return HumanMessage(content="note")

    agent.on(event).do(turn)
    agent.on(event).when(is_now("inject")).inject(note)
    agent.on(event).when(is_now("inject_at")).inject_at(-2, note)
    agent.on(event).when(is_now(HookDecision.CONTINUE)).handle(
        HookDecision.CONTINUE, VALUES[contract.output_type]
    )
    agent.on(event).when(is_now(HookDecision.FAIL)).handle(HookDecision.FAIL)
    if contract.retry:
        agent.on(event).when(is_now(HookDecision.RETRY)).handle(HookDecision.RETRY)
    if contract.stop_type:
        agent.on(event).when(is_now(HookDecision.STOP)).handle(
            HookDecision.STOP, VALUES[contract.stop_type]
        )


def build(script: list[Any], plan: dict[AgentEvent, list[Any]], points: Checkpoints) -> BaseAgent:
    graph = SharedMemoryGraph()
    graph.add_edge("child", "lead", "full_history")
    child = BaseAgent("s", provider=endless(["child text", ["good"]], points), max_iterations=2)
    for tool_ in tools_of(points):
        child.register_tool(tool_)
    lead = BaseAgent(
        "s",
        provider=endless(script, points),
        max_iterations=MAX,
        tools=tools_of(points),
        tool_policy=[ToolRequirement("good")],
        exit_on_success=["thread"],
    )
    lead.register_agent(child, name="child", description="-")
    lead.memory_graph = child.memory_graph = graph
    lead.agent_id, child.agent_id = "lead", "child"
    for event, deeds_of_event in plan.items():
        plant(lead, event, deeds_of_event)
    return lead


@given(st.lists(answers, min_size=1, max_size=5), plans, st.integers(0, 12))
@settings(max_examples=examples(300), deadline=None)
def test_query_ends_within_its_budget_with_a_valid_history(
    script: list[Any], plan: dict[AgentEvent, list[Any]], cancel_at: int
) -> None:
    async def main() -> None:
        points = Checkpoints(cancel_at)
        lead = build(script, plan, points)
        ends: list[AgentStatus] = []
        first = lead.on(AgentEvent.QUERY_END).do(ends.append)
        lead.hooks[AgentEvent.QUERY_END].remove(first)
        lead.hooks[AgentEvent.QUERY_END].insert(0, first)
        before = asyncio.all_tasks()
        for number in range(1, 3):
            points.query = asyncio.create_task(lead.execute_query_async(f"query {number}"))
            await asyncio.wait([points.query])
            assert asyncio.all_tasks() == before
            assert len(ends) == number
            assert len(model_calls(lead)) <= MAX * number
            for agent in (lead, *lead.subagents):
                check_history(agent.conversation_history)
            if points.query.cancelled():
                continue
            response = points.query.result()
            assert isinstance(response, AssistantResponse)
            assert lead.usage.model_calls >= response.usage.model_calls
            assert (response.stop_reason in ("error", "max_iterations", "empty")) == (
                response.error is not None
            )

    asyncio.run(main())


def model_calls(agent: BaseAgent) -> list[Any]:
    assert isinstance(agent.provider, ScriptedModel)
    return agent.provider.requests


async def history(script: list[Any], plan: dict[AgentEvent, list[Any]]) -> list[Any]:
    lead = build(script, plan, Checkpoints(0))
    response = await lead.execute_query_async("go")
    messages = [each.model_dump(exclude={"timestamp"}) for each in lead.conversation_history]
    return [messages, response]


@given(st.lists(plain_answers | calls_in_order, min_size=1, max_size=5), plans)
@settings(max_examples=examples(100), deadline=None)
def test_same_answers_give_the_same_history(
    script: list[Any], plan: dict[AgentEvent, list[Any]]
) -> None:
    """Check that tools end in the same order too, since hooks run in that order."""
    assert asyncio.run(history(script, plan)) == asyncio.run(history(script, plan))


@given(st.lists(answers, min_size=1, max_size=5))
@settings(max_examples=examples(100), deadline=None)
def test_results_have_the_order_of_their_calls_whenever_threads_end(script: list[Any]) -> None:
    assert asyncio.run(history(script, {})) == asyncio.run(history(script, {}))
