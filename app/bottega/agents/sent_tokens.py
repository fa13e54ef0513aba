"""The one estimate of the tokens that a model call sends, for budgets and for limits of servers."""

from collections.abc import Iterable

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.agents.parts import parts_tokens
from bottega.agents.tokens import size_of, tokens_in

_PER_MESSAGE = 4
_PER_TOOL = 100


def tokens_sent(messages: Iterable[StandardMessage], tools: int) -> int:
    """Estimate the tokens of a call's input.

    Args:
        tools: number of tools that the model may call.
    """
    return sum(map(_tokens_of, messages)) + _PER_TOOL * tools


def _tokens_of(message: StandardMessage) -> int:
    calls = message.tool_calls if isinstance(message, AssistantMessage) else ()
    arguments = sum(len(str(call.arguments)) for call in calls)  # large if one wrote a file
    size = size_of(message.content) + arguments
    return tokens_in(size) + parts_tokens(message.parts) + _PER_MESSAGE
