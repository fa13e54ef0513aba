"""What the demo model answers: a pure function of the request."""

from typing import Any

from bottega.llm.demo_model import coordinator, dispatcher, specialist, toolbox
from bottega.llm.demo_model.conversation import Answer, read


def decide(request: dict[str, Any]) -> Answer:
    """Answer a request.

    With tools that are agents it coordinates them, with tools that dispatch tasks it does that;
    other tools it calls when the user's text asks for it; else it is a specialist, who works with
    what was shared with it.

    Args:
        request: body of a Chat Completions request that has passed ``checks.problem``.
    """
    conversation = read(request)
    if dispatcher.coordinates(conversation):
        calls = toolbox.next_calls(conversation) or dispatcher.next_calls(conversation)
        return Answer(calls=calls) if calls else Answer(dispatcher.report(conversation))
    if calls := coordinator.next_calls(conversation):
        return Answer(calls=calls)
    if calls := toolbox.next_calls(conversation):
        return Answer(calls=calls)
    if any(tool.is_agent for tool in conversation.tools):
        return Answer(coordinator.summary(conversation))
    text = specialist.answer(conversation)
    if results := toolbox.results(conversation):
        text = f"{text}\n\n{results}" if specialist.knows(conversation) else results
    return Answer(text)
