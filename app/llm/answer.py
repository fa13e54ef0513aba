"""Put a streamed answer together (Chat Completions chunks to an ``AssistantMessage``)."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic_core import from_json

from app.agents.messages import AssistantMessage, ToolCall, Usage
from app.llm.failures import Reporter
from app.llm.wire import without_lone_surrogates

_SURROGATE = re.compile("[\ud800-\udfff]")
_UNNAMED = "unnamed"


@dataclass(slots=True)
class _Call:
    """A tool call whose pieces are still coming in."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class AnswerBuilder:
    """Takes the chunks of one answer, then gives the message.

    Args:
        report: makes the errors.
    """

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._text: list[str] = []
        self._half = ""
        self._calls: list[_Call] = []
        self._by_index: dict[Any, _Call] = {}
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._refused = False

    @property
    def finished(self) -> bool:
        """Whether the server said why it stopped: nothing but usage follows."""
        return self._finish_reason is not None

    def add_event(self, data: bytes) -> str:
        """Take one event of the stream; answers with the text that came with it.

        Raises:
            ModelError: it is no chunk, or it reports an error.
        """
        try:
            chunk = from_json(data)
        except ValueError:
            chunk = self._decode_leniently(data)
        return self.add(chunk)

    def add(self, chunk: Any) -> str:
        """Take one decoded chunk, or a whole completion of a server that does not stream."""
        if not isinstance(chunk, dict):
            raise self._report.broken("a chunk was no JSON object")
        if chunk.get("error") or "error" in (chunk.get("object"), chunk.get("type")):
            raise self._report.failed_in_stream(chunk)
        try:
            return self._add(chunk)
        except (AttributeError, TypeError, LookupError):
            raise self._report.broken("a chunk had a shape that was not expected") from None

    def finish(self, now: datetime, new_id: Callable[[], str]) -> AssistantMessage:
        """The message.

        Args:
            new_id: makes the ids of tool calls that came without one of their own.

        Raises:
            ModelError: the answer is not complete, or it was withheld.
        """
        reason = self._finish_reason
        if reason is None:
            raise self._report.broken("the stream ended without a finish_reason")
        if reason == "content_filter":
            raise self._report.filtered()
        if reason == "error":
            raise self._report.broken("finish_reason error")
        text = "".join(self._text)
        if not text and not self._calls:
            if reason == "length":
                raise self._report.out_of_output()
            if reason == "tool_calls":
                raise self._report.broken("tool calls were announced, but none came")
        metadata: dict[str, Any] = {"finish_reason": reason}
        if self._refused:
            metadata["refusal"] = True
        return AssistantMessage(
            content=text,
            tool_calls=self._tool_calls(new_id),
            usage=_usage(self._usage),
            metadata=metadata,
            timestamp=now,
        )

    def _add(self, chunk: dict[str, Any]) -> str:
        if usage := chunk.get("usage"):
            self._usage = usage
        choices = chunk.get("choices")
        if not choices:
            return ""
        choice = choices[0]
        text = ""
        delta = choice.get("delta") or choice.get("message")
        if delta:
            if piece := delta.get("content"):
                text = self._whole(piece)
            if refusal := delta.get("refusal"):
                self._refused = True
                text += self._whole(refusal)
            if text:
                self._text.append(text)
            if calls := delta.get("tool_calls"):
                for item in calls:
                    self._add_call(item)
        if reason := choice.get("finish_reason"):
            self._finish_reason = str(reason)
        return text

    def _add_call(self, item: dict[str, Any]) -> None:
        function = item.get("function") or {}
        call_id, name, arguments = item.get("id"), function.get("name"), function.get("arguments")
        call = self._call_of(item.get("index"), call_id, name)
        if call_id and not call.id:
            call.id = str(call_id)
        if name and not call.name:
            call.name = str(name)
        if arguments:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call.arguments.append(text)

    def _call_of(self, index: Any, call_id: Any, name: Any) -> _Call:
        """The call that a piece belongs to: by its index, unless it plainly begins another.

        Some servers number every call 0, or none at all, and send each in one piece.
        """
        call = self._by_index.get(index)
        if call is None and index is None and self._calls and not (call_id or name):
            call = self._calls[-1]
        if call is None or _begins_another(call, call_id, name):
            call = _Call()
            self._calls.append(call)
            self._by_index[index] = call
        return call

    def _tool_calls(self, new_id: Callable[[], str]) -> tuple[ToolCall, ...]:
        calls = []
        seen: set[str] = set()
        for call in self._calls:
            call_id = call.id if call.id and call.id not in seen else new_id()
            seen.add(call_id)
            arguments, malformed = decode_arguments("".join(call.arguments))
            calls.append(
                ToolCall(
                    id=call_id,
                    name=call.name or _UNNAMED,
                    arguments=arguments,
                    malformed=malformed,
                )
            )
        return tuple(calls)

    def _whole(self, piece: str) -> str:
        """``piece`` as text that UTF-8 can hold.

        Servers that cut text by UTF-16 units send an emoji in two halves: the first waits here.
        """
        if self._half:
            piece, self._half = self._half + piece, ""
        if piece.isascii() or not _SURROGATE.search(piece):
            return piece
        if "\ud800" <= piece[-1] <= "\udbff":
            piece, self._half = piece[:-1], piece[-1]
        text: str = without_lone_surrogates(piece)
        return text

    def _decode_leniently(self, data: bytes) -> Any:
        """Decode what the fast decoder refuses: halves of UTF-16 pairs are legal in JSON."""
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._report.broken("a chunk was no JSON") from None


def decode_arguments(raw: str) -> tuple[dict[str, Any], str | None]:
    """Arguments of a tool call, and the raw text if it is no JSON object.

    Nothing, or ``null``, is what some models send for a tool without arguments.
    """
    if _SURROGATE.search(raw):
        raw = without_lone_surrogates(raw)
    if raw.strip() in ("", "null"):
        return {}, None
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError:
        return {}, raw
    if isinstance(value, dict) and _is_finite(value):
        return value, None
    return {}, raw


def _begins_another(call: _Call, call_id: Any, name: Any) -> bool:
    if call_id and call.id:
        return bool(call_id != call.id)
    return bool(name and call.name) and _is_object("".join(call.arguments))


def _is_object(raw: str) -> bool:
    return bool(raw) and decode_arguments(raw)[1] is None


def _is_finite(value: Any) -> bool:
    """Whether every number in ``value`` is one JSON can hold; 1e999 decodes to infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def _usage(reported: dict[str, Any] | None) -> Usage:
    if not isinstance(reported, dict):
        return Usage()
    return Usage(
        input_tokens=_count(reported, "prompt_tokens"),
        output_tokens=_count(reported, "completion_tokens"),
        cached_tokens=_count(reported.get("prompt_tokens_details"), "cached_tokens"),
        reasoning_tokens=_count(reported.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _count(part: Any, name: str) -> int:
    value = part.get(name) if isinstance(part, dict) else None
    return value if isinstance(value, int) and value > 0 else 0
