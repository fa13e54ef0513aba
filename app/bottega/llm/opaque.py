"""Fields of an answer that its server wants back, kept as they came.

``reasoning_content`` (DeepSeek, Kimi, GLM, vLLM), ``reasoning_details`` (OpenRouter, MiniMax),
``extra_content.google.thought_signature`` of a tool call (Gemini's OpenAI-compatible endpoint), and
whatever else a server adds to its message or a tool call.

A message keeps it as ``state``: ``{"origin": …, "message": {field: value}, "calls": {id: {field:
value}}}``, JSON all of it. Only the server that it is of gets it back.
"""

from collections.abc import Mapping
from hashlib import blake2s
from typing import Any

from bottega.agents.messages import AssistantMessage
from bottega.llm.wire import encode_json, without_lone_surrogates

# Fields that say what a piece is; all other texts of a stream are pieces to be joined.
_REPLACED = frozenset({"type", "id", "index", "format", "name", "signature", "thought_signature"})

_OPEN = 64  # items of a list that may still go on, the newest

Fields = dict[str, Any]


def origin_of(*parts: str) -> str:
    """A short name for a server (and whatever else must be the same), which does not show it."""
    return blake2s("\n".join(parts).encode(), digest_size=8).hexdigest()


def state_of(origin: str, message: Fields, calls: Mapping[str, Fields]) -> Fields:
    """The state of an answer, of what :func:`take` took; empty if there is nothing to keep."""
    own = {key: more for key, more in calls.items() if more}
    kept = _joined({"message": message, "calls": own})
    if not any(kept.values()):
        return {}
    cleaned: Fields = without_lone_surrogates({"origin": origin, **kept})
    return cleaned


def state_for(origin: str, message: AssistantMessage) -> Fields:
    """The state of a message, if it is of this origin; else an empty one."""
    if message.state.get("origin") == origin:
        return message.state
    return {"message": {}, "calls": {}}


def size_of_fields(fields: Fields) -> int:
    """The bytes of fields that :func:`take` collected, as JSON."""
    return len(encode_json(without_lone_surrogates(_joined(fields))))


def take(fields: Fields, delta: Mapping[str, Any], known: frozenset[str]) -> None:
    """Add the unknown fields of a piece of a stream to those that came before.

    Texts are joined, objects merged, and the items of a list merged by ``type`` and ``index``, as
    OpenRouter numbers those of ``reasoning_details``.
    """
    for name, value in delta.items():
        if name not in known and value not in (None, "", [], {}):
            fields[name] = _merged(name, fields.get(name), value)


class _Pieces(list[str]):
    """Pieces of a text that may go on: joined once, as a long one comes in many."""


def _merged(name: str, old: Any, new: Any) -> Any:
    """A value with what came now; changes the old one, which is of our own making."""
    if isinstance(new, str) and name not in _REPLACED:
        pieces = old if isinstance(old, _Pieces) else _Pieces()
        pieces.append(new)
        return pieces
    if isinstance(new, dict):
        merged = old if isinstance(old, dict) else {}
        for key, value in new.items():
            merged[key] = _merged(key, merged.get(key), value)
        return merged
    if isinstance(new, list):
        items = old if isinstance(old, list) and not isinstance(old, _Pieces) else []
        for item in new:
            _add(items, item)
        return items
    return old if new is None else new


def _add(items: list[Any], item: Any) -> None:
    """Merge an item with the one it goes on with, or append it."""
    newest = len(items) - 1
    for place in range(newest, max(-1, newest - _OPEN), -1):
        if _goes_on(items[place], item, is_last=place == newest):
            items[place] = _merged("", items[place], item)
            return
    items.append(_merged("", None, item))


def _joined(value: Any) -> Any:
    """A value with its texts whole."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return [_joined(item) for item in value] if isinstance(value, list) else value


def _goes_on(known: Any, item: Any, *, is_last: bool) -> bool:
    """Check if an item continues a known one: by its number, or else, if it has no id of its own,
    because it is of the type of the last one."""
    if not (isinstance(known, dict) and isinstance(item, dict)):
        return False
    if known.get("type") != item.get("type"):
        return False
    if "index" in known or "index" in item:
        return known.get("index") == item.get("index")
    return is_last and item.get("id") in (None, known.get("id"))
