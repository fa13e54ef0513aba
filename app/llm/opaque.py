"""What a server sends along with an answer and wants back: kept as it came, and not understood.

``reasoning_content`` (DeepSeek, Kimi, GLM, vLLM), ``reasoning_details`` (OpenRouter, MiniMax),
``extra_content.google.thought_signature`` of a tool call (Gemini's OpenAI-compatible endpoint), and
whatever else a server adds to its message or a tool call.

A message keeps it as ``state``: ``{"origin": …, "message": {field: value}, "calls": {id: {field:
value}}}``, JSON all of it. Only the server that it is of gets it back.
"""

from collections.abc import Mapping
from hashlib import blake2s
from typing import Any

from app.agents.messages import AssistantMessage
from app.llm.wire import without_lone_surrogates

# Fields that say what a piece is; all other texts of a stream are pieces to be joined.
_REPLACED = frozenset({"type", "id", "index", "format", "name", "signature", "thought_signature"})

Fields = dict[str, Any]


def origin_of(*parts: str) -> str:
    """A short name for a server (and whatever else must be the same), which does not show it."""
    return blake2s("\n".join(parts).encode(), digest_size=8).hexdigest()


def state_of(origin: str, message: Fields, calls: Mapping[str, Fields]) -> Fields:
    """The state of an answer; empty if there is nothing to keep."""
    kept = {"message": message, "calls": {key: call for key, call in calls.items() if call}}
    if not any(kept.values()):
        return {}
    cleaned: Fields = without_lone_surrogates({"origin": origin, **kept})
    return cleaned


def state_for(origin: str, message: AssistantMessage) -> Fields:
    """The state of a message, if it is of this origin; else an empty one."""
    if message.state.get("origin") == origin:
        return message.state
    return {"message": {}, "calls": {}}


def take(fields: Fields, delta: Mapping[str, Any], known: frozenset[str]) -> None:
    """Add the unknown fields of a piece of a stream to those that came before.

    Texts are joined, objects merged, and the items of a list merged by ``type`` and ``index``, as
    OpenRouter numbers those of ``reasoning_details``.
    """
    for name, value in delta.items():
        if name not in known and value not in (None, "", [], {}):
            fields[name] = _merged(name, fields.get(name), value)


def _merged(name: str, old: Any, new: Any) -> Any:
    if isinstance(old, str) and isinstance(new, str) and name not in _REPLACED:
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(key, old.get(key), value) for key, value in new.items()}
    if isinstance(new, list):
        items = list(old) if isinstance(old, list) else []
        for item in new:
            _add(items, item)
        return items
    return old if new is None else new


def _add(items: list[Any], item: Any) -> None:
    """Merge an item with the one it goes on with, or append it."""
    for place, known in enumerate(items):
        if _goes_on(known, item, is_last=place == len(items) - 1):
            items[place] = _merged("", known, item)
            return
    items.append(item)


def _goes_on(known: Any, item: Any, *, is_last: bool) -> bool:
    """Whether an item is more of a known one: by its number, or else, if it has no id of its own,
    because it is of the type of the last one."""
    if not (isinstance(known, dict) and isinstance(item, dict)):
        return False
    if known.get("type") != item.get("type"):
        return False
    if "index" in known or "index" in item:
        return known.get("index") == item.get("index")
    return is_last and item.get("id") in (None, known.get("id"))
