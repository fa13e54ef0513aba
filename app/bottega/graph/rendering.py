"""Rendering of tool results and messages as text for another agent's prompt.

The inputs are plain text, or objects like the messages of ``bottega.agents`` (this layer does not
import them). Rendering happens only when an edge's policy needs it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


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
    """A message; it may also have ``tool_calls`` (name, arguments) or ``tool_results``."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


def as_text(value: Any) -> str:
    """Render a tool's result for a model: text unchanged, anything else as compact JSON."""
    if isinstance(value, str):
        return value
    return _compact(value)


def tool_result_lines(results: Iterable[str | ToolResultLike]) -> tuple[str, ...]:
    """Render one line per successful result; leave out failed ones."""
    return tuple(
        item if isinstance(item, str) else f"{item.tool_name}: {as_text(item.result)}"
        for item in results
        if isinstance(item, str) or item.status == "success"
    )


def message_lines(messages: Iterable[str | MessageLike]) -> tuple[str, ...]:
    """Render messages, tool calls and tool results, one line each.

    Leaves out system messages: they are instructions and context for one agent only.
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
    """Return ``content`` with a titled list appended, unless ``lines`` is empty."""
    return "\n".join([content, "", f"{title}:", *lines]) if lines else content
