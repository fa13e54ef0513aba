"""Texts of messages and tools in the form of the GenAI conventions: JSON, bounded, no secrets."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage, SystemMessage, ToolMessage
from bottega.tracing import spans

MOST_MESSAGES = 50
"""The newest messages of a prompt that are sent."""
LONGEST = 8192
"""Characters of one text that are sent."""

Clean = Callable[[str], str]


def prompt(sent: Sequence[StandardMessage], clean: Clean) -> dict[str, str]:
    """Return the attributes of a model call's prompt."""
    rules = [each for each in sent if isinstance(each, SystemMessage) and not each.is_context]
    told = [each for each in sent if each not in rules]
    found = {spans.INPUT: messages(told[-MOST_MESSAGES:], clean)}
    if rules:
        parts = [_text(each.content, clean) for each in rules]
        found[spans.INSTRUCTIONS] = json.dumps(parts, ensure_ascii=False)
    return found


def messages(sent: Sequence[StandardMessage], clean: Clean) -> str:
    """Return messages as JSON."""
    told = [{"role": each.role, "parts": _parts(each, clean)} for each in sent[-MOST_MESSAGES:]]
    return json.dumps(told, ensure_ascii=False)


def answer(content: str, clean: Clean) -> str:
    """Return an answer as JSON."""
    told = [{"role": "assistant", "parts": [_text(content, clean)]}]
    return json.dumps(told, ensure_ascii=False)


def value(found: Any, clean: Clean) -> str:
    """Return arguments or a result; a text unchanged, others as JSON."""
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    return clean(text)[:LONGEST]


def _parts(message: StandardMessage, clean: Clean) -> list[dict[str, Any]]:
    if isinstance(message, ToolMessage) and message.tool_results:
        return [
            {
                "type": "tool_call_response",
                "id": each.tool_call_id,
                "response": value(each.text, clean),
            }
            for each in message.tool_results
        ]
    parts: list[dict[str, Any]] = [_text(message.content, clean)] if message.content else []
    if isinstance(message, AssistantMessage):
        for call in message.tool_calls:
            arguments = value(call.arguments, clean)
            about = {"type": "tool_call", "id": call.id, "name": call.name}
            parts.append({**about, "arguments": arguments})
    return parts


def _text(content: str, clean: Clean) -> dict[str, Any]:
    return {"type": "text", "content": clean(content)[:LONGEST]}
