"""A model behind an API, in any dialect: its tries, and the reading of answers piece by piece."""

import asyncio
import copy
import random
import uuid
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import aiohttp

from bottega import metrics
from bottega.agents.messages import AssistantMessage, StandardMessage, ToolMessage, Usage
from bottega.agents.provider import FailedTry, ModelOptions, OnDelta, ToolSchema
from bottega.clock import Clock, monotonic, utcnow
from bottega.errors import InvalidInputError, ModelError
from bottega.llm.client import ModelClient, Request, is_success, keep
from bottega.llm.dialects.answer import AnswerBuilder
from bottega.llm.dialects.anthropic import anthropic
from bottega.llm.dialects.chat import chat
from bottega.llm.dialects.dialect import Dialect, NewDialect
from bottega.llm.dialects.gemini import gemini
from bottega.llm.dialects.opaque import dropped_for
from bottega.llm.dialects.parts import NO_FILES, MissingFilesError, load_files, size_as_text
from bottega.llm.dialects.responses import responses
from bottega.llm.errors import (
    BAD_RESPONSE,
    BROKEN_ANSWERS,
    MOST_BROKEN,
    ErrorMapper,
    next_delay_s,
    out_of_patience,
)
from bottega.llm.prices import ModelPrices, prices_of
from bottega.llm.server import DialectName, ServerSpec
from bottega.llm.vendor_words import is_known
from bottega.network import NETWORK_ERRORS, charging, reader_of
from bottega.outside import BoundedReader, OutsideError
from bottega.redaction import Redactor, is_vocabulary

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
    limit = asyncio.get_running_loop().call_later(0.1, response.close)
    left = 256 * 1024
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


_DIALECTS: Mapping[DialectName, NewDialect] = {
    "chat": chat,
    "responses": responses,
    "anthropic": anthropic,
    "gemini": gemini,
}
STATE_DROPPED, UNKNOWN_REASON = "model_state_dropped", "unknown_finish_reason"
"""Codes of warnings."""

_DEFAULTS = ModelOptions()


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


