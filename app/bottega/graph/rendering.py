"""Tool results and messages as text that another agent's model reads (spec page 2, G6).

What is published is taken as it comes: plain text, or any object shaped like the messages of
``bottega.agents`` (which this layer does not know). It is rendered only when an edge asks for it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class ToolResultLike(Protocol):
    """The answer to a tool call: ``status`` is ``success`` or ``error``."""

    @property
    def tool_name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def result(self) -> Any: ...
    @property
    def error(self) -> str | None: ...


class MessageLike(Protocol):
    """A message; it may have ``tool_calls`` (name, arguments) or ``tool_results`` besides."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


def as_text(value: Any) -> str:
    """A tool's result as a model sees it: text as it is, anything else as compact JSON."""
    if isinstance(value, str):
        return value
    return _compact(value)


def tool_result_lines(results: Iterable[str | ToolResultLike]) -> tuple[str, ...]:
    """One line of text per successful result; failed ones are left out."""
    return tuple(
        item if isinstance(item, str) else f"{item.tool_name}: {as_text(item.result)}"
        for item in results
        if isinstance(item, str) or item.status == "success"
    )


def message_lines(messages: Iterable[str | MessageLike]) -> tuple[str, ...]:
    """What was said and done, a line each.

    System messages are left out: prompt, awareness and injected context tell one agent what to
    do or know, and are nothing it said.
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
    """``content`` followed by a titled list, or as it is if there is nothing to list."""
    return "\n".join([content, "", f"{title}:", *lines]) if lines else content
