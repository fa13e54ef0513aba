"""Assembly of a streamed answer: the part that is the same for all dialects.

A message's state has a list of the answer's blocks, in the order in which the server sent them. The
entries are ``{"type": "text", "length": N}``, ``{"type": "call", "id": ID}`` and ``{"type":
"opaque", "block": …}``. An entry of a text or a call may have ``more``: other fields of the block.
Texts and calls are only in the message itself, where hooks may change them.

Most chunks of an answer have the same bytes before and after a few letters. Decoding each chunk as
JSON costs more than all other work of a model call. So the module learns these bytes from one
chunk. If a later chunk has the same bytes, the module takes the text between them.
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, ToolCall, Usage
from bottega.agents.parts import size_of
from bottega.agents.provider import OnDelta
from bottega.errors import ModelError
from bottega.json_schema.values import depth_of, is_finite
from bottega.llm.dialects.wire import encode_json, without_lone_surrogates
from bottega.llm.errors import BAD_RESPONSE, ErrorMapper
from bottega.llm.usage import Reported, usage_of, usage_of_lost
from bottega.llm.vendor_words import BROKEN, REFUSED, STOP, TOOL_CALLS, finish_reason
from bottega.outside import BoundedReader, OutsideError, check_json

if TYPE_CHECKING:
    import aiohttp

_PROBE = "probe"


class TextChunks:
    """Reader of chunks that contain only text; it recognises them by the bytes around the text.

    Args:
        only_text: returns the text of a decoded chunk, or ``None`` if the chunk has other fields.
        names: spellings of the text field's name in JSON, with the colon.
    """

    def __init__(self, only_text: Callable[[Any], str | None], names: tuple[bytes, ...]) -> None:
        self._only_text = only_text
        self._names = names
        self._tries = 4
        self._before = self._after = b""

    def leading(self, chunks: Sequence[bytes], start: int) -> tuple[int, str | None]:
        """Read the chunks of the learned form that begin at index ``start``.

        Returns:
            The number of these chunks, and their text; ``None``: the caller must decode them as
            JSON.
        """
        before, after = self._before, self._after
        if not before:
            return 0, None
        begin, end = len(before), -len(after)
        texts = []
        for index in range(start, len(chunks)):
            chunk = chunks[index]
            if not (chunk.startswith(before) and chunk.endswith(after)):
                break
            texts.append(chunk[begin:end])
        try:
            decoded = from_json(b'["%b"]' % b'","'.join(texts))
        except ValueError:
            return len(texts), None
        # A chunk with further fields has more quotes, so the list has more elements than chunks.
        return len(texts), "".join(decoded) if len(decoded) == len(texts) else None

    def learn(self, chunk: bytes, text: str) -> None:
        """Learn the form of a decoded chunk if the chunk has only the field with this text."""
        if self._before or not self._tries or not text:
            return
        self._tries -= 1
        for name in self._names:
            before, found, after = chunk.partition(name + encode_json(text))
            before, after = before + name + b'"', b'"' + after
            if found and self._is_form(before, after):
                self._before, self._after = before, after

    def _is_form(self, before: bytes, after: bytes) -> bool:
        try:
            probe = from_json(b"%b%b%b" % (before, _PROBE.encode(), after))
            return self._only_text(probe) == _PROBE
        except (ValueError, AttributeError, TypeError, LookupError):
            return False


_SURROGATE = re.compile("[\ud800-\udfff]")
_UNNAMED = "unnamed"
_DONE = b"[DONE]"
_AROUND = re.compile(r"[\"\[\]:]")
"""Characters that show cut JSON: an object next to such a character is part of a larger value."""
_BEAT = re.compile(rb"\s*\"?\[?[A-Za-z_-]*\]?\"?\s*")
_DECODER = json.JSONDecoder(strict=False)
_DEEPEST = 200
"""Maximum nested levels of an event and of a call's arguments, as in other JSON readers."""
MAX_CHARACTERS = 4_000_000
MAX_CALLS = 500


