"""Messages that users send while a query is under way."""

from bottega.agents import (
    AgentEvent,
    AssistantMessage,
    HookDecision,
    HumanMessage,
    Query,
    Recorder,
    tool,
)
from tests.domain.scripted import agent, call, model_of, shape


@tool("add", "Adds two numbers.")
def add(a: int, b: int) -> int:
    return a + b


class Inbox:
    """Messages by the number of model calls after which they come in."""

    def __init__(self, sent: dict[int, list[str]]) -> None:
        self.sent = sent
        self.asked: list[tuple[int, bool]] = []

    def due(self, query: Query, *, answered: bool) -> list[HumanMessage]:
        self.asked.append((query.model_calls, answered))
        return [HumanMessage(content=said) for said in self.sent.pop(query.model_calls, [])]


def with_inbox(sent: dict[int, list[str]]) -> Recorder:
    recorder = Recorder()
    recorder.inbox = Inbox(sent)
    return recorder


async def test_messages_come_before_the_next_call() -> None:
    lead = agent(call("add", a=1, b=2), "done", tools=[add])
    await lead.execute_query_async("go", recorder=with_inbox({0: ["early"], 1: ["stop", "now"]}))
    assert shape(lead) == [
        "user: go",
        "user: early",
        "assistant: ->add",
        "tool: 3",
        "user: stop",
        "user: now",
        "assistant: done",
    ]


async def test_a_message_that_comes_with_the_answer_makes_another_call() -> None:
    lead = agent("one", "two", max_iterations=1)
    response = await lead.execute_query_async("go", recorder=with_inbox({1: ["and?"]}))
    assert response.content == "two"
    assert shape(lead) == ["user: go", "assistant: one", "user: and?", "assistant: two"]


async def test_a_message_restarts_the_count_of_iterations() -> None:
    lead = agent(*[call("add", a=1, b=2)] * 5, tools=[add], max_iterations=2)
    response = await lead.execute_query_async("go", recorder=with_inbox({2: ["go on"]}))
    assert response.stop_reason == "max_iterations"
    assert len(model_of(lead).requests) == 4


async def test_no_message_comes_between_the_parts_of_an_answer() -> None:
    cut = AssistantMessage(content="half ", metadata={"finish_reason": "length"})
    lead = agent(cut, "whole", "again")
    recorder = with_inbox({2: ["and?"]})
    response = await lead.execute_query_async("go", recorder=recorder)
    assert response.content == "again"
    assert shape(lead)[1:3] == ["assistant: half whole", "user: and?"]
    assert isinstance(recorder.inbox, Inbox)
    assert recorder.inbox.asked == [(0, False), (2, True), (3, True)]


async def test_a_hook_that_stops_between_the_parts_of_an_answer_keeps_no_message_back() -> None:
    cut = AssistantMessage(content="half ", metadata={"finish_reason": "length"})
    lead = agent(cut)
    hook = lead.on(AgentEvent.BEFORE_LLM_CALL).when(lambda status: status.iteration >= 2)
    hook.handle(HookDecision.STOP, AssistantMessage(content="enough"))
    recorder = with_inbox({1: ["and?"]})
    await lead.execute_query_async("go", recorder=recorder)
    assert isinstance(recorder.inbox, Inbox)
    assert not recorder.inbox.sent  # otherwise the run could never complete
