"""Publications of agents, and their form for a reader."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from bottega.graph.rendering import (
    MessageLike,
    ToolResultLike,
    message_lines,
    tool_result_lines,
    with_section,
)


class PropagationPolicy(StrEnum):
    """The part of a publication that an edge passes on."""

    FINAL_RESPONSE_ONLY = "final_response_only"
    TOOL_RESULTS = "tool_results"
    FULL_HISTORY = "full_history"


@dataclass(frozen=True, slots=True)
class Publication:
    """A published answer of an agent.

    Attributes:
        content: the accepted final answer.
        metadata: about it, of JSON values; no reader's prompt has it.
        version: 1 for the agent's first publication, plus one for each further one.
        tool_results: the query's tool results, as text or objects like tool results.
        messages: the query's messages without the final answer, as text or message-like objects.
    """

    agent_id: str
    content: str
    version: int
    timestamp: datetime
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tool_results: tuple[str | ToolResultLike, ...] = ()
    messages: tuple[str | MessageLike, ...] = ()

    def text_for(self, policy: PropagationPolicy) -> str:
        """Render the publication for a reader along an edge of this policy."""
        if policy is PropagationPolicy.TOOL_RESULTS:
            return with_section(self.content, "Tool results", tool_result_lines(self.tool_results))
        if policy is PropagationPolicy.FULL_HISTORY:
            return with_section(self.content, "Conversation", message_lines(self.messages))
        return self.content

    def to_dict(self) -> dict[str, Any]:
        """Return the publication as JSON; tool results and messages are rendered as lines."""
        return {
            "content": self.content,
            "version": self.version,
            "timestamp": self.timestamp.isoformat(),
            "metadata": dict(self.metadata),
            "tool_results": list(tool_result_lines(self.tool_results)),
            "messages": list(message_lines(self.messages)),
        }

    @classmethod
    def from_dict(cls, agent_id: str, data: Mapping[str, Any]) -> Self:
        """Build a publication from the result of :meth:`to_dict`."""
        return cls(
            agent_id,
            data["content"],
            data["version"],
            datetime.fromisoformat(data["timestamp"]),
            dict(data.get("metadata", {})),
            tuple(data.get("tool_results", ())),
            tuple(data.get("messages", ())),
        )


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """A publication rendered for one reader."""

    source_id: str
    content: str
    timestamp: datetime
    version: int
    policy: PropagationPolicy
    metadata: Mapping[str, Any] = field(default_factory=dict)