@dataclass(slots=True)
class PartialCall:
    """A tool call that arrives in pieces.

    Attributes:
        more: fields that only the server can interpret.
    """

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


class AnswerBuilder(ABC):
    """Builder of a message from the events of one answer.

    Args:
        report: factory of the errors.
        text_chunks: reader of events that have only text.

    Attributes:
        complete: true if the whole answer has arrived. The client may ignore all later events.
    """

    complete = False

    def __init__(self, report: ErrorMapper, text_chunks: TextChunks | None = None) -> None:
        self._report = report
        self._text_chunks = text_chunks
        self._text: list[str] = []
        self._half = ""
        self._usage: Any = None
        self._finish_reason: str | None = None
        self._refused = False

    @property
    def finished(self) -> bool:
        """True after the server has sent a finish reason. Then only the usage may follow."""
        return self._finish_reason is not None

    def add_events(self, events: Sequence[bytes]) -> str:
        """Add the events of a piece of the stream. Return the events' text.

        Raises:
            ModelError: see :meth:`add_event`.
        """
        chunks = self._text_chunks
        said = []
        index = 0
        while index < len(events) and not self.complete:
            count, text = 0, None
            if chunks is not None and not (self._half or self.finished):
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
        if not self.complete:  # finish() checks a complete answer
            self._refuse_calls()
        return "".join(said)

    def _decoded(self, event: bytes) -> str:
        if self.complete:
            return ""
        if event == _DONE:
            self.complete = True
            return ""
        return self.add_event(event)

    def _take_text(self, text: str) -> None:
        self._text.append(text)

    def add_event(self, data: bytes) -> str:
        """Add one event of the stream and return its text.

        The method ignores an event whose data is only a word or ``null``: some servers send such
        events to keep a connection open.

        Raises:
            ModelError: the event is not valid in the API, or the event reports an error.
        """
        if len(data) <= 40 and _BEAT.fullmatch(data):
            return ""
        try:
            return self.add(self._json_of(data))
        except ModelError:
            if self.finished:  # an event after the finish reason does not change the answer
                return ""
            raise

    def add_whole(self, body: bytes) -> str:
        """Add the body of an answer that is not a stream. Return the answer's text.

        The body may lack a finish reason, because complete JSON is a complete answer.

        Raises:
            ModelError: see :meth:`add_event`.
        """
        self._check(body)
        data = body.decode("utf-8", "replace")
        try:
            value, _ = _DECODER.raw_decode(data)
        except (ValueError, RecursionError):
            raise self._report.unreadable("its body was not JSON") from None
        self._refuse_depth(body, value)
        # Gemini's API answers with a list of chunks if the request does not require events.
        text = "".join(
            [self.add(event) for event in (value if isinstance(value, list) else [value])]
        )
        if not self.finished and (self._text or any(self._partial_calls())):
            self._end_whole()
        return text

    def _json_of(self, data: bytes) -> Any:
        self._check(data)
        try:
            value = from_json(data)
        except ValueError:
            value = self._decode_leniently(data)
        self._refuse_depth(data, value)
        return value

    def _refuse_depth(self, data: bytes, value: Any) -> None:
        if data.count(b"{") + data.count(b"[") > _DEEPEST and depth_of(value) > _DEEPEST:
            raise self._report.no_completion(f"more than {_DEEPEST} levels of JSON")

    def _check(self, data: bytes) -> None:
        try:
            check_json(data)
        except OutsideError as error:
            raise self._report.no_completion(error.detail) from None

    def _end_whole(self) -> None:
        """Set the finish reason of a complete answer that has none."""
        self._end(TOOL_CALLS if any(self._partial_calls()) else STOP)

    def add(self, event: Any) -> str:
        """Add one decoded event, or the complete answer of a server that does not stream."""
        if not isinstance(event, dict):
            raise self._report.unreadable("a chunk was not a JSON object")
        if event.get("error") or "error" in (event.get("object"), event.get("type")):
            raise self._report.failed_in_stream(event)
        try:
            return self._add(event)
        except (AttributeError, TypeError, LookupError):
            raise self._report.unreadable("a chunk had an unexpected form") from None

    def finish(
        self, now: datetime, new_id: Callable[[], str], sent: Callable[[], int]
    ) -> AssistantMessage:
        """Build the message.

        Args:
            new_id: function that makes ids for tool calls without an id.
            sent: function that returns the request's size, in bytes of text.

        Raises:
            ModelError: the answer is not complete, or too large.
        """
        reason = self._finish_reason
        if reason is None:
            raise self._report.broken("the stream ended without a finish reason")
        if reason == BROKEN:
            raise self._report.broken("the server reported that it did not finish the answer")
        text = "".join(self._text)
        self._refuse_excess(text)
        calls = self._tool_calls(new_id)
        if reason == TOOL_CALLS and not text and not calls:
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
            usage=usage_of(self._reported(), sent, text, calls, self.hidden_size),
            metadata=metadata,
            state=state,
            timestamp=now,
        )

    def _refuse_excess(self, text: str) -> None:
        """Refuse an oversized answer, because each later call of the run would send it again."""
        calls = list(self._partial_calls())
        length = len(text) + sum(
            len(call.id) + len(call.name) + sum(map(len, call.arguments)) for call in calls
        )
        if length > MAX_CHARACTERS:
            raise self._report.no_completion(f"more than {MAX_CHARACTERS} characters")
        self._refuse_calls()

    def _refuse_calls(self) -> None:
        if sum(1 for _ in self._partial_calls()) > MAX_CALLS:
            raise self._report.no_completion(f"more than {MAX_CALLS} tool calls")

    def usage_so_far(self, sent: Callable[[], int]) -> Usage:
        """Return the usage of an answer that ended too early.

        Args:
            sent: function that returns the request's size, in bytes of text.
        """
        spoken = size_of("".join(self._text)) + sum(
            size_of(piece) for call in self._partial_calls() for piece in call.arguments
        )
        return usage_of_lost(self._reported(), sent, spoken + self.hidden_size())

    def hidden_size(self) -> int:
        """Return the size in bytes of reasoning and other fields besides text and tool calls."""
        return 0

    def _end(self, word: str) -> None:
        """Set the finish reason from a vendor's word. A later word can replace only ``STOP``."""
        reason = finish_reason(word)
        if reason == REFUSED:
            self._refused = True
        if self._finish_reason in (None, STOP):
            self._finish_reason = reason

    @abstractmethod
    def _add(self, event: dict[str, Any]) -> str:
        """Add an event that reports no error.

        Return its text. An implementation calls :meth:`_end` with the server's finish reason.

        Raises:
            AttributeError, TypeError, LookupError: the event has a form that the API does not have.
        """

    @abstractmethod
    def _reported(self) -> Reported:
        """Return the numbers of tokens that the server has reported."""

    @abstractmethod
    def _partial_calls(self) -> Iterable[PartialCall]:
        """Return the tool calls, in order."""

    @abstractmethod
    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the fields that later requests send back to the server; see :mod:`.opaque`."""

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
        """Return ``piece`` as a text that UTF-8 can encode.

        Some servers cut text between UTF-16 units, which splits an emoji. This method keeps the
        first half until the next piece arrives.
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
            raise self._report.unreadable("a chunk was not JSON") from None


