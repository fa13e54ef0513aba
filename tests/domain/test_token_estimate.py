"""The expected input tokens of a model call."""

from bottega.agents import AssistantMessage, BaseAgent, HumanMessage, Query, Recorder
from bottega.subagents.budget import estimate
from tests.domain.scripted import call


def test_file_contents_that_the_model_wrote_count_in_every_call() -> None:
    agent = BaseAgent("You help.")
    query = Query(agent, (), Recorder())
    agent.conversation_history.append(HumanMessage(content="go"))
    before = estimate(query)
    written = call("write_file", path="a", content="words " * 5_000)
    agent.conversation_history.append(AssistantMessage(tool_calls=(written,)))
    assert estimate(query) - before >= 30_000 // 4
