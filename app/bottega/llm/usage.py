"""Estimates of the tokens that a server did not report."""

from collections.abc import Callable
from dataclasses import replace

from pydantic_core import to_json

from bottega.agents.messages import AssistantMessage, ToolCall
from bottega.agents.tokens import size_of, tokens_in


def with_usage(
    message: AssistantMessage, sent: Callable[[], int], hidden: Callable[[], int] = lambda: 0
) -> AssistantMessage:
    """Estimate the tokens that the server did not report, and mark the usage as estimated.

    Args:
        sent: measures the request, in bytes of text.
        hidden: measures reasoning and the like, beside text and calls, in bytes.
    """
    usage = message.usage
    if usage.input and usage.output:
        return message
    spoken = size_of(message.content) + sum(map(_size_of_call, message.tool_calls))
    thought = hidden()
    if usage.input and not (spoken or thought):
        return message
    filled = replace(usage, input=usage.input or tokens_in(sent()), estimated=True)
    if not usage.output:
        reasoning = tokens_in(thought)
        filled = replace(filled, output=tokens_in(spoken + thought), reasoning=reasoning)
    return message.model_copy(update={"usage": filled})


def _size_of_call(call: ToolCall) -> int:
    if call.malformed is not None:
        return size_of(call.name) + size_of(call.malformed)
    return size_of(call.name) + len(to_json(call.arguments))