def decode_arguments(raw: str) -> tuple[dict[str, Any], str | None]:
    """Return a tool call's arguments, and the raw text if the arguments are unreadable.

    Some models send nothing, or ``null``, for a tool without arguments. Other models put the object
    into a string or a Markdown code block, send the object twice or after an empty object, or add a
    closing brace. The function accepts a complete object if the text has no other object. It
    refuses an incomplete object and two different objects.
    """
    if _SURROGATE.search(raw):
        raw = without_lone_surrogates(raw)
    if raw.strip() in ("", "null"):
        return {}, None
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError:
        value = _only_object(raw)
    if isinstance(value, str):
        value = _only_object(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and depth_of(value) <= _DEEPEST and is_finite(value):
        return value, None
    return {}, raw


def _only_object(text: str) -> Any:
    """Return a text's only JSON object; ``None``: no complete object, or several objects."""
    begin = text.find("{")
    if begin < 0 or _AROUND.search(text[:begin]):
        return None
    if text.startswith("{{", begin):
        begin += 1
    found: list[Any] = []
    while begin >= 0:
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        if value and value not in found:
            found.append(value)
        if len(found) > 1:
            return None
        begin = text.find("{", end)
        if _AROUND.search(text[end:] if begin < 0 else text[end:begin]):
            return None
    return found[0] if found else {}


Block = dict[str, Any]
Entry = Mapping[str, Any]


def in_order(
    message: AssistantMessage,
    order: Sequence[Entry],
    text: Callable[[str], Block],
    call: Callable[[ToolCall], Block],
) -> list[Block]:
    """Return a message's blocks in order. Text changed by a hook replaces the first text.

    Args:
        text, call: functions that make a block from a text or a call.
    """
    calls = {each.id: each for each in message.tool_calls}
    texts = _texts(message.content, order)
    blocks: list[Block] = []
    if message.content.strip() and not texts:
        blocks.append(text(message.content))
    for place, entry in enumerate(order):
        kind, more = entry["type"], entry.get("more") or {}
        if kind == "opaque":
            blocks.append(entry["block"])
        elif kind == "call":
            if (found := calls.pop(entry["id"], None)) is not None:
                blocks.append(call(found) | more)
        elif (said := texts.get(place)) is not None and (said.strip() or more):
            blocks.append(text(said) | more)
    return blocks + [call(each) for each in calls.values()]


def _texts(content: str, order: Sequence[Entry]) -> dict[int, str]:
    lengths = {i: entry["length"] for i, entry in enumerate(order) if entry["type"] == "text"}
    if sum(lengths.values()) != len(content):
        return {next(iter(lengths)): content} if lengths else {}
    texts = {}
    start = 0
    for place, length in lengths.items():
        texts[place] = content[start : start + length]
        start += length
    return texts


# Reading of an answer piece by piece

_DATA = b"data:"
_USUAL = b"data: "


class SSESplitter:
    """Splitter of a stream into events. The pieces of the stream may end anywhere.

    The result of an event is its ``data``; several ``data`` lines are joined with LF. Lines may end
    in LF, CRLF or CR. Comments, other fields (``event``, ``id``, ``retry``) and events without data
    are dropped.
    """

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that ``piece`` completes, in order."""
        if not piece:
            return []
        if b"\n" not in piece and b"\r" not in piece and not self._ends_in_cr():
            self._tail.append(piece)  # not joined before the line's end: the time stays linear
            return []
        text = b"".join([*self._tail, piece]) if self._tail else piece
        self._tail = []
        kept = b"\r" if text.endswith(b"\r") else b""  # LF may follow
        if b"\r" in text:
            text = text[: len(text) - len(kept)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, rest = text.split(b"\n\n")
        events = self._single_lines(text, blocks)
        if events is None:
            if self._data and blocks:
                blocks[0] = blocks[0] or b"\n"  # this blank line ends the open event
            events = [event for block in blocks if block and (event := self._event(block))]
        lines, end, unfinished = rest.rpartition(b"\n")
        self._take(lines)
        # Keep the last line end: if the next piece begins with a line end, the two make a blank
        # line, which ends the event.
        if end or unfinished or kept:
            self._tail.append(end + unfinished + kept)
        return events

    def finish(self) -> list[bytes]:
        """Return the last event if no blank line followed it before the end of the stream."""
        event = self._event(b"".join(self._tail).rstrip(b"\r"))
        self._tail = []
        return [event] if event else []

    def _single_lines(self, text: bytes, blocks: list[bytes]) -> list[bytes] | None:
        """Return the events; ``None``: an event does not have exactly one line of data."""
        if self._data or text.count(b"\n") != 2 * len(blocks) or not text.startswith(_USUAL):
            return None
        events = [block[6:] for block in blocks if block[:6] == _USUAL]
        return events if len(events) == len(blocks) and all(events) else None

    def _event(self, block: bytes) -> bytes:
        """Return the data of the event that ends with ``block``; empty: the event has no data."""
        if block[:5] == _DATA and b"\n" not in block and not self._data:
            return block[6:] if block[5:6] == b" " else block[5:]
        self._take(block)
        data, self._data = self._data, []
        return data[0] if len(data) == 1 else b"\n".join(data)

    def _take(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            if line[:5] == _DATA:
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")

    def _ends_in_cr(self) -> bool:
        return bool(self._tail) and self._tail[-1].endswith(b"\r")


_COLLECT_S = 0.05
_TURNS = 5
_LONGEST_ANSWER = 64 * 1024 * 1024
_MOST_LINES = 500_000
_SHORTEST_EVENT, _FREE_EVENTS = 32, 2000
"""Minimum average size of an event in bytes, after the first _FREE_EVENTS events. Each event costs
some microseconds, so many tiny events would be an attack."""


async def read(
    response: "aiohttp.ClientResponse",
    builder: AnswerBuilder,
    report: ErrorMapper,
    asked_at: float,
    on_delta: OnDelta | None,
    begins: Callable[[], None] = lambda: None,
) -> None:
    """Read the answer as it arrives.

    Args:
        asked_at: time of the request, by the event loop's clock.
        begins: function that is called when the first piece arrives.

    Raises:
        ModelError: the connection failed, or the answer cannot be used. A failure after the finish
            reason is not an error, because at most the usage is missing.
    """
    content_type = response.headers.get("content-type", "").lower()
    if "html" in content_type:
        raise report.no_completion(content_type)
    try:
        await _read_all(response, builder, report, asked_at, on_delta, begins)
    except OutsideError as error:
        raise report.no_completion(error.detail) from None


async def _read_all(
    response: "aiohttp.ClientResponse",
    builder: AnswerBuilder,
    report: ErrorMapper,
    asked_at: float,
    on_delta: OnDelta | None,
    begins: Callable[[], None],
) -> None:
    from bottega.http_sessions import NETWORK_ERRORS, charging, reader_of

    outside = reader_of(response, _LONGEST_ANSWER, _MOST_LINES)
    charge = charging(response, outside)
    reader = _Answer(builder, report)
    failure: ModelError | None = None
    begun = False
    while not builder.complete:
        try:
            piece = await response.content.readany()
        except NETWORK_ERRORS as error:
            failure = report.interrupted(error)
            break
        if not piece:
            break
        if not begun:
            begun = True
            begins()
        charge()
        async for step in outside.steps(piece):
            with outside:
                text = reader.feed(step, outside)
            await _notify(on_delta, text)
        if not builder.finished:
            _collect(response, asked_at)
    if failure is not None and not builder.finished:
        raise failure
    if failure is None:
        with suppress(*NETWORK_ERRORS):  # not an error, because the answer is complete
            await _drain(response)
    if not builder.finished:
        with outside:
            text = reader.finish()
        await _notify(on_delta, text)


def _collect(response: "aiohttp.ClientResponse", asked_at: float) -> None:
    """Pause reading for a moment, so that the next read gets more data and fewer reads follow."""
    transport = response.connection and response.connection.transport
    if not transport or transport.is_closing():
        return
    loop = asyncio.get_running_loop()
    transport.pause_reading()
    now = loop.time()
    pause_s = pause_of(now, now - asked_at, id(transport) // 64 % _TURNS)
    loop.call_later(pause_s, _read_again, transport)


def pause_of(now: float, took_s: float, turn: int) -> float:
    """Return the seconds until the next read of an answer.

    The pause is at most half of the time since the request. The pause is also at most about
    ``_COLLECT_S``, because clients get live text no more often. Each period of ``_COLLECT_S`` has
    ``_TURNS`` fixed times, and an answer is read at the same fixed time in each period. So one
    wake-up serves many answers, and the steps that end with these answers are stored together.
    With only one fixed time, reading all answers would block the event loop for too long.

    Args:
        now: time of the event loop's clock, whose resolution may be a millisecond.
        took_s: seconds since the request.
        turn: number of the answer's fixed time; from 0 to ``_TURNS`` - 1.
    """
    wait_s = _COLLECT_S - (now - turn * _COLLECT_S / _TURNS) % _COLLECT_S
    if wait_s < _COLLECT_S / 10:  # a coarse clock: the answer was just read at this fixed time
        wait_s += _COLLECT_S
    return min(wait_s, took_s / 2)


def _read_again(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


async def _drain(response: "aiohttp.ClientResponse") -> None:
    """Read the rest of a complete answer, so that the pool can reuse the connection."""
    if response.content.at_eof():
        return
    # call_later costs a tenth of asyncio.timeout.
    limit = asyncio.get_running_loop().call_later(0.1, response.close)
    left = 256 * 1024
    try:
        while left > 0 and (piece := await response.content.readany()):
            left -= len(piece)
    finally:
        limit.cancel()


class _Answer:
    """Reader of an answer. The answer's first character shows if the answer is a stream or JSON.

    The reader ignores the content type, because some servers label a stream as JSON, or JSON as a
    stream.
    """

    def __init__(self, builder: AnswerBuilder, report: ErrorMapper) -> None:
        self._builder = builder
        self._report = report
        self._head = b""
        self._reader: _Events | _Whole | None = None

    def feed(self, piece: bytes, outside: BoundedReader) -> str:
        if self._reader is None:
            outside.count(piece.count(b"\n") + piece.count(b"\r"))
            piece = (self._head + piece).removeprefix(BOM_UTF8).lstrip()
            self._head = piece
            if not piece or BOM_UTF8.startswith(piece):
                return ""
            is_json = piece.startswith((b"{", b"["))
            self._reader = _Whole(self._builder) if is_json else _Events(self._builder)
        return self._reader.feed(piece, outside)

    def finish(self) -> str:
        if self._reader is None:
            return ""
        try:
            return self._reader.finish()
        except ModelError as error:
            if error.code == BAD_RESPONSE and error.retryable and type(self._reader) is _Events:
                raise self._report.broken("it ended within an event") from None
            raise


class _Events:
    """Reader of a stream of server-sent events."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._splitter = SSESplitter()
        self._room = _FREE_EVENTS

    def feed(self, piece: bytes, outside: BoundedReader) -> str:
        outside.count(piece.count(b"\n") + piece.count(b"\r"))
        events = self._splitter.feed(piece)
        self._room += len(piece) // _SHORTEST_EVENT - len(events)
        if self._room < 0:
            raise OutsideError(f"too many events of less than {_SHORTEST_EVENT} bytes")
        return self._builder.add_events(events)

    def finish(self) -> str:
        return self._builder.add_events(self._splitter.finish())


class _Whole:
    """Reader of an answer from a server that ignored the request to stream."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._body = bytearray()

    def feed(self, piece: bytes, outside: BoundedReader) -> str:
        self._body += piece
        return ""

    def finish(self) -> str:
        return self._builder.add_whole(bytes(self._body))


async def _notify(on_delta: OnDelta | None, text: str) -> None:
    if text and on_delta is not None:
        waiting = on_delta(text)
        if waiting is not None:
            await waiting