class ModelProvider:
    """Calls the models of one server, always streaming. The server stores nothing between calls.

    Connections open at the first call and belong to its event loop; another loop gets its own.
    After :meth:`aclose` the provider stays usable and opens new connections.

    Args:
        model: default model, for calls whose options name none.
        clock, now, sleep, random_unit, new_id: time and randomness; ``now`` is monotonic, in
            seconds; ``random_unit`` is in [0, 1).

    Raises:
        InvalidInputError: the server's description is invalid.
    """

    def __init__(
        self,
        spec: ServerSpec,
        model: str,
        *,
        clock: Clock = utcnow,
        now: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_unit: Callable[[], float] = random.random,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        if spec.timeout_s <= 0 or spec.patience_s < 0:
            raise InvalidInputError("timeout_s must be positive and patience_s not negative")
        if spec.dialect not in _DIALECTS:
            raise InvalidInputError(f"the dialect must be one of: {', '.join(_DIALECTS)}")
        self.model = model
        self.spec = spec
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._random_unit = random_unit
        self._new_id = new_id
        self._dialects: dict[str, Dialect] = {}
        self._prices: dict[str, ModelPrices | None] = {}
        self._client = ModelClient(spec)
        self._report = self._client.report
        sent = (spec.api_key or "", *spec.hidden)
        self._secrets = Redactor(each for each in sent if not is_vocabulary(each))
        self._dialect(model)  # now: wrong fields fail at the start

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.model!r}, dialect={self.spec.dialect!r}, "
            f"base_url={self._client.address!r})"
        )

    def for_model(self, model: str, patience_s: float | None = None) -> "ModelProvider":
        """Copy the provider for another default model; both share (and close) the connections.

        Args:
            patience_s: ``None``: that of this provider.
        """
        patience_s = self.spec.patience_s if patience_s is None else patience_s
        if (model, patience_s) == (self.model, self.spec.patience_s):
            return self
        other = copy.copy(self)
        other.model, other.spec = model, replace(self.spec, patience_s=patience_s)
        return other

    async def aclose(self) -> None:
        """Close the connections. Open calls fail."""
        await self._client.aclose()

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = _DEFAULTS,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage:
        """Request the next message.

        Args:
            on_delta: gets the text in pieces. A new try starts from the beginning:
                ``options.on_failed_try`` then reports that the text so far is void.

        Returns:
            The message. Its metadata holds ``model`` (the one asked for), ``finish_reason``
            (``length``: cut off), and ``refusal: True`` if its content is the model's refusal. Its
            ``state`` goes back to this server with the message.

        Raises:
            ModelError: the call failed for good.
            HistoryError: a message cannot be sent.
            InvalidInputError: a part cannot be sent, or a file is not there.
        """
        model = options.model or self.model
        dialect = self._dialect(model)
        output, files = dialect.output(options), NO_FILES
        try:
            body = dialect.body(messages, tools, options, output)
        except MissingFilesError:
            files = await load_files(messages, options.files, self.spec.dialect)
            body = dialect.body(messages, tools, options, output, files)
        after_results = bool(messages) and isinstance(messages[-1], ToolMessage)
        sent = partial(size_as_text, len(body), messages, files)
        begin = partial(dialect.new_answer, self._report, after_results)
        pay = partial(self._pay, model, await self.prices(model))
        lost = partial(_tell_lost, options, pay)
        patience_s = self.spec.patience_s
        number, broken, failed_at = 1, 0, None
        while True:
            ask = partial(self._try, dialect.path, body, sent, begin, on_delta, lost)
            answer = await self._counted(model, ask)
            if isinstance(answer, AssistantMessage):
                answer.metadata["model"] = model
                answer = _without(self._secrets, answer)
                pay(answer.usage)
                self._warn(dialect, messages, answer, options)
                return answer if output is None else output.read(answer, after_results)
            broken += answer.code in BROKEN_ANSWERS
            if not answer.retryable or patience_s == 0 or broken == MOST_BROKEN:
                raise answer
            failed_at = self._now() if failed_at is None else failed_at
            await self._pause(number, answer, failed_at + patience_s, options)
            number += 1

    async def _pause(
        self, number: int, error: ModelError, until: float, options: ModelOptions
    ) -> None:
        """Wait before the next try.

        Args:
            number: tries so far.
            until: end of the patience, by the provider's clock.

        Raises:
            ModelError: there is none left.
        """
        left_s = until - self._now()
        pause_s = next_delay_s(number, error, self._random_unit(), left_s)
        if pause_s is None:
            raise out_of_patience(number, error, self.spec.patience_s)
        if options.on_failed_try is not None:
            options.on_failed_try(FailedTry(number, error, pause_s))
        await self._sleep(pause_s)

    def _pay(self, model: str, prices: ModelPrices | None, usage: Usage) -> None:
        """Set the cost of a call and who pays for it, and count it."""
        usage.is_own = self.spec.is_own
        usage.cost = None if prices is None else prices.cost(usage)
        metrics.paid(self.spec.name, model, usage)

    def _warn(
        self,
        dialect: Dialect,
        messages: Sequence[StandardMessage],
        answer: AssistantMessage,
        options: ModelOptions,
    ) -> None:
        """Report lost state of another model's answers, and an unknown reason for the end.

        An answer whose reason is in no table counts as whole.
        """
        if options.on_warning is None:
            return
        name, model = self.spec.name, str(answer.metadata["model"])
        if (other := dropped_for(dialect.origin, messages, name, model)) is not None:
            text = (
                f"'{name}/{model}' went on without the reasoning and other state that '{other}' "
                "sent with earlier answers"
            )
            options.on_warning(STATE_DROPPED, text)
        if not is_known(reason := str(answer.metadata.get("finish_reason"))):
            text = f"the model's server ended its answer with an unknown reason: {reason[:100]!r}"
            options.on_warning(UNKNOWN_REASON, text)

    def _dialect(self, model: str) -> Dialect:
        dialect = self._dialects.get(model)
        if dialect is None:
            dialect = _DIALECTS[self.spec.dialect](self.spec, model, self._client.address)
            keep(self._dialects, model, dialect)
        return dialect

    async def prices(self, model: str | None = None) -> ModelPrices | None:
        """Return a model's prices; ``None``: none are known."""
        model = model or self.model
        if model not in self._prices:
            find = partial(prices_of, model, self._client.address, self.spec.prices)
            # The first search loads the public lists.
            return keep(self._prices, model, await asyncio.to_thread(find))
        return self._prices[model]

    async def _counted(
        self,
        model: str,
        attempt: Callable[[Callable[[], None]], Awaitable[AssistantMessage | ModelError]],
    ) -> AssistantMessage | ModelError:
        """Make one try, and count it."""
        began, first_at = self._now(), None

        def begins() -> None:
            nonlocal first_at
            first_at = self._now()

        outcome, may_recover = "cancelled", True
        try:
            answer = await attempt(begins)
            outcome = answer.code if isinstance(answer, ModelError) else "ok"
            may_recover = not isinstance(answer, ModelError) or answer.retryable
            return answer
        finally:
            metrics.model_called(
                self.spec.name,
                model,
                outcome,
                seconds=self._now() - began,
                first_s=None if first_at is None else first_at - began,
                may_recover=may_recover,
            )

    async def _try(
        self,
        path: str,
        body: bytes,
        sent: Callable[[], int],
        begin: Callable[[], AnswerBuilder],
        on_delta: OnDelta | None,
        lost: Callable[[Usage], None],
        begins: Callable[[], None],
    ) -> AssistantMessage | ModelError:
        """Make one try and return its error instead of raising it.

        ``begins`` is called with the first piece of the answer, ``lost`` with the usage of a
        request that was sent, not refused, and not answered whole.

        An error raised while the transport's is handled would carry it as context, and that may
        quote the request with the key.
        """
        asked_at = asyncio.get_running_loop().time()
        builder, response, request = begin(), None, Request()
        try:
            try:
                response = await self._client.post(path, body, request)
            except NETWORK_ERRORS as error:
                return self._report.unreachable(error)
            if not is_success(response):
                request.is_owed = False
                return await self._client.refusal(response, self._clock)
            await read(response, builder, self._report, asked_at, on_delta, begins)
            answer = builder.finish(self._clock(), self._new_id, sent)
            request.is_owed = False
            return answer
        except ModelError as error:
            return error
        finally:
            if response is not None:
                response.close()  # closes the connection of an unread stream
            if request.is_owed:
                lost(builder.usage_so_far(sent))


def _tell_lost(options: ModelOptions, pay: Callable[[Usage], None], usage: Usage) -> None:
    """Report what a request took whose answer broke off, or was cancelled."""
    pay(usage)
    if options.on_lost is not None:
        options.on_lost(usage)


def _without(secrets: Redactor, answer: AssistantMessage) -> AssistantMessage:
    """Return an answer without the secrets that were sent to its server, which may repeat them."""
    calls = tuple(
        call.model_copy(
            update={
                "name": secrets.text(call.name),
                "arguments": secrets.value(call.arguments),
                "malformed": call.malformed and secrets.text(call.malformed),
            }
        )
        for call in answer.tool_calls
    )
    content = secrets.text(answer.content)
    if content == answer.content and calls == answer.tool_calls:
        return answer
    return answer.model_copy(update={"content": content, "tool_calls": calls})


def open_provider(spec: ServerSpec, model: str) -> ModelProvider:
    """Return a provider for a server's models; nothing is taken from the environment.

    Args:
        model: default model, for calls whose options name none.

    Raises:
        InvalidInputError: the server's description is invalid.
    """
    return ModelProvider(spec, model)
