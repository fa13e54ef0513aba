"""Reading an answer from the socket, piece by piece, into its builder.

Split a byte stream into server-sent events.
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable

import aiohttp

from bottega.agents.provider import OnDelta
from bottega.errors import ModelError
from bottega.llm.dialects.answer import AnswerBuilder
from bottega.llm.errors import BAD_RESPONSE, ErrorMapper
from bottega.network import NETWORK_ERRORS, charging, reader_of
from bottega.outside import BoundedReader, OutsideError

_DATA = b"data:"
_USUAL = b"data: "


class SSESplitter:
    """Extracts the ``data`` of events from pieces of a stream that may be cut anywhere.

    Lines may end in LF, CRLF or CR. Several ``data`` lines of one event are joined by LF.
    Comments, other fields (``event``, ``id``, ``retry``) and events without data are dropped.
    """

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that ``piece`` completes, in order."""
        if not piece:
            return []
        if b"\n" not in piece and b"\r" not in piece and not self._ends_in_cr():
            self._tail.append(piece)  # joined at the line's end: linear time
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
                blocks[0] = blocks[0] or b"\n"  # it ends an event, too
            events = [event for block in blocks if block and (event := self._event(block))]
        lines, end, unfinished = rest.rpartition(b"\n")
        self._take(lines)
        # Another end of a line would be a blank line.
        if end or unfinished or kept:
            self._tail.append(end + unfinished + kept)
        return events

    def finish(self) -> list[bytes]:
        """Return the event that the end of the stream completes without a blank line."""
        event = self._event(b"".join(self._tail).rstrip(b"\r"))
        self._tail = []
        return [event] if event else []

    def _single_lines(self, text: bytes, blocks: list[bytes]) -> list[bytes] | None:
        """Return the events of the usual stream, one line of data each; ``None``: it is another."""
        if self._data or text.count(b"\n") != 2 * len(blocks) or not text.startswith(_USUAL):
            return None
        events = [block[6:] for block in blocks if block[:6] == _USUAL]
        return events if len(events) == len(blocks) and all(events) else None

    def _event(self, block: bytes) -> bytes:
        """Return the data of an event that ends with a block of lines; empty without data."""
        if block[:5] == _DATA and b"\n" not in block and not self._data:
            return block[6:] if block[5:6] == b" " else block[5:]
        self._take(block)
        data, self._data = self._data, []
        return data[0] if len(data) == 1 else b"\n".join(data)

    def _take(self, lines: bytes) -> None:
        """Keep the data in whole lines."""
        for line in lines.split(b"\n"):
            if line[:5] == _DATA:
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")

    def _ends_in_cr(self) -> bool:
        return bool(self._tail) and self._tail[-1].endswith(b"\r")


_COLLECT_S = 0.05
_TURNS = 5
_DRAIN_S = 0.1
_LONGEST_DRAIN = 256 * 1024
_LONGEST_ANSWER = 64 * 1024 * 1024
_MOST_LINES = 500_000
_SHORTEST_EVENT, _FREE_EVENTS = 32, 2000
"""Least bytes of an event on average, beyond the first ones: each costs some microseconds."""


async def read(
    response: aiohttp.ClientResponse,
    builder: AnswerBuilder,
    report: ErrorMapper,
    asked_at: float,
    on_delta: OnDelta | None,
    begins: Callable[[], None] = lambda: None,
) -> None:
    """Read the answer as it arrives.

    Args:
        asked_at: time of the request, by the event loop's clock.
        begins: called with its first piece.

    Raises:
        ModelError: the connection failed, or the answer cannot be used. After a complete answer
            only its usage may be missing, which is not an error.
    """
    content_type = response.headers.get("content-type", "").lower()
    if "html" in content_type:
        raise report.no_completion(content_type)
    try:
        await _read_all(response, builder, report, asked_at, on_delta, begins)
    except OutsideError as error:
        raise report.no_completion(error.detail) from None


async def _read_all(
    response: aiohttp.ClientResponse,
    builder: AnswerBuilder,
    report: ErrorMapper,
    asked_at: float,
    on_delta: OnDelta | None,
    begins: Callable[[], None],
) -> None:
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
        await _drain(response)
    if not builder.finished:
        with outside:
            text = reader.finish()
        await _notify(on_delta, text)


def _collect(response: aiohttp.ClientResponse, asked_at: float) -> None:
    """Leave what arrives next in the socket for a while, since each read costs the same."""
    transport = response.connection and response.connection.transport
    if not transport or transport.is_closing():
        return
    loop = asyncio.get_running_loop()
    transport.pause_reading()
    now = loop.time()
    pause_s = pause_of(now, now - asked_at, id(transport) // 64 % _TURNS)
    loop.call_later(pause_s, _read_again, transport)


def pause_of(now: float, took_s: float, turn: int) -> float:
    """Return the seconds until an answer is read again.

    Its end waits at most half as long as the answer has taken since the request, and about
    ``_COLLECT_S``: live text is not shown more often. Answers that take longer than twice that are
    read in a few turns, so that one wake-up serves many, and steps that they end are stored
    together. All in one turn would hold the event loop for too long.

    Args:
        now: by the event loop's clock, which may count whole milliseconds.
        took_s: since the request.
        turn: from 0 to ``_TURNS`` - 1.
    """
    wait_s = _COLLECT_S - (now - turn * _COLLECT_S / _TURNS) % _COLLECT_S
    if wait_s < _COLLECT_S / 10:  # it may be this turn: the clock's steps are coarse
        wait_s += _COLLECT_S
    return min(wait_s, took_s / 2)


def _read_again(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what is left of a complete answer: only then the pool reuses the connection."""
    if response.content.at_eof():
        return
    # The end is near. This costs a tenth of asyncio.timeout.
    limit = asyncio.get_running_loop().call_later(_DRAIN_S, response.close)
    left = _LONGEST_DRAIN
    try:
        while left > 0 and (piece := await response.content.readany()):
            left -= len(piece)
    except NETWORK_ERRORS:
        pass  # the answer is complete
    finally:
        limit.cancel()


class _Answer:
    """Reads an answer in the form that its first letter shows.

    Content types are no help: some servers send a stream as JSON, and JSON as a stream.
    """

    def __init__(self, builder: AnswerBuilder, report: ErrorMapper) -> None:
        self._builder = builder
        self._report = report
        self._head = b""
        self._reader: _Events | _Whole | None = None

    def feed(self, piece: bytes, outside: BoundedReader) -> str:
        """Take a piece of the answer; return the text in it."""
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
        """Take the end of the answer; return the text that it completes."""
        if self._reader is None:
            return ""
        try:
            return self._reader.finish()
        except ModelError as error:
            if error.code == BAD_RESPONSE and error.retryable and type(self._reader) is _Events:
                raise self._report.broken("it ended within an event") from None
            raise


class _Events:
    """Reads a stream of server-sent events."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._splitter = SSESplitter()
        self._room = _FREE_EVENTS

    def feed(self, piece: bytes, outside: BoundedReader) -> str:
        """Take a piece of the stream; return the text in it."""
        outside.count(piece.count(b"\n") + piece.count(b"\r"))
        events = self._splitter.feed(piece)
        self._room += len(piece) // _SHORTEST_EVENT - len(events)
        if self._room < 0:
            raise OutsideError(f"events of less than {_SHORTEST_EVENT} bytes")
        return self._builder.add_events(events)

    def finish(self) -> str:
        """Take the end of the stream; return the text that it completes."""
        return self._builder.add_events(self._splitter.finish())


class _Whole:
    """Reads the answer of a server that ignored the request to stream."""

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
