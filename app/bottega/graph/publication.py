"""What an agent published, and what one reader of it gets (spec page 2, G2, G3, G6)."""

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
    """What flows along an edge (G6)."""

    FINAL_RESPONSE_ONLY = "final_response_only"
    TOOL_RESULTS = "tool_results"
    FULL_HISTORY = "full_history"


@dataclass(frozen=True, slots=True)
class Publication:
    """What an agent published last.

    Attributes:
        content: its accepted final answer.
        version: 1 for the first, one more with each.
        tool_results: of that query only; text, or objects shaped like tool results.
        messages: of that query only, without the final answer; text, or message-like objects.
    """

    agent_id: str
    content: str
    version: int
    timestamp: datetime
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tool_results: tuple[str | ToolResultLike, ...] = ()
    messages: tuple[str | MessageLike, ...] = ()

    def text_for(self, policy: PropagationPolicy) -> str:
        """What a reader along an edge of this policy gets to see."""
        if policy is PropagationPolicy.TOOL_RESULTS:
            return with_section(self.content, "Tool results", tool_result_lines(self.tool_results))
        if policy is PropagationPolicy.FULL_HISTORY:
            return with_section(self.content, "Conversation", message_lines(self.messages))
        return self.content

    def to_dict(self) -> dict[str, Any]:
        """As JSON; tool results and messages become the lines that readers see."""
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
        """The reverse of :meth:`to_dict`."""
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
    """One source's publication as one reader gets it."""

    source_id: str
    content: str
    timestamp: datetime
    version: int
    policy: PropagationPolicy
