"""A model behind an OpenAI-compatible API: Chat Completions or Responses."""

import asyncio
import copy
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import aiohttp
from pydantic_core import to_json

from bottega.agents.messages import AssistantMessage, StandardMessage, ToolCall, ToolMessage
from bottega.agents.provider import FailedTry, ModelOptions, OnDelta, ToolSchema
from bottega.agents.tokens import size_of, tokens_in
from bottega.clock import Clock, monotonic, utcnow
from bottega.errors import InvalidInputError, ModelError
from bottega.llm.answer import AnswerBuilder
from bottega.llm.backoff import next_delay_s, out_of_patience
from bottega.llm.chat import chat_completions
from bottega.llm.client import NETWORK_ERRORS, ModelClient, is_success
from bottega.llm.dialect import Dialect, NewDialect
from bottega.llm.errors import STREAM_BROKEN
from bottega.llm.responses import responses
from bottega.llm.sse import SSESplitter

Api = Literal["chat_completions", "responses"]

_DIALECTS: Mapping[str, NewDialect] = {
    "chat_completions": chat_completions,
    "responses": responses,
}
_COLLECT_S = 0.025
_DRAIN_S = 0.1
_LONGEST_ANSWER = 64 * 1024 * 1024
_MOST_BROKEN = 5
"""Most broken answers of one call: each may cost as much as a complete one."""

_DEFAULTS = ModelOptions()


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


