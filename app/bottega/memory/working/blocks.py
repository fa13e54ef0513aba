"""Blocks of a conversation for the working memory: messages that stay or leave together.

Pure. Messages of the history never change; a shortened one is a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bottega.agents.messages import (
    SHARED_MEMORY,
    AssistantMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolStatus,
)
from bottega.agents.parts import parts_tokens
from bottega.agents.provider import ToolSchema
from bottega.agents.shared_memory import AWARENESS
from bottega.graph.rendering import as_text
from bottega.memory.text.summaries import TokenCounter, summary_of

SUMMARY_TOKENS = 48
"""Tokens of the summary that replaces a tool result."""
_PER_MESSAGE = 4  # role, ids and brackets


@dataclass(slots=True)
class PromptMessage:
    """Message of the history, and the form of it that a model sees.

    Attributes:
        sent: replaces ``message`` in the prompt.
        reference: recalls the full message; ``None`` if that is impossible.
        label: the tool call that the message answers.
    """

    message: StandardMessage
    sent: StandardMessage
    tokens: int
    reference: str | None = None
    label: str = ""
    left: bool = False

    @property
    def is_shrunk(self) -> bool:
        return self.sent is not self.message

    def shrink(self, count: TokenCounter) -> int:
        """Replace a tool result by its summary; return the tokens saved."""
        if not isinstance(self.message, ToolMessage) or self.reference is None:
            return 0
        if self.is_shrunk or self.tokens <= SUMMARY_TOKENS:
            return 0
        summary = summary_of(body_of(self.message), SUMMARY_TOKENS, count)
        text = f'[shortened; recall_memory("{self.reference}") returns all of it]\n{summary}'
        short = _saying(self.message, text)
        if (saved := self.tokens - tokens_of(short, count)) <= 0:
            return 0
        self.sent = short
        self.tokens -= saved
        return saved


@dataclass(slots=True)
class Block:
    """Messages that leave together: one with tool calls and their results, or any other alone."""

    messages: list[PromptMessage]
    pinned: bool

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        first = self.messages[0].message
        return first.tool_calls if isinstance(first, AssistantMessage) else ()

    @property
    def left(self) -> bool:
        return self.messages[0].left

    def shrink(self, count: TokenCounter) -> int:
        """Replace tool results by summaries; return the tokens saved."""
        return sum(each.shrink(count) for each in self.messages)

    def leave(self) -> int:
        """Mark the block as no longer shown; return the tokens saved."""
        for each in self.messages:
            each.left = True
        return sum(each.tokens for each in self.messages)


def blocks_of(messages: Sequence[PromptMessage], pinned: set[int]) -> list[Block]:
    """Split a part of a history into blocks; it must begin with a block.

    Args:
        pinned: the ``id()`` of messages that always stay.
    """
    blocks: list[Block] = []
    for each in messages:
        if blocks and isinstance(each.message, ToolMessage):
            blocks[-1].messages.append(each)
        else:
            blocks.append(Block([each], id(each.message) in pinned))
    return blocks


def head_of(history: Sequence[StandardMessage]) -> int:
    """Count the messages at the start that an agent always needs.

    These are its own system message, the description of its sub-agents, and shared context."""
    for index, message in enumerate(history):
        is_own = isinstance(message, SystemMessage) and (
            index == 0 or AWARENESS in message.metadata or SHARED_MEMORY in message.metadata
        )
        if not is_own:
            return index
    return len(history)


def tokens_of(message: StandardMessage, count: TokenCounter) -> int:
    """Estimate the tokens of a message."""
    tokens = parts_tokens(message.parts)
    if isinstance(message, ToolMessage):
        return tokens + count(body_of(message)) + _PER_MESSAGE * max(len(message.tool_results), 1)
    tokens += count(message.content) + _PER_MESSAGE
    if isinstance(message, AssistantMessage):
        for call in message.tool_calls:
            said = as_text(call.arguments) if call.malformed is None else call.malformed
            tokens += count(call.name) + count(said) + _PER_MESSAGE
        if message.state:  # the provider's data for the next call, such as reasoning
            tokens += count(as_text(message.state))
    return tokens


def schema_tokens(schemas: Sequence[ToolSchema], count: TokenCounter) -> int:
    """Estimate the tokens of tool schemas."""
    return sum(
        count(schema.name)
        + count(schema.description)
        + count(as_text(schema.parameters))
        + _PER_MESSAGE
        for schema in schemas
    )


def body_of(message: ToolMessage) -> str:
    """Return the text of a tool message as a model reads it."""
    return message.content or "\n".join(result.text for result in message.tool_results)


def _saying(message: ToolMessage, text: str) -> ToolMessage:
    """Copy a tool message with another text for the same calls."""
    results = []
    for result in message.tool_results:
        field = "error" if result.status is ToolStatus.ERROR else "result"
        change = {"result": None, "error": None, "parts": (), field: text}
        results.append(result.model_copy(update=change))
    said = {"content": text, "parts": (), "tool_results": tuple(results)}
    return message.model_copy(update=said)
