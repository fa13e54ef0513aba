"""The usage of a model call whose server does not report it."""

from pydantic_core import to_json

from app.agents.messages import AssistantMessage, ToolCall
from app.agents.tokens import size_of, tokens_in


def with_usage(message: AssistantMessage, sent: int) -> AssistantMessage:
    """Fill in the tokens that the server did not report, and mark the usage as estimated. Pure.

    Args:
        sent: size of the request's body, in bytes.
    """
    usage = message.usage
    received = size_of(message.content) + sum(map(_size_of_call, message.tool_calls))
    if usage.input and (usage.output or not received):
        return message
    filled = {
        "input": usage.input or tokens_in(sent),
        "output": usage.output or tokens_in(received),
        "estimated": True,
    }
    return message.model_copy(update={"usage": usage.model_copy(update=filled)})


def _size_of_call(call: ToolCall) -> int:
    if call.malformed is not None:
        return size_of(call.name) + size_of(call.malformed)
    return size_of(call.name) + len(to_json(call.arguments))
