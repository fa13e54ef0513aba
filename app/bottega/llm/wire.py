"""What the dialects of OpenAI's API share on the wire: JSON, names, arguments, tool outputs."""

import re
from collections.abc import Mapping
from hashlib import md5
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from bottega.agents.messages import ToolCall, ToolMessage
from bottega.errors import HistoryError, InvalidInputError
from bottega.llm.stand_ins import EMPTY

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME = 64
_STRICT_ID = re.compile(r"[a-zA-Z0-9]{9}|functions\.[\w.-]+:\d+", re.ASCII)


def encode_json(value: Any) -> bytes:
    """``value`` as JSON, whatever it holds: what JSON does not have becomes text or null."""
    try:
        return to_json(value, inf_nan_mode="null", fallback=str)
    except (PydanticSerializationError, UnicodeEncodeError):
        return to_json(without_lone_surrogates(value), inf_nan_mode="null", fallback=str)


def encode_head(fields: Mapping[str, Any], own: frozenset[str], extra: Mapping[str, Any]) -> bytes:
    """The start of a request's body: an object that is not closed yet.

    Args:
        fields: all of the start, ``extra`` included.
        own: names that only we set.
        extra: the caller's part.

    Raises:
        InvalidInputError: ``extra`` holds a field that is not the caller's to set, or no JSON.
    """
    if taken := own & extra.keys():
        raise InvalidInputError(f"extra_body must not set: {', '.join(sorted(taken))}")
    try:
        return to_json(fields, inf_nan_mode="null")[:-1]
    except PydanticSerializationError as error:
        raise InvalidInputError(f"extra_body cannot be sent as JSON: {error}") from None


def function_of(call: ToolCall) -> dict[str, str]:
    """Name and arguments of a call, as they may be sent back.

    Servers that decode the arguments refuse the whole history over text that is no JSON, and
    over names they do not allow. What the model wrote is quoted in the tool's error.
    """
    name = _NOT_IN_NAMES.sub("_", call.name)[:_MAX_NAME]
    return {"name": name, "arguments": encode_json(call.arguments).decode()}


def strict_id(call_id: str) -> str:
    """The id of a tool call as every chat template takes it, the same for the same id.

    Mistral's take nine letters or digits only, be the id of the server's own making or not
    (github.com/vllm-project/vllm/issues/9019). An id of Kimi's says which function was called, and
    stays: its template puts it into the prompt.
    """
    if _STRICT_ID.fullmatch(call_id):
        return call_id
    return md5(call_id.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:9]


def tool_outputs(message: ToolMessage) -> list[tuple[str, str]]:
    """What the model reads of each result: the id of its call, and the text.

    Raises:
        HistoryError: a tool message without results, which answers no call.
    """
    results = message.tool_results
    if not results:
        raise HistoryError("a tool message without tool_results answers no call")
    # The content is what the model reads; only where one message holds several results does it
    # not say which text belongs to which.
    if len(results) == 1 and message.content:
        texts = [message.content]
    else:
        texts = [result.text for result in results]
    return [
        (result.tool_call_id, text if text.strip() else EMPTY)
        for result, text in zip(results, texts, strict=True)
    ]


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
