"""A model behind an OpenAI-compatible API (spec page 1, A8), by Chat Completions.

The SDK's low-level door is used (``client.post`` with bytes in and the raw response out): its
high-level one walks the whole history at every call. Authentication, base URL, proxies, timeouts
and status errors stay the SDK's; encoding, reading the stream and retries are ours.
"""

import asyncio
import contextlib
import copy
import os
import random
import ssl
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import aiohttp
import httpx2
from openai import APIStatusError, AsyncOpenAI, AsyncStream, DefaultAioHttpClient, Omit, OpenAIError

from app.agents.messages import AssistantMessage, StandardMessage
from app.agents.provider import FailedTry, ModelOptions, OnDelta, ToolSchema
from app.clock import Clock, utcnow
from app.errors import InvalidInputError, ModelError
from app.llm.answer import AnswerBuilder
from app.llm.failures import Reporter
from app.llm.sse import SSESplitter
from app.llm.wire import request_body, request_head

NO_KEY = "none"
"""Stands for the key of a server that wants none; it is no secret."""

_CONNECT_TIMEOUT_S = 10.0
_DRAIN_S = 0.1
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 20.0
_LONGEST_RETRY_AFTER_S = 60.0
_LONGEST_ANSWER = 64 * 1024 * 1024

_DONE = b"[DONE]"
# Headers by which the SDK tells its maker about this machine; each costs time at every call.
_LEFT_OUT = cast(
    "Mapping[str, str]",
    {
        f"X-Stainless-{part}": Omit()
        for part in ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async")
    },
)
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_NETWORK_ERRORS = (OpenAIError, httpx2.HTTPError, aiohttp.ClientError, ssl.SSLError, OSError)
_DEFAULTS = ModelOptions()


def new_call_id() -> str:
    """An id for a tool call that came without one."""
    return f"call_{uuid.uuid4().hex}"


class OpenAIProvider:
    """Asks a model by Chat Completions, always streaming.

    Connections are opened at the first call and belong to its event loop; in another loop the
    provider opens new ones. After :meth:`aclose` it can still be used, and opens them again.

    Args:
        model: name of the model, for calls whose options name none.
        api_key: ``None`` takes ``OPENAI_API_KEY``.
        base_url: ``None`` takes ``OPENAI_BASE_URL``, then OpenAI's own.
        timeout_s: longest silence of the server, in seconds, before and within an answer.
        max_tries: tries of one call, the first included.
        extra_body: further fields of every request, such as ``{"temperature": 0}``.
        clock, sleep, random_unit, new_id: time and randomness; ``random_unit`` is in [0, 1).

    Raises:
        InvalidInputError: there is no key, or an argument cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout_s: float = 300.0,
        max_tries: int = 5,
        extra_body: Mapping[str, Any] | None = None,
        clock: Clock = utcnow,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_unit: Callable[[], float] = random.random,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        if timeout_s <= 0 or max_tries < 1:
            raise InvalidInputError("timeout_s must be positive and max_tries at least 1")
        self.model = model
        self._max_tries = max_tries
        self._extra = dict(extra_body or {})
        self._clock = clock
        self._sleep = sleep
        self._random_unit = random_unit
        self._new_id = new_id
        self._heads: dict[str, bytes] = {model: request_head(model, self._extra)}
        self._door = _Door(api_key, base_url, timeout_s)
        self._report = self._door.report

    def __repr__(self) -> str:
        return f"OpenAIProvider({self.model!r}, base_url={self._door.address!r})"

    def for_model(self, model: str) -> "OpenAIProvider":
        """The same provider with another default model; it shares (and closes) the connections."""
        if model == self.model:
            return self
        other = copy.copy(self)
        other.model = model
        return other

    async def aclose(self) -> None:
        """Close the connections. Calls that are still going on fail."""
        await self._door.aclose()

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = _DEFAULTS,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage:
        """Ask for the next message.

        Args:
            on_delta: told the text as it comes. After a failed try it starts again from the
                beginning: ``options.on_failed_try`` tells that what came before is void.

        Returns:
            The message. Its metadata holds ``finish_reason`` (``length``: cut off), and
            ``refusal: True`` if its content is the model's refusal.

        Raises:
            ModelError: the call failed for good.
        """
        body = request_body(self._head(options.model or self.model), messages, tools)
        number = 1
        while True:
            answer = await self._try(body, on_delta)
            if isinstance(answer, AssistantMessage):
                return answer
            if not answer.retryable or number >= self._max_tries:
                raise answer
            delay_s = self._delay_s(number, answer.retry_after_s)
            if options.on_failed_try is not None:
                options.on_failed_try(FailedTry(number, answer, delay_s))
            await self._sleep(delay_s)
            number += 1

    def _head(self, model: str) -> bytes:
        head = self._heads.get(model)
        if head is None:
            head = self._heads[model] = request_head(model, self._extra)
        return head

    def _delay_s(self, number: int, retry_after_s: float | None) -> float:
        """Seconds before the next try: full jitter, after what the server asked for."""
        if retry_after_s is not None:
            asked = min(retry_after_s, _LONGEST_RETRY_AFTER_S)
            return asked + self._random_unit() * _FIRST_BACKOFF_S
        longest = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (number - 1))
        return self._random_unit() * longest

    async def _try(self, body: bytes, on_delta: OnDelta | None) -> AssistantMessage | ModelError:
        """One try. Its error is a value: raised while the SDK's is handled, it would carry that
        along, and that one quotes the server without leaving out the key.
        """
        try:
            response = await self._door.post(body)
        except _NETWORK_ERRORS as error:
            return self._failure(error)
        try:
            return await self._read(response, on_delta)
        except ModelError as error:
            return error
        finally:
            await response.aclose()  # a stream that was not read to its end: hang up

    def _failure(self, error: Exception) -> ModelError:
        if isinstance(error, APIStatusError):
            return self._report.refused(
                error.status_code, error.body, error.response.headers, self._clock()
            )
        return self._report.unreachable(error)

    async def _read(self, response: httpx2.Response, on_delta: OnDelta | None) -> AssistantMessage:
        content_type = response.headers.get("content-type", "").lower()
        builder = AnswerBuilder(self._report)
        if "html" in content_type:
            raise self._report.no_completion(content_type)
        async with aclosing(self._pieces(response, builder)) as pieces:
            if "json" in content_type:
                await _read_whole(builder, pieces, on_delta)
            else:
                await _read_events(builder, pieces, on_delta)
        return builder.finish(self._clock(), self._new_id)

    async def _pieces(
        self, response: httpx2.Response, builder: AnswerBuilder
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of the answer as they come.

        Raises:
            ModelError: the connection failed, or the answer has no end. Once the answer itself
                is complete, a failure can only cost the usage, and is no error.
        """
        failure: ModelError | None = None
        length = 0
        try:
            async with aclosing(response.aiter_bytes()) as pieces:
                async for piece in pieces:
                    length += len(piece)
                    if length > _LONGEST_ANSWER:
                        break
                    yield piece
        except _NETWORK_ERRORS as error:
            failure = self._report.interrupted(error)
        if length > _LONGEST_ANSWER:
            failure = self._report.no_completion(f"more than {_LONGEST_ANSWER >> 20} MB")
        if failure is not None and not builder.finished:
            raise failure


