"""Reading an answer from the socket, piece by piece, into its builder."""

import asyncio
from collections.abc import Callable

import aiohttp

from bottega.agents.provider import OnDelta
from bottega.errors import ModelError
from bottega.llm.client import NETWORK_ERRORS
from bottega.llm.dialects.answer import AnswerBuilder
from bottega.llm.errors import ErrorMapper
from bottega.llm.sse import SSESplitter

_COLLECT_S = 0.05
_TURNS = 5
_DRAIN_S = 0.1
_LONGEST_ANSWER = 64 * 1024 * 1024


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
    reader = _Whole(builder) if "json" in content_type else _Events(builder)
    failure: ModelError | None = None
    length = 0
    while not builder.complete:
        try:
            piece = await response.content.readany()
        except NETWORK_ERRORS as error:
            failure = report.interrupted(error)
            break
        if piece and not length:
            begins()
        length += len(piece)
        if length > _LONGEST_ANSWER:
            failure = report.no_completion(f"more than {_LONGEST_ANSWER >> 20} MB")
        if failure is not None or not piece:
            break
        await _notify(on_delta, reader.feed(piece))
        if not builder.finished:
            _collect(response, asked_at)
    if failure is not None and not builder.finished:
        raise failure
    if failure is None:
        await _drain(response)
    if not builder.finished:
        await _notify(on_delta, reader.finish())


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
    try:
        while await response.content.readany():
            pass
    except NETWORK_ERRORS:
        pass  # the answer is complete
    finally:
        limit.cancel()


class _Events:
    """Reads a stream of server-sent events."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._splitter = SSESplitter()

    def feed(self, piece: bytes) -> str:
        """Take a piece of the stream; return the text in it."""
        return self._builder.add_events(self._splitter.feed(piece))

    def finish(self) -> str:
        """Take the end of the stream; return the text that it completes."""
        return self._builder.add_events(self._splitter.finish())


class _Whole:
    """Reads the answer of a server that ignored the request to stream; see :class:`_Events`."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._body = bytearray()

    def feed(self, piece: bytes) -> str:
        self._body += piece
        return ""

    def finish(self) -> str:
        return self._builder.add_event(bytes(self._body))


async def _notify(on_delta: OnDelta | None, text: str) -> None:
    if text and on_delta is not None:
        waiting = on_delta(text)
        if waiting is not None:
            await waiting
