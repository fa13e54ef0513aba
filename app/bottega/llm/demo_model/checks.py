"""Validation of a Chat Completions request, like that of OpenAI's API."""

from collections.abc import Sequence
from typing import Any

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def problem(request: Any) -> tuple[str, str | None] | None:
    """Return a problem and its parameter, or ``None`` if the request is valid."""
    if not isinstance(request, dict):
        return "The body must be a JSON object.", None
    if not isinstance(request.get("model"), str) or not request["model"]:
        return "You must provide a model parameter.", "model"
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        return "'messages' must be a list of at least one message.", "messages"
    for index, message in enumerate(messages):
        if wrong := _in_message(message):
            return wrong, f"messages.[{index}]"
    if wrong := _in_pairing(messages):
        return wrong, "messages"
    tools = request.get("tools")
    if tools is not None and not _are_tools(tools):
        return "'tools' must be a list of functions with a name.", "tools"
    if wrong := _in_choice(request.get("tool_choice"), tools or ()):
        return wrong, "tool_choice"
    return None


def _in_choice(choice: Any, tools: Sequence[dict[str, Any]]) -> str | None:
    """Check that a demanded tool is there."""
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        return None if tools else "'tool_choice' needs 'tools'."
    if not _is_named(choice):
        return "'tool_choice' must be none, auto, required, or a function with a name."
    name = choice["function"]["name"]
    has_it = any(tool["function"]["name"] == name for tool in tools)
    return None if has_it else f"'tool_choice' names '{name}', which 'tools' does not have."


def _in_message(message: Any) -> str | None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return f"A message needs a 'role', one of {', '.join(sorted(_ROLES))}."
    if message.get("content") is not None and not isinstance(message["content"], str | list):
        return "'content' must be a text or a list of parts."
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        return "A message of role 'tool' needs a 'tool_call_id'."
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and calls and all(map(_is_call, calls))):
        return "'tool_calls' must be calls with an id and a function's name and arguments."
    if message.get("content") is None and not calls:
        return "A message needs 'content'."
    return None


def _in_pairing(messages: Sequence[dict[str, Any]]) -> str | None:
    """Check that results follow directly after each tool call, and only there."""
    waiting: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return (
                    "Messages with role 'tool' must be a response to a preceding message with "
                    "'tool_calls'."
                )
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            break
        waiting = {call["id"] for call in message.get("tool_calls") or ()}
    if waiting:
        return (
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            f"to each 'tool_call_id'. These have none: {', '.join(sorted(waiting))}"
        )
    return None


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("id"), str):
        return False
    return _is_named(call) and isinstance(call["function"].get("arguments"), str)


def _are_tools(tools: Any) -> bool:
    return isinstance(tools, list) and all(map(_is_named, tools))


def _is_named(item: Any) -> bool:
    function = item.get("function") if isinstance(item, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
