"""Fields of an answer that its server needs back, unchanged, with later requests.

Such as ``reasoning_content`` (DeepSeek, Kimi, GLM, vLLM), ``reasoning_details`` (OpenRouter,
MiniMax), ``extra_content.google.thought_signature`` of a tool call (Gemini's OpenAI-compatible
endpoint), and other unknown fields of a message or a tool call.

A message keeps them as JSON in ``state``: ``{"origin": …, "message": {field: value}, "calls": {id:
{field: value}}}``. They go back only to the server of their origin.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.llm.dialects.wire import encode_json, without_lone_surrogates

# Fields that a later piece replaces. Other texts of a stream are joined.
_REPLACED = frozenset({"type", "id", "index", "format", "name", "signature", "thought_signature"})

_OPEN = 64  # newest items of a list that a later piece may continue

Fields = dict[str, Any]


def origin_of(*parts: str) -> str:
    """Return a short hash that identifies a server (or server and model) without showing it."""
    return blake2s("\n".join(parts).encode(), digest_size=8).hexdigest()


def state_of(origin: str, message: Fields, calls: Mapping[str, Fields]) -> Fields:
    """Return an answer's state from fields that :func:`take` collected; empty without fields."""
    own = {key: more for key, more in calls.items() if more}
    if not (message or own):
        return {}
    kept = _joined({"message": message, "calls": own})
    cleaned: Fields = without_lone_surrogates({"origin": origin, **kept})
    return cleaned


def state_for(origin: str, message: AssistantMessage) -> Fields:
    """Return a message's state if it has this origin; else an empty one."""
    if message.state.get("origin") == origin:
        return message.state
    return {"message": {}, "calls": {}}


def dropped_for(
    origin: str, messages: Sequence[StandardMessage], provider: str, model: str
) -> str | None:
    """Return the model whose state a call loses that is the first one to lose it.

    A call loses the state of another origin. Calls after an answer of this model lose nothing more.
    """
    for message in reversed(messages):
        if not isinstance(message, AssistantMessage):
            continue
        made = message.metadata
        by = f"{made.get('provider', provider)}/{made.get('model', 'another model')}"
        if message.state:
            return by if message.state.get("origin") != origin else None
        if by == f"{provider}/{model}":
            return None
    return None


def size_of_fields(fields: Fields) -> int:
    """Return the size of fields that :func:`take` collected, in bytes of JSON."""
    return len(encode_json(without_lone_surrogates(_joined(fields))))


def take(fields: Fields, delta: Mapping[str, Any], known: frozenset[str]) -> None:
    """Merge the unknown fields of a stream's piece into ``fields``.

    Texts are joined and objects merged. Items of a list are merged by ``type`` and ``index``, as
    OpenRouter numbers ``reasoning_details``.
    """
    for name, value in delta.items():
        if name not in known and value not in (None, "", [], {}):
            fields[name] = _merged(name, fields.get(name), value)


class _Pieces(list[str]):
    """Pieces of one text, joined once at the end: a long text has many."""


def _merged(name: str, old: Any, new: Any) -> Any:
    """Return ``old`` merged with ``new``; changes ``old``, which this module made."""
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
    """Merge an item into the one that it continues, or append it."""
    newest = len(items) - 1
    for place in range(newest, max(-1, newest - _OPEN), -1):
        if _goes_on(items[place], item, is_last=place == newest):
            items[place] = _merged("", items[place], item)
            return
    items.append(_merged("", None, item))


def _joined(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return [_joined(item) for item in value] if isinstance(value, list) else value


def _goes_on(known: Any, item: Any, *, is_last: bool) -> bool:
    """Return true if an item continues a known one: same type, and same index.

    Without indices it must have the same id, or none, and the known item must be the last.
    """
    if not (isinstance(known, dict) and isinstance(item, dict)):
        return False
    if known.get("type") != item.get("type"):
        return False
    if "index" in known or "index" in item:
        return known.get("index") == item.get("index")
    return is_last and item.get("id") in (None, known.get("id"))
