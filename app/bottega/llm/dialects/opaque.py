"""State: fields of an answer that later requests must send back to the server unchanged.

Examples are ``reasoning_content`` (DeepSeek, Kimi, GLM, vLLM), ``reasoning_details`` (OpenRouter,
MiniMax), ``extra_content.google.thought_signature`` of a tool call (Gemini's OpenAI-compatible
endpoint), and other unknown fields of a message or a tool call.

A message keeps these fields as JSON in ``state``: ``{"origin": …, "message": {field: value},
"calls": {id: {field: value}}}``. Bottega sends the fields back only to the server that sent them.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.llm.dialects.wire import encodable, encode_json

# Text fields in which a later piece replaces an earlier piece. Pieces of other text fields are
# joined.
_REPLACED = frozenset({"type", "id", "index", "format", "name", "signature", "thought_signature"})

_OPEN = 16  # a piece of the stream can continue only this number of a list's newest items

Fields = dict[str, Any]


def origin_of(*parts: str) -> str:
    """Return a short hash that identifies a server (or server and model) without its name."""
    return blake2s("\n".join(parts).encode(), digest_size=8).hexdigest()


def state_of(origin: str, message: Fields, calls: Mapping[str, Fields]) -> Fields:
    """Return an answer's state, made from the fields that :func:`take` collected; may be empty."""
    own = {key: more for key, more in calls.items() if more}
    if not (message or own):
        return {}
    kept = {"message": _all_joined(message), "calls": {k: _all_joined(m) for k, m in own.items()}}
    state: Fields = encodable({"origin": origin, **kept})
    return state


def state_for(origin: str, message: AssistantMessage) -> Fields:
    """Return a message's state if the state comes from ``origin``; otherwise an empty state."""
    if message.state.get("origin") == origin:
        return message.state
    return {"message": {}, "calls": {}}


def dropped_for(
    origin: str, messages: Sequence[StandardMessage], provider: str, model: str
) -> str | None:
    """Return the model whose state this call is the first to drop; ``None``: no model's state.

    A call drops the newest state if the state's origin is different. If this call's model gave an
    answer after the state, an earlier call has already dropped the state.
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
    """Return the size in bytes of JSON of the fields that :func:`take` collected."""
    return len(encode_json(_all_joined(fields)))


def take(fields: Fields, delta: Mapping[str, Any], known: frozenset[str]) -> None:
    """Merge the unknown fields of a stream's piece into ``fields``.

    Values are not copied. Texts are joined and objects are merged. Items of a list are merged by
    ``type`` and ``index``, because OpenRouter numbers ``reasoning_details`` with these fields.
    """
    for name, value in delta.items():
        if name not in known and value not in (None, "", [], {}):
            fields[name] = _merged(name, fields.get(name), value)


class _Pieces(list[str]):
    """The pieces of one text, which are joined only at the end, because they may be many."""


class _Object(dict[str, Any]):
    """An object that was merged from several pieces."""


class _Items(list[Any]):
    """A list that was merged from several pieces. A later piece may continue the newest items."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        newest = range(max(0, len(items) - _OPEN), len(items))
        self._places = {_key(items[place]): place for place in newest}
        self._merged: set[int] = set()

    def take(self, piece: list[Any]) -> None:
        """Merge each new item into the older item that it continues. Append all other items."""
        if len(piece) > _OPEN:  # no server continues so many items in one piece
            self.extend(piece)
            return
        for item in piece:
            key = _key(item)
            place = self._last(item) if key is None else self._places.get(key)
            if place is None:
                self._places[key] = len(self)
                self.append(item)
            else:
                self[place] = _merged("", self[place], item)
                self._merged.add(place)

    def joined(self) -> list[Any]:
        items = list(self)
        for place in self._merged:
            items[place] = _joined(items[place])
        return items

    def _last(self, item: Any) -> int | None:
        """Return the index of the last item if ``item`` continues the last item.

        An item continues the last item if both have no index, the types are equal, and the new id
        is equal or missing.
        """
        last = self[-1] if self else None
        if not (isinstance(last, dict) and isinstance(item, dict)) or "index" in last:
            return None
        is_same = last.get("type") == item.get("type")
        return len(self) - 1 if is_same and item.get("id") in (None, last.get("id")) else None


def _key(item: Any) -> tuple[Any, Any] | None:
    """Return a key that all pieces of an item share; ``None``: the item has no index."""
    if not isinstance(item, dict) or not isinstance(item.get("index"), int | str):
        return None
    kind = item.get("type")
    return (kind if isinstance(kind, str) else None, item["index"])


def _merged(name: str, old: Any, new: Any) -> Any:
    """Return ``old`` merged with ``new``.

    The function stores the first piece of a value unchanged, and examines the value only when a
    second piece arrives, because most values have only one piece.
    """
    if old is None or new is None:
        return old if new is None else new
    if isinstance(new, str) and name not in _REPLACED:
        pieces = old if isinstance(old, _Pieces) else _Pieces([old] if isinstance(old, str) else [])
        pieces.append(new)
        return pieces
    if isinstance(new, dict) and isinstance(old, dict):
        merged = old if isinstance(old, _Object) else _Object(old)
        for key, value in new.items():
            merged[key] = _merged(key, merged.get(key), value)
        return merged
    if isinstance(new, list) and isinstance(old, list) and not isinstance(old, _Pieces):
        items = old if isinstance(old, _Items) else _Items(old)
        items.take(new)
        return items
    return new


def _joined(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, _Object):
        return {key: _joined(item) for key, item in value.items()}
    return value.joined() if isinstance(value, _Items) else value


def _all_joined(fields: Mapping[str, Any]) -> Fields:
    return {name: _joined(value) for name, value in fields.items()}
