"""Encoding that all dialects use: JSON, names, arguments and tool outputs.

The module also has placeholders for turns and texts that chat templates require but the history
lacks.
"""

import re
from collections.abc import Mapping
from hashlib import md5
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from bottega.agents.messages import ToolCall, ToolMessage, ToolStatus
from bottega.agents.parts import Part
from bottega.errors import HistoryError, InvalidInputError
from bottega.llm.server import ServerSpec, reserved_in

GO_ON = "Please go on."
"""Placeholder of a user's turn, before the model's first answer or between two answers."""
UNDERSTOOD = "Understood."
"""Placeholder of a model's turn, between a tool's result and the user's next message."""
EMPTY = "(empty)"
"""Placeholder of an empty tool result."""


_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_RIVALS = {"thinkingBudget": "thinkingLevel", "thinkingLevel": "thinkingBudget"}
"""Pairs of fields in Gemini's API of which a request may have only one."""
_SCHEMAS = frozenset(("schema", "responseSchema", "responseJsonSchema"))
_STRICT_ID = re.compile(r"[a-zA-Z0-9]{9}|functions\.[\w.-]+:\d+", re.ASCII)


def encode_json(value: Any) -> bytes:
    """Encode any value as JSON. Values that JSON cannot represent become text or null."""
    try:
        return to_json(value, inf_nan_mode="null", fallback=str)
    except (PydanticSerializationError, UnicodeEncodeError):
        return to_json(without_lone_surrogates(value), inf_nan_mode="null", fallback=str)


def encodable(value: Any) -> Any:
    """Return ``value`` without lone surrogates: the same object if there are none."""
    try:
        to_json(value, inf_nan_mode="null", fallback=str)
    except (PydanticSerializationError, UnicodeEncodeError):
        return without_lone_surrogates(value)
    return value


def check_extra(extra: Mapping[str, Any], spec: ServerSpec) -> None:
    """Check the caller's extra fields for requests to a server.

    Raises:
        InvalidInputError: a field is reserved, or a value is not JSON.
    """
    if taken := reserved_in(spec.dialect, extra):
        raise InvalidInputError(f"extra_body must not set: {', '.join(taken)}")
    try:
        to_json(extra)
    except PydanticSerializationError as error:
        raise InvalidInputError(f"extra_body cannot be sent as JSON: {error}") from None


def merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``more`` into ``fields``. A value of ``more`` replaces a value of ``fields``.

    Objects are merged at every depth, except schemas and objects of different ``type``.
    """
    found = dict(fields)
    for name, value in more.items():
        known = found.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping) and name not in _SCHEMAS:
            value = merged(known, value) if _is_same_type(known, value) else value
        found.pop(_RIVALS.get(name, ""), None)
        found[name] = value
    return found


def _is_same_type(known: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return bool(known.get("type", value.get("type")) == value.get("type", known.get("type")))


def present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def function_of(call: ToolCall) -> dict[str, str]:
    """Return a call's name and arguments in a form that servers accept.

    Servers refuse the whole history if arguments are not JSON or a name is invalid. The model still
    sees the invalid arguments that it sent, because the tool's error quotes them.
    """
    return {"name": name_of(call.name), "arguments": encode_json(call.arguments).decode()}


def name_of(name: str) -> str:
    """Return a tool's name in a form that servers accept."""
    return _NOT_IN_NAMES.sub("_", name)[:64]


def strict_id(call_id: str) -> str:
    """Return a tool call's id in a form that every chat template accepts. Equal ids stay equal.

    Mistral's templates accept only ids of nine letters or digits, although servers make other ids
    (github.com/vllm-project/vllm/issues/9019). An id from Kimi contains the tool's name. The
    function keeps an id from Kimi, because Kimi's template puts the id into the prompt.
    """
    if _STRICT_ID.fullmatch(call_id):
        return call_id
    return md5(call_id.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:9]


class ToolOutput(NamedTuple):
    """A tool's result in the form that the model gets."""

    call_id: str
    name: str
    text: str
    is_error: bool
    parts: tuple[Part, ...]


def tool_outputs(message: ToolMessage) -> list[ToolOutput]:
    """Return the results in a message.

    Raises:
        HistoryError: a tool message without results answers no call.
    """
    results = message.tool_results
    if not results:
        raise HistoryError("a tool message without tool_results answers no call")
    # The message's content is the text for the model. If the message has several results, the
    # content cannot be divided among them, so each result's own text is sent.
    if len(results) == 1 and message.content:
        texts = [message.content]
    else:
        texts = [result.text for result in results]
    return [
        ToolOutput(
            result.tool_call_id,
            result.tool_name,
            text if text.strip() else EMPTY,
            result.status is ToolStatus.ERROR,
            result.parts,
        )
        for result, text in zip(results, texts, strict=True)
    ]


def without_lone_surrogates(value: Any) -> Any:
    """Join UTF-16 surrogate pairs in all texts of ``value``, and replace lone surrogates."""
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