async def _read_events(
    builder: AnswerBuilder, pieces: AsyncGenerator[bytes, None], on_delta: OnDelta | None
) -> None:
    splitter = SSESplitter()
    async for piece in pieces:
        if await _take(builder, splitter.feed(piece), on_delta):
            # The connection is used again only if the body is read to its end, which is near.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    async for _ in pieces:
                        pass
            return
    if not builder.finished:
        await _take(builder, splitter.finish(), on_delta)


async def _take(builder: AnswerBuilder, events: list[bytes], on_delta: OnDelta | None) -> bool:
    """Take the events that came in one piece; answers whether the stream is done."""
    done = False
    text = ""
    for event in events:
        if event == _DONE:
            done = True
            break
        text += builder.add_event(event)
    await _tell(on_delta, text)
    return done


async def _read_whole(
    builder: AnswerBuilder, pieces: AsyncGenerator[bytes, None], on_delta: OnDelta | None
) -> None:
    """Read the answer of a server that did not stream although it was asked to."""
    body = b"".join([piece async for piece in pieces])
    await _tell(on_delta, builder.add_event(body))


async def _tell(on_delta: OnDelta | None, text: str) -> None:
    if text and on_delta is not None:
        waiting = on_delta(text)
        if waiting is not None:
            await waiting


class _Door:
    """The SDK's clients, one per event loop, since connections belong to their loop.

    Attributes:
        address: of the server, fit to be shown.
    """

    def __init__(self, api_key: str | None, base_url: str | None, timeout_s: float) -> None:
        self._api_key = _checked_key(api_key)
        self._base_url = base_url
        self._timeout = httpx2.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = (
            WeakKeyDictionary()
        )
        client = self._open()  # now, so that a wrong setting is found at the start
        self._spare: AsyncOpenAI | None = client
        self.address = _address(client.base_url)
        self.report = Reporter(self.address, "" if client.api_key == NO_KEY else client.api_key)

    async def post(self, body: bytes) -> httpx2.Response:
        """Send a request; answers once the status is known, with the body still to be read.

        Raises:
            OpenAIError: as the SDK maps it.
        """
        response = await self._client().post(
            "/chat/completions",
            cast_to=httpx2.Response,
            content=body,
            stream=True,
            stream_cls=AsyncStream[bytes],
        )
        # With this cast_to the SDK hands out the raw response, whatever stream_cls says.
        return cast("httpx2.Response", response)

    async def aclose(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _client(self) -> AsyncOpenAI:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client, self._spare = self._spare or self._open(), None
            self._clients[loop] = client
        return client

    def _open(self) -> AsyncOpenAI:
        # Proxies of the environment are not meant for a server on this machine.
        url = self._base_url or os.environ.get("OPENAI_BASE_URL") or ""
        local = httpx2.URL(url).host in _LOOPBACK
        http_client = DefaultAioHttpClient(
            timeout=self._timeout, trust_env=not local, verify=_certificates()
        )
        try:
            return AsyncOpenAI(
                api_key=self._api_key,
                base_url=self._base_url,
                max_retries=0,
                default_headers=_LEFT_OUT,
                timeout=self._timeout,
                http_client=http_client,
            )
        except OpenAIError:
            raise InvalidInputError(
                "there is no API key for the model: set OPENAI_API_KEY, or pass api_key=…; a "
                f"server that wants none takes any text, such as '{NO_KEY}'",
                code="model_unauthorized",
            ) from None


@cache
def _certificates() -> ssl.SSLContext:
    """Whom to trust; loading that takes 20 ms, so all clients share it."""
    return httpx2.create_ssl_context()


def _checked_key(api_key: str | None) -> str | None:
    """The key without the line end that it often has when it comes from a file."""
    if api_key is None:
        api_key = os.environ.get("OPENAI_API_KEY")
    key = api_key.strip() if api_key is not None else None
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidInputError(
            "the API key holds characters that no key has; copy it again",
            code="model_unauthorized",
        )
    return key


def _address(url: httpx2.URL) -> str:
    """The URL without credentials and query."""
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInputError(
            "OPENAI_BASE_URL is no http(s) address; it looks like https://host/v1"
        )
    port = f":{url.port}" if url.port else ""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"
