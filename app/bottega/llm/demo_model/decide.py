"""The demo model's decision: a pure function from request to answer."""

from typing import Any

from bottega.llm.demo_model import content, coordinator, dispatcher, specialist, toolbox
from bottega.llm.demo_model.conversation import Answer, Conversation, read
from bottega.llm.dialects.schemas import ANSWER_TOOL


def decide(request: dict[str, Any]) -> Answer:
    """Answer a request, in the form of its schema if it has one.

    An image is described in front of the answer.

    Args:
        request: body of a Chat Completions request that passes ``checks.problem``.
    """
    conversation = read(request)
    schema = content.demanded(request, conversation)
    by_tool = any(tool.name == ANSWER_TOOL for tool in conversation.tools)
    answer = _decided(content.without_answer_tool(conversation) if by_tool else conversation)
    if conversation.must_call and not by_tool and not answer.calls:
        answer = Answer(calls=(toolbox.call(conversation.tools[0], conversation.asked),))
    if answer.calls:
        return answer
    text = "\n\n".join(filter(None, [content.images(request["messages"]), answer.text]))
    return Answer(text) if schema is None else content.filled_in(schema, text, by_tool=by_tool)


def _decided(conversation: Conversation) -> Answer:
    """Decide what to say or to call.

    It dispatches tasks if it has the tools for that, or coordinates tools that are agents. Other
    tools it calls if the user's text asks for them. Else it answers as a specialist, from the
    shared context.
    """
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