class OpenAIProvider:
    """Calls a model, always streaming. The server stores nothing between calls.

    Connections open at the first call and belong to its event loop; another loop gets its own.
    After :meth:`aclose` the provider stays usable and opens new connections.

    Args:
        model: default model, for calls whose options name none.
        api: ``chat_completions``, which most servers have, or ``responses``, with which reasoning
            models continue their reasoning after tool calls.
        api_key: ``None`` takes ``OPENAI_API_KEY``.
        base_url: ``None`` takes ``OPENAI_BASE_URL``, then OpenAI's own.
        timeout_s: longest silence of the server, in seconds, before and within an answer.
        patience_s: seconds after a call's first failure during which it is repeated while the
            server is down or overloaded, or breaks off its answers; 0: no repetition.
        extra_body: extra fields of every request, such as ``{"temperature": 0}``. With Responses
            set ``{"include": []}`` for models without reasoning.
        clock, now, sleep, random_unit, new_id: time and randomness; ``now`` is monotonic, in
            seconds; ``random_unit`` is in [0, 1).

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        api: Api = "chat_completions",
        api_key: str | None = None,
        base_url: str | None = None,
        timeout_s: float = 300.0,
        patience_s: float = 30.0,
        extra_body: Mapping[str, Any] | None = None,
        clock: Clock = utcnow,
        now: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_unit: Callable[[], float] = random.random,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        if timeout_s <= 0 or patience_s < 0:
            raise InvalidInputError("timeout_s must be positive and patience_s not negative")
        if api not in _DIALECTS:
            raise InvalidInputError(f"api must be one of: {', '.join(_DIALECTS)}")
        self.model = model
        self.api = api
        self._patience_s = patience_s
        self._new_dialect = _DIALECTS[api]
        self._extra = dict(extra_body or {})
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._random_unit = random_unit
        self._new_id = new_id
        self._dialects: dict[str, Dialect] = {}
        self._client = ModelClient(api_key, base_url, timeout_s)
        self._report = self._client.report
        self._dialect(model)  # now: wrong fields fail at the start

    def __repr__(self) -> str:
        return (
            f"OpenAIProvider({self.model!r}, api={self.api!r}, base_url={self._client.address!r})"
        )

    def for_model(self, model: str, patience_s: float | None = None) -> "OpenAIProvider":
        """Copy the provider for another default model; both share (and close) the connections.

        Args:
            patience_s: ``None``: that of this provider.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        if (model, patience_s) == (self.model, self._patience_s):
            return self
        other = copy.copy(self)
        other.model, other._patience_s = model, patience_s
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
            The message. Its metadata holds ``finish_reason`` (``length``: cut off), and
            ``refusal: True`` if its content is the model's refusal. Its ``state`` goes back to this
            server with the message.

        Raises:
            ModelError: the call failed for good.
            HistoryError: a message cannot be sent.
        """
        dialect = self._dialect(options.model or self.model)
        body = dialect.body(messages, tools, options.max_output_tokens, options.asked)
        after_results = bool(messages) and isinstance(messages[-1], ToolMessage)
        begin = partial(dialect.new_answer, self._report, after_results)
        number, broken, failed_at = 1, 0, None
        while True:
            answer = await self._try(dialect.path, body, begin, on_delta)
            if isinstance(answer, AssistantMessage):
                return answer
            broken += answer.code == STREAM_BROKEN
            if not answer.retryable or self._patience_s == 0 or broken == _MOST_BROKEN:
                raise answer
            now = self._now()
            failed_at = now if failed_at is None else failed_at
            left_s = failed_at + self._patience_s - now
            pause_s = next_delay_s(number, answer, self._random_unit(), left_s)
            if pause_s is None:
                raise out_of_patience(number, answer, self._patience_s)
            if options.on_failed_try is not None:
                options.on_failed_try(FailedTry(number, answer, pause_s))
            await self._sleep(pause_s)
            number += 1

    def _dialect(self, model: str) -> Dialect:
        dialect = self._dialects.get(model)
        if dialect is None:
            dialect = self._new_dialect(model, self._extra, self._client.address)
            self._dialects[model] = dialect
        return dialect

    async def _try(
        self,
        path: str,
        body: bytes,
        begin: Callable[[], AnswerBuilder],
        on_delta: OnDelta | None,
    ) -> AssistantMessage | ModelError:
        """Make one try and return its error instead of raising it.

        An error raised while the transport's is handled would carry it as context, and that may
        quote the request with the key.
        """
        try:
            response = await self._client.post(path, body)
        except NETWORK_ERRORS as error:
            return self._report.unreachable(error)
        try:
            if not is_success(response):
                return await self._client.refusal(response, self._clock)
            builder = begin()
            message = await self._read(response, builder, on_delta)
            return _with_usage(message, len(body), builder.hidden_size)
        except ModelError as error:
            return error
        finally:
            response.close()  # closes the connection of an unread stream

    async def _read(
        self, response: aiohttp.ClientResponse, builder: AnswerBuilder, on_delta: OnDelta | None
    ) -> AssistantMessage:
        """Read the answer as it arrives.

        Raises:
            ModelError: the connection failed, or the answer cannot be used. After a complete answer
                only its usage may be missing, which is not an error.
        """
        content_type = response.headers.get("content-type", "").lower()
        if "html" in content_type:
            raise self._report.no_completion(content_type)
        reader = _Whole(builder) if "json" in content_type else _Events(builder)
        failure: ModelError | None = None
        length = 0
        began = asyncio.get_running_loop().time()
        while not builder.complete:
            try:
                piece = await response.content.readany()
            except NETWORK_ERRORS as error:
                failure = self._report.interrupted(error)
                break
            length += len(piece)
            if length > _LONGEST_ANSWER:
                failure = self._report.no_completion(f"more than {_LONGEST_ANSWER >> 20} MB")
            if failure is not None or not piece:
                break
            await _notify(on_delta, reader.feed(piece))
            if not builder.finished:
                _collect(response, began)
        if failure is not None and not builder.finished:
            raise failure
        if failure is None:
            await _drain(response)
        if not builder.finished:
            await _notify(on_delta, reader.finish())
        return builder.finish(self._clock(), self._new_id)


def _collect(response: aiohttp.ClientResponse, began: float) -> None:
    """Leave what arrives next in the socket for a while, since each read costs the same.

    So an answer's end waits at most as long as the answer has taken, and ``_COLLECT_S``.
    """
    transport = response.connection and response.connection.transport
    if not transport or transport.is_closing():
        return
    loop = asyncio.get_running_loop()
    transport.pause_reading()
    loop.call_later(min(_COLLECT_S, loop.time() - began), _read_again, transport)


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


def _with_usage(
    message: AssistantMessage, sent: int, hidden: Callable[[], int] = lambda: 0
) -> AssistantMessage:
    """Estimate the tokens that the server did not report, and mark the usage as estimated.

    Args:
        sent: size of the request's body, in bytes.
        hidden: measures reasoning and the like, beside text and calls, in bytes.
    """
    usage = message.usage
    if usage.input and usage.output:
        return message
    spoken = size_of(message.content) + sum(map(_size_of_call, message.tool_calls))
    thought = hidden()
    if usage.input and not (spoken or thought):
        return message
    filled = replace(usage, input=usage.input or tokens_in(sent), estimated=True)
    if not usage.output:
        reasoning = tokens_in(thought)
        filled = replace(filled, output=tokens_in(spoken + thought), reasoning=reasoning)
    return message.model_copy(update={"usage": filled})


def _size_of_call(call: ToolCall) -> int:
    if call.malformed is not None:
        return size_of(call.name) + size_of(call.malformed)
    return size_of(call.name) + len(to_json(call.arguments))
