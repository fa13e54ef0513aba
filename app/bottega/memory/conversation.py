"""A history as the working memory sees it: blocks that stay or leave together (spec page 4, M7).

Pure. Nothing here changes a message of the history; what is shown in its place is a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bottega.agents.messages import (
    SHARED_MEMORY,
    AssistantMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolStatus,
)
from bottega.agents.provider import ToolSchema
from bottega.agents.sharing import AWARENESS
from bottega.graph.rendering import as_text
from bottega.memory.summaries import TokenCounter, summary_of

SUMMARY_TOKENS = 48
"""Of what stays of a tool's answer that was shortened."""
_PER_MESSAGE = 4  # role, ids and brackets


@dataclass(slots=True)
class Shown:
    """A message of the history and what is shown of it.

    Attributes:
        message: as it stands in the history.
        shown: what a model is given in its place.
        tokens: of what is shown.
        reference: by which the whole can be recalled; ``None``: not at all.
        label: what it answers.
    """

    message: StandardMessage
    shown: StandardMessage
    tokens: int
    reference: str | None = None
    label: str = ""
    left: bool = False
    _short: ToolMessage | None = None

    @property
    def is_shrunk(self) -> bool:
        return self.shown is not self.message

    def prepare(self, count: TokenCounter) -> None:
        """Summarise a tool's answer, for when it shrinks."""
        if not isinstance(self.message, ToolMessage) or self._short is not None:
            return
        summary = summary_of(body_of(self.message), SUMMARY_TOKENS, count)
        text = f'[shortened; recall_memory("{self.reference}") returns all of it]\n{summary}'
        self._short = _saying(self.message, text)

    def shrink(self, count: TokenCounter) -> int:
        """Show a summary of a tool's answer; answers how many tokens that saves."""
        if self.reference is None or self.is_shrunk:
            return 0
        self.prepare(count)
        if self._short is None or (saved := self.tokens - tokens_of(self._short, count)) <= 0:
            return 0
        self.shown = self._short
        self.tokens -= saved
        return saved


@dataclass(slots=True)
class Block:
    """Messages that leave together or not at all: a message with tool calls and their answers, or
    any other one by itself."""

    messages: list[Shown] = field(default_factory=list)
    pinned: bool = False

    @property
    def has_calls(self) -> bool:
        first = self.messages[0].message
        return isinstance(first, AssistantMessage) and bool(first.tool_calls)

    @property
    def left(self) -> bool:
        return self.messages[0].left

    def shrink(self, count: TokenCounter) -> int:
        """Shrink its tools' answers; answers how many tokens that saves."""
        return sum(each.shrink(count) for each in self.messages)

    def leave(self) -> int:
        """Be shown no more; answers how many tokens that saves."""
        for each in self.messages:
            each.left = True
        return sum(each.tokens for each in self.messages)

    def calls(self) -> dict[str, ToolCall]:
        """Its calls by id."""
        first = self.messages[0].message
        calls = first.tool_calls if isinstance(first, AssistantMessage) else ()
        return {call.id: call for call in calls}


def blocks_of(messages: Sequence[Shown], pinned: set[int]) -> Iterator[Block]:
    """The blocks of a part of a history that begins with one.

    Args:
        pinned: the ids (``id()``) of messages that always stay.
    """
    block: Block | None = None
    for each in messages:
        if block is not None and isinstance(each.message, ToolMessage):
            block.messages.append(each)
            continue
        if block is not None:
            yield block
        block = Block([each], id(each.message) in pinned)
    if block is not None:
        yield block


def head_of(history: Sequence[StandardMessage]) -> int:
    """How many messages at the beginning are the agent's own system message, what it is told of
    its sub-agents, and shared context."""
    for index, message in enumerate(history):
        is_own = isinstance(message, SystemMessage) and (
            index == 0 or AWARENESS in message.metadata or SHARED_MEMORY in message.metadata
        )
        if not is_own:
            return index
    return len(history)


def tokens_of(message: StandardMessage, count: TokenCounter) -> int:
    """About how many tokens a message takes."""
    if isinstance(message, ToolMessage):
        return count(body_of(message)) + _PER_MESSAGE * max(len(message.tool_results), 1)
    tokens = count(message.content) + _PER_MESSAGE
    if isinstance(message, AssistantMessage):
        for call in message.tool_calls:
            said = as_text(call.arguments) if call.malformed is None else call.malformed
            tokens += count(call.name) + count(said) + _PER_MESSAGE
        if message.state:  # what a model wants to see again of itself
            tokens += count(as_text(message.state))
    return tokens


def schema_tokens(schemas: Sequence[ToolSchema], count: TokenCounter) -> int:
    """About how many tokens the schemas of tools take."""
    return sum(
        count(schema.name)
        + count(schema.description)
        + count(as_text(schema.parameters))
        + _PER_MESSAGE
        for schema in schemas
    )


def body_of(message: ToolMessage) -> str:
    """The text that a model reads of a tool message."""
    results = message.tool_results
    if len(results) == 1 and message.content:
        return message.content
    return "\n".join(result.text for result in results) or message.content


def _saying(message: ToolMessage, text: str) -> ToolMessage:
    """The message with another text, still answering the same calls."""
    results = []
    for index, result in enumerate(message.tool_results):
        says = text if index == 0 else "[see above]"
        failed = result.status is ToolStatus.ERROR
        change = {"result": None, "error": says} if failed else {"result": says, "error": None}
        results.append(result.model_copy(update=change))
    return ToolMessage(
        content=text,
        timestamp=message.timestamp,
        metadata=message.metadata,
        tool_results=tuple(results),
    )
