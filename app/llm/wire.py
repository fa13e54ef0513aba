"""Chat Completions on the wire: messages, tools and the request body, as bytes.

A message is encoded once, when it is first sent, and its bytes are joined into every later body.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from app.agents.messages import AssistantMessage, StandardMessage, ToolCall, ToolMessage
from app.agents.provider import ToolSchema
from app.errors import HistoryError, InvalidInputError

DIALECT = "chat"

OWN_FIELDS = frozenset({"model", "messages", "tools", "stream", "stream_options"})
"""Fields of the body that the provider sets by itself."""

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME = 64


def request_head(model: str, extra: Mapping[str, Any]) -> bytes:
    """The body up to its messages.

    Raises:
        InvalidInputError: ``extra`` holds a field that is not the caller's to set, or no JSON.
    """
    if taken := OWN_FIELDS & extra.keys():
        raise InvalidInputError(f"extra_body must not set: {', '.join(sorted(taken))}")
    head = {"model": model, **extra, "stream": True, "stream_options": {"include_usage": True}}
    try:
        return to_json(head, inf_nan_mode="null")[:-1]
    except PydanticSerializationError as error:
        raise InvalidInputError(f"extra_body cannot be sent as JSON: {error}") from None


def request_body(
    head: bytes, messages: Iterable[StandardMessage], tools: Iterable[ToolSchema]
) -> bytes:
    """The whole body: ``head`` (see :func:`request_head`), messages and tools."""
    parts = [head, b',"messages":[']
    parts.append(b",".join([message.encoded(DIALECT, encode_message) for message in messages]))
    schemas = b",".join([_tool(schema) for schema in tools])
    parts.append(b'],"tools":[%b]}' % schemas if schemas else b"]}")
    return b"".join(parts)


def encode_message(message: StandardMessage) -> bytes:
    """One message; a :class:`ToolMessage` of several results gives several, joined by commas.

    Raises:
        HistoryError: a tool message without results, which answers no call.
    """
    if isinstance(message, ToolMessage):
        return _results(message)
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [_call(call) for call in message.tool_calls]
    return _json(wire)


def _results(message: ToolMessage) -> bytes:
    results = message.tool_results
    if not results:
        raise HistoryError("a tool message without tool_results answers no call")
    # The content is what the model reads; only where one message holds several results does it
    # not say which text belongs to which.
    texts = [result.text for result in results]
    if len(results) == 1 and message.content:
        texts = [message.content]
    return b",".join(
        [
            _json({"role": "tool", "tool_call_id": result.tool_call_id, "content": text})
            for result, text in zip(results, texts, strict=True)
        ]
    )


def _call(call: ToolCall) -> dict[str, Any]:
    # Servers that decode the arguments refuse the whole history over text that is no JSON, and
    # over names they do not allow. What the model wrote is quoted in the tool's error.
    name = _NOT_IN_NAMES.sub("_", call.name)[:_MAX_NAME]
    arguments = _json(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(schema: ToolSchema) -> bytes:
    encoded = schema.encodings.get(DIALECT)
    if encoded is None:
        function = {
            "name": schema.name,
            "description": schema.description,
            "parameters": schema.parameters,
        }
        encoded = _json({"type": "function", "function": function})
        schema.encodings[DIALECT] = encoded
    return encoded


def _json(value: Any) -> bytes:
    try:
        return to_json(value, inf_nan_mode="null", fallback=str)
    except (PydanticSerializationError, UnicodeEncodeError):
        return to_json(without_lone_surrogates(value), inf_nan_mode="null", fallback=str)


def without_lone_surrogates(value: Any) -> Any:
    """``value`` with the halves of UTF-16 pairs in its texts joined, or replaced if alone."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {
            without_lone_surrogates(key): without_lone_surrogates(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_lone_surrogates(item) for item in value]
    return value
