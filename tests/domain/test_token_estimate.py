"""What a model call is expected to send (spec page 3, S14)."""

from bottega.agents import AssistantMessage, BaseAgent, HumanMessage, Query, Recorder
from bottega.subagents.ledger import estimate
from tests.domain.scripted import call


def test_what_the_model_wrote_into_files_is_sent_again_with_each_call() -> None:
    agent = BaseAgent("You help.")
    query = Query(agent, (), Recorder())
    agent.conversation_history.append(HumanMessage(content="go"))
    before = estimate(query)
    written = call("write_file", path="a", content="words " * 5_000)
    agent.conversation_history.append(AssistantMessage(tool_calls=(written,)))
    assert estimate(query) - before >= 30_000 // 4
