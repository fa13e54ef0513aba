"""Publications of agents, and the text of a publication for a reader's prompt.

The tool results and messages of a publication are texts, or objects like those of
``bottega.agents``, which this layer does not import. This module renders the objects as text only
when an edge's policy needs the text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol, Self


class ToolResultLike(Protocol):
    """A tool result; ``status`` is ``success`` or ``error``."""

    @property
    def tool_name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def result(self) -> Any: ...
    @property
    def error(self) -> str | None: ...


class MessageLike(Protocol):
    """A message, which may also have ``tool_calls`` (name, arguments) or ``tool_results``."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


def as_text(value: Any) -> str:
    """Render a tool's result for a model: a text unchanged, any other value as compact JSON."""
    if isinstance(value, str):
        return value
    return _compact(value)


def tool_result_lines(results: Iterable[str | ToolResultLike]) -> tuple[str, ...]:
    """Render each successful tool result as one line; omit failed results."""
    return tuple(
        item if isinstance(item, str) else f"{item.tool_name}: {as_text(item.result)}"
        for item in results
        if isinstance(item, str) or item.status == "success"
    )


def message_lines(messages: Iterable[str | MessageLike]) -> tuple[str, ...]:
    """Render each message, tool call and tool result as one line.

    The result omits system messages, which are instructions and context for only one agent.
    """
    lines: list[str] = []
    for message in messages:
        if isinstance(message, str):
            lines.append(message)
        elif message.role != "system":
            lines += _lines_of(message)
    return tuple(lines)


def _lines_of(message: MessageLike) -> list[str]:
    results: Sequence[ToolResultLike] = getattr(message, "tool_results", ())
    if results:
        return [
            f"tool {item.tool_name}: {as_text(item.result)}"
            if item.status == "success"
            else f"tool {item.tool_name} failed: {item.error}"
            for item in results
        ]
    lines = [f"{message.role}: {message.content}"] if message.content else []
    calls: Sequence[Any] = getattr(message, "tool_calls", ())
    lines += [f"{message.role} called {call.name} with {as_text(call.arguments)}" for call in calls]
    return lines


def with_section(content: str, title: str, lines: Sequence[str]) -> str:
    """Append a list with a title to ``content``, unless ``lines`` is empty."""
    return "\n".join([content, "", f"{title}:", *lines]) if lines else content


class PropagationPolicy(StrEnum):
    """Policy of an edge: which parts of a source's publication the target reads."""

    FINAL_RESPONSE_ONLY = "final_response_only"
    TOOL_RESULTS = "tool_results"
    FULL_HISTORY = "full_history"


@dataclass(frozen=True, slots=True)
class Publication:
    """An answer that an agent published.

    Attributes:
        content: the accepted final answer.
        metadata: JSON values about the publication; no prompt contains them.
        version: 1 for the agent's first publication, plus 1 for each later publication.
        tool_results: tool results of the query: texts, or objects like ``ToolResultLike``.
        messages: the query's messages without the final answer: texts, or objects like
            ``MessageLike``.
    """

    agent_id: str
    content: str
    version: int
    timestamp: datetime
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tool_results: tuple[str | ToolResultLike, ...] = ()
    messages: tuple[str | MessageLike, ...] = ()

    def text_for(self, policy: PropagationPolicy) -> str:
        """Render the publication for a reader whose edge has this policy."""
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
    """A publication as text for one reader."""

    source_id: str
    content: str
    timestamp: datetime
    version: int
    policy: PropagationPolicy
    metadata: Mapping[str, Any] = field(default_factory=dict)
