"""Assembling a streamed answer: the common part of all dialects."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, ToolCall, Usage
from bottega.agents.tokens import size_of, tokens_in
from bottega.llm.dialects.text_chunks import TextChunks
from bottega.llm.dialects.wire import encode_json, without_lone_surrogates
from bottega.llm.errors import ErrorMapper

_SURROGATE = re.compile("[\ud800-\udfff]")
_BROKEN = frozenset(("error", "insufficient_system_resource"))  # the latter is DeepSeek's
_UNNAMED = "unnamed"
_DONE = b"[DONE]"
MAX_CHARACTERS = 4_000_000
MAX_CALLS = 500


@dataclass(slots=True)
class PartialCall:
    """A tool call whose pieces are still arriving.

    Attributes:
        more: fields that only the server understands.
    """

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


class AnswerBuilder(ABC):
    """Collects the events of one answer, then builds the message.

    Args:
        report: makes the errors.
        text_chunks: recognises events that hold only text.

    Attributes:
        complete: no event follows, so the rest of the stream need not be read.
    """

    complete = False

    def __init__(self, report: ErrorMapper, text_chunks: TextChunks | None = None) -> None:
        self._report = report
        self._text_chunks = text_chunks
        self._text: list[str] = []
        self._half = ""
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._refused = False

    @property
    def finished(self) -> bool:
        """True once the server gave its reason to stop: only usage may follow."""
        return self._finish_reason is not None

    def add_events(self, events: Sequence[bytes]) -> str:
        """Take the events of a piece of the stream, up to its end; return their text.

        Raises:
            ModelError: as :meth:`add_event`.
        """
        chunks = self._text_chunks
        said = []
        index = 0
        while index < len(events) and not self.complete:
            count, text = 0, None
            if chunks is not None and not self._half:
                count, text = chunks.leading(events, index)
            if text:
                self._take_text(text)
            else:
                count = max(1, count)
                text = "".join([self._decoded(event) for event in events[index : index + count]])
                if chunks is not None and count == 1:
                    chunks.learn(events[index], text)
            said.append(text)
            index += count
        return "".join(said)

    def _decoded(self, event: bytes) -> str:
        if self.complete:
            return ""
        if event == _DONE:
            self.complete = True
            return ""
        return self.add_event(event)

    def _take_text(self, text: str) -> None:
        """Take text of events that hold nothing else."""
        self._text.append(text)

    def add_event(self, data: bytes) -> str:
        """Take one event of the stream and return its text.

        Raises:
            ModelError: the event is not one of the API, or it reports an error.
        """
        try:
            event = from_json(data)
        except ValueError:
            event = self._decode_leniently(data)
        return self.add(event)

    def add(self, event: Any) -> str:
        """Take one decoded event, or the complete answer of a server that does not stream."""
        if not isinstance(event, dict):
            raise self._report.broken("a chunk was not a JSON object")
        if event.get("error") or "error" in (event.get("object"), event.get("type")):
            raise self._report.failed_in_stream(event)
        try:
            return self._add(event)
        except (AttributeError, TypeError, LookupError):
            raise self._report.broken("a chunk had an unexpected form") from None

    def finish(self, now: datetime, new_id: Callable[[], str]) -> AssistantMessage:
        """Build the message.

        Args:
            new_id: makes ids for tool calls without an id.

        Raises:
            ModelError: the answer is not complete.
        """
        reason = self._finish_reason
        if reason is None:
            raise self._report.broken("the stream ended without a finish reason")
        if reason in _BROKEN:
            raise self._report.broken("the finish reason is an error")
        text = "".join(self._text)
        self._refuse_excess(text)
        calls = self._tool_calls(new_id)
        if reason == "tool_calls" and not text and not calls:
            raise self._report.broken("tool calls were announced, but none arrived")
        metadata: dict[str, Any] = {"finish_reason": reason}
        if self._refused:
            metadata["refusal"] = True
        state = self._state(calls)
        if len(encode_json(state)) > MAX_CHARACTERS:
            raise self._report.no_completion(
                f"more than {MAX_CHARACTERS} bytes of reasoning and other fields"
            )
        return AssistantMessage(
            content=text,
            tool_calls=calls,
            usage=self._counted(),
            metadata=metadata,
            state=state,
            timestamp=now,
        )

    def _refuse_excess(self, text: str) -> None:
        """Refuse an oversized answer: each is stored, and sent with every later call."""
        calls = list(self._partial_calls())
        length = len(text) + sum(
            len(call.id) + len(call.name) + sum(map(len, call.arguments)) for call in calls
        )
        if length > MAX_CHARACTERS:
            raise self._report.no_completion(f"more than {MAX_CHARACTERS} characters")
        if len(calls) > MAX_CALLS:
            raise self._report.no_completion(f"more than {MAX_CALLS} tool calls")

    def reported(self) -> Usage | None:
        """Return the usage of an answer that broke off; ``None``: the server reported none.

        Some servers report the output at its end only: it is at least what has arrived.
        """
        usage = self._counted()
        if not usage.total_tokens:
            return None
        spoken = size_of("".join(self._text)) + sum(
            size_of(piece) for call in self._partial_calls() for piece in call.arguments
        )
        arrived = tokens_in(spoken + self.hidden_size())
        if arrived <= usage.output:
            return usage
        return replace(usage, output=arrived, estimated=True)

    def hidden_size(self) -> int:
        """Return the bytes of reasoning and other fields beside text and tool calls."""
        return 0

    @abstractmethod
    def _add(self, event: dict[str, Any]) -> str:
        """Take an event that reports no error and return its text.

        Sets ``_finish_reason`` (``stop``, ``length``, ``tool_calls``, ``content_filter``,
        ``error``, or another) when the server gives its reason to stop.

        Raises:
            AttributeError, TypeError, LookupError: the event has not the API's shape.
        """

    @abstractmethod
    def _counted(self) -> Usage:
        """Return the tokens that the server reported; zeros where it reported none."""

    @abstractmethod
    def _partial_calls(self) -> Iterable[PartialCall]:
        """Return the tool calls, in order."""

    @abstractmethod
    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the fields to send back with the message; see :mod:`.opaque`."""

    def _tool_calls(self, new_id: Callable[[], str]) -> tuple[ToolCall, ...]:
        calls = []
        seen: set[str] = set()
        for call in self._partial_calls():
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
        """Return ``piece`` as text that UTF-8 can encode.

        Servers that cut text by UTF-16 units split an emoji. Its first half is kept for the next
        piece.
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
        """Decode JSON with lone UTF-16 surrogates, which the fast decoder refuses."""
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._report.broken("a chunk was not JSON") from None


def decode_arguments(raw: str) -> tuple[dict[str, Any], str | None]:
    """Return a tool call's arguments, and the raw text if it is not a JSON object.

    Some models send nothing, or ``null``, for a tool without arguments.
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


def _is_finite(value: Any) -> bool:
    """Return true if JSON can hold all numbers in ``value``; 1e999 decodes to infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def count(part: Any, name: str) -> int:
    """Return a number of tokens; 0 if the server did not report it."""
    value = part.get(name) if isinstance(part, dict) else None
    return value if isinstance(value, int) and value > 0 else 0


def counted(used: Any, read: str, written: str) -> Usage:
    """Return the usage as OpenAI's APIs report it.

    Args:
        read, written: the API's words for input and output tokens.
    """
    if not isinstance(used, dict):
        return Usage()
    return Usage(
        input=count(used, f"{read}_tokens"),
        output=count(used, f"{written}_tokens"),
        cached=count(used.get(f"{read}_tokens_details"), "cached_tokens"),
        reasoning=count(used.get(f"{written}_tokens_details"), "reasoning_tokens"),
    )
