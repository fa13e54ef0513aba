"""The demo model's decision: a pure function from request to answer."""

from typing import Any

from bottega.llm.demo_model import coordinator, dispatcher, specialist, toolbox
from bottega.llm.demo_model.conversation import Answer, read


def decide(request: dict[str, Any]) -> Answer:
    """Answer a request.

    It dispatches tasks if it has the tools for that, or coordinates tools that are agents. Other
    tools it calls if the user's text asks for them. Else it answers as a specialist, from the
    shared context.

    Args:
        request: body of a Chat Completions request that passes ``checks.problem``.
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
        text = f"{text}\n\n{results}" if specialist.has_context(conversation) else results
    return Answer(text)
