"""Client of one model server, in any dialect: its connections, and the tries of a call.

The client opens sessions with :mod:`bottega.http_sessions`, because answers are streams. Requests
of tools do not use this module but :mod:`bottega.tools.egress`.
"""

import asyncio
import copy
import random
import re
import uuid
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import unquote_to_bytes
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
import httpx2
from cachetools import LRUCache
from pydantic_core import from_json
from yarl import URL

from bottega import metrics
from bottega.agents.messages import AssistantMessage, StandardMessage, ToolMessage, Usage
from bottega.agents.provider import DialectName, FailedTry, ModelOptions, OnDelta, ToolSchema
from bottega.clock import Clock, monotonic, utcnow
from bottega.errors import InvalidInputError, ModelError
from bottega.http_sessions import NETWORK_ERRORS, body_of, open_session, reader_of
from bottega.llm.dialects.answer import AnswerBuilder, read
from bottega.llm.dialects.anthropic import anthropic
from bottega.llm.dialects.chat import chat
from bottega.llm.dialects.dialect import (
    NO_FILES,
    Dialect,
    MissingFilesError,
    NewDialect,
    load_files,
    size_as_text,
)
from bottega.llm.dialects.gemini import gemini
from bottega.llm.dialects.opaque import dropped_for
from bottega.llm.dialects.responses import responses
from bottega.llm.errors import (
    BROKEN_ANSWERS,
    MOST_BROKEN,
    ErrorMapper,
    next_delay_s,
    out_of_patience,
    places_of,
)
from bottega.llm.server import ANTHROPIC_VERSION, VENDORS, VERSION_HEADER, ServerSpec
from bottega.llm.usage import LOOPBACK, ModelPrices, prices_of
from bottega.llm.vendor_words import is_known
from bottega.outside import OutsideError
from bottega.redaction import Redactor, is_vocabulary
from bottega.trace_context import with_trace

MOST_MODELS = 1000
"""Maximum number of models in a server's cache, because users may request any model."""

_KEY_HEADERS: Mapping[str, tuple[str, str]] = {
    "chat": ("Authorization", "Bearer {}"),
    "responses": ("Authorization", "Bearer {}"),
    "anthropic": ("x-api-key", "{}"),
    "gemini": ("x-goog-api-key", "{}"),
}
_NOT_A_URL = "a model's base URL must be an http(s) URL such as https://host/v1"
_PUBLIC = frozenset(
    (
        *("accept", "authorization", "content-type", "user-agent"),
        *("openai-organization", "openai-project"),
    )
)
"""Headers that another host may receive after a redirect, or that aiohttp removes itself."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
"""Name of a header (RFC 9110, section 5.6.2)."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LONGEST_ERROR_S = 10.0


@dataclass(slots=True)
class Request:
    """The HTTP request of one try.

    Attributes:
        is_owed: true if the server may charge for the request: the request was sent, was not
            refused, and is not paid yet.
    """

    is_owed: bool = False


class _Body(aiohttp.BytesPayload):
    """Body of a request. The body sets ``request.is_owed`` at the moment of sending."""

    def __init__(self, body: bytes, request: Request) -> None:
        super().__init__(body)
        self._request = request

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        self._request.is_owed = True
        await super().write_with_length(writer, content_length)


class ModelClient:
    """HTTP client of one server, with one pool of connections per event loop.

    When an event loop shuts down, as at the end of ``asyncio.run``, the loop's pool closes.

    Attributes:
        address: the server's URL without credentials.
        report: makes the errors, which must not show the key.

    Raises:
        InvalidInputError: the server's URL is not valid.
    """

    def __init__(self, spec: ServerSpec) -> None:
        given = _base(spec)
        base = given.copy_with(userinfo=b"")
        self._prefix = str(base.copy_with(raw_path=base.raw_path.rstrip(b"/")))
        self.address = _address(base)
        self.report = ErrorMapper(
            self.address, spec.api_key or "", places_of(spec), hidden=spec.hidden
        )
        self._headers = headers_of(spec, given.userinfo)
        self._guard = spec.guard
        self._look_up = spec.look_up
        # Follow redirects only if no other header can be secret: for a different host, aiohttp
        # removes only the header Authorization.
        is_plain = spec.guard is None and _PUBLIC.issuperset(map(str.lower, spec.headers))
        self._follows = is_plain and spec.dialect in ("chat", "responses")
        self._proxy = None if spec.guard else _proxy(base)
        timeout_s = spec.timeout_s
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            connect=timeout_s,  # connect includes the wait for a free connection
            sock_connect=min(10.0, timeout_s),
            sock_read=timeout_s,
        )
        self._sessions: WeakKeyDictionary[
            asyncio.AbstractEventLoop, AsyncGenerator[aiohttp.ClientSession, None]
        ] = WeakKeyDictionary()

    async def post(self, path: str, body: bytes, request: Request) -> aiohttp.ClientResponse:
        """Send a request. Return the response when its status has arrived, before the body.

        The caller closes the response. The method sets ``request.is_owed`` when the request's body
        is sent.

        Raises:
            NETWORK_ERRORS: no response arrived.
        """
        url = URL(self._prefix + path, encoded=True)
        try:
            # Set the headers here, not in the session: they contain the key, and aiohttp sends the
            # headers of a session to a proxy, too.
            return await (await self._session()).post(
                url,
                data=_Body(body, request),
                headers=with_trace(self._headers),
                proxy=self._proxy,
                allow_redirects=self._follows,
            )
        except ValueError as error:
            # aiohttp may raise ValueError for the host of a redirect.
            if self._follows or isinstance(error, aiohttp.ClientError):
                raise aiohttp.ClientError("the redirect cannot be followed") from error
            raise

    async def refusal(self, response: aiohttp.ClientResponse, clock: Clock) -> ModelError:
        """Make an error from a failed response's status and the start of its body."""
        body = bytearray()
        try:
            async with (
                asyncio.timeout(_LONGEST_ERROR_S),
                aclosing(body_of(response, reader_of(response, 65_536))) as pieces,
            ):
                async for piece in pieces:
                    body += piece
        except (*NETWORK_ERRORS, OutsideError):
            pass  # without a complete body, the error text still has the status
        return self.report.refused(response.status, _decoded(body), response.headers, clock())

    async def aclose(self) -> None:
        if (session := self._sessions.get(asyncio.get_running_loop())) is not None:
            await session.aclose()

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = self._open(loop)
        return await anext(self._sessions[loop])

    async def _open(
        self, loop: asyncio.AbstractEventLoop
    ) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Yield the same session at each step; close the session when the generator is closed.

        An event loop closes open generators when the loop shuts down.
        """
        try:
            session = open_session(
                self._timeout,
                most=1000,
                kept_s=5.0,
                look_up=self._look_up,
                guard=self._guard,
            )
            async with session:
                while True:
                    yield session
        finally:
            del self._sessions[loop]


def is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


def _base(spec: ServerSpec) -> httpx2.URL:
    try:
        return httpx2.URL(spec.base_url or VENDORS[spec.dialect])
    except (httpx2.InvalidURL, TypeError):
        raise InvalidInputError(f"{_NOT_A_URL}: {spec.base_url!r}") from None


def headers_of(spec: ServerSpec, login: bytes = b"") -> dict[str, str]:
    """Return all headers of a request. The server's own headers replace the dialect's headers.

    Args:
        login: user and password from the server's URL; empty: the URL has no password.

    Raises:
        InvalidInputError: key and login both need the header Authorization, or HTTP does not allow
            a header.
    """
    own = {"Accept": "application/json", "Content-Type": "application/json"}
    own["Accept-Encoding"] = "identity"  # decompression can make an answer 1,000 times larger
    if spec.dialect == "anthropic":
        own[VERSION_HEADER] = ANTHROPIC_VERSION
    if spec.api_key is not None:
        name, template = _KEY_HEADERS[spec.dialect]
        own[name] = template.format(spec.api_key)
    if login:
        if "Authorization" in own or any(name.lower() == "authorization" for name in spec.headers):
            raise InvalidInputError(
                "the model's base URL has a password, so no key or header Authorization may be set"
            )
        own["Authorization"] = f"Basic {b64encode(unquote_to_bytes(login)).decode()}"
    names = {name.lower() for name in spec.headers}
    found = {name: value for name, value in own.items() if name.lower() not in names}
    found |= spec.headers
    for name, value in found.items():
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            raise InvalidInputError(
                f"HTTP does not allow the name or the value of the model server's header {name!r}"
            )
    return found


def _proxy(url: httpx2.URL) -> str | None:
    """Return the environment's proxy for a server; ``None``: no proxy, as for loopback."""
    proxies = getproxies()
    direct = (name.strip() for name in proxies.get("no", "").split(","))
    if url.host in LOOPBACK or any(_is_named(url, name) for name in direct):
        return None
    if proxy_bypass(url.host) or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _is_named(url: httpx2.URL, name: str) -> bool:
    if name == f"{url.scheme}://{url.host}":
        return True
    try:
        return ip_address(url.host) in ip_network(name.strip("[]"), strict=False)
    except ValueError:
        return False


def _decoded(body: bytes | bytearray) -> object:
    """Decode JSON, even if its end is missing; return a body that is not JSON as text."""
    try:
        return from_json(body, allow_partial="trailing-strings")
    except ValueError:
        return body.decode("utf-8", "replace").strip()


def _address(url: httpx2.URL) -> str:
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInputError(_NOT_A_URL)
    port = f":{url.port}" if url.port else ""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"


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
    """Client of one server's models.

    Every answer is streamed, and the server stores nothing between calls.

    Connections open at the first call. Each event loop has its own connections. After
    :meth:`aclose` the provider stays usable and opens new connections.

    Args:
        model: default model, for calls whose options have no model.
        clock, now, sleep, random_unit, new_id: time and randomness. ``now`` is monotonic, in
            seconds. ``random_unit`` is in [0, 1).

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
        self._dialects: LRUCache[str, Dialect] = LRUCache(MOST_MODELS)
        self._prices: LRUCache[str, ModelPrices | None] = LRUCache(MOST_MODELS)
        self._client = ModelClient(spec)
        self._report = self._client.report
        sent = (spec.api_key or "", *spec.hidden)
        self._secrets = Redactor(each for each in sent if not is_vocabulary(each))
        self._dialect(model)  # raises an error now if fields of the spec are wrong

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.model!r}, dialect={self.spec.dialect!r}, "
            f"base_url={self._client.address!r})"
        )

    def for_model(self, model: str, patience_s: float | None = None) -> "ModelProvider":
        """Copy the provider for a new default model. Both providers use the same connections.

        Args:
            patience_s: patience of the copy in seconds; by default the patience of this provider.
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
        """Request the next message. After a failed try, try again within ``patience_s`` seconds.

        Args:
            on_delta: receives the text in pieces. A new try begins the answer again.
                ``options.on_failed_try`` then reports that the earlier pieces are invalid.

        Returns:
            The message. The message's metadata has ``model`` (the requested model),
            ``finish_reason`` (``length``: cut off), and ``refusal: True`` if the content is the
            model's refusal. Later requests send the message's ``state`` back to this server.

        Raises:
            ModelError: the last try failed.
            HistoryError: a message cannot be sent.
            InvalidInputError: a part cannot be sent, or a file does not exist.
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
            number: number of tries made.
            until: time at which ``patience_s`` is over, by the provider's clock.

        Raises:
            ModelError: no patience is left.
        """
        left_s = until - self._now()
        pause_s = next_delay_s(number, error, self._random_unit(), left_s)
        if pause_s is None:
            raise out_of_patience(number, error, self.spec.patience_s)
        if options.on_failed_try is not None:
            options.on_failed_try(FailedTry(number, error, pause_s))
        await self._sleep(pause_s)

    def _pay(self, model: str, prices: ModelPrices | None, usage: Usage) -> None:
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
        """Warn if the call drops a different model's state, or if the finish reason is unknown.

        An answer with an unknown finish reason counts as complete.
        """
        if options.on_warning is None:
            return
        name, model = self.spec.name, str(answer.metadata["model"])
        if (other := dropped_for(dialect.origin, messages, name, model)) is not None:
            text = (
                f"'{name}/{model}' continued without the reasoning and other state of earlier "
                f"answers by '{other}'"
            )
            options.on_warning(STATE_DROPPED, text)
        if not is_known(reason := str(answer.metadata.get("finish_reason"))):
            text = f"the model's server gave an unknown finish reason: {reason[:100]!r}"
            options.on_warning(UNKNOWN_REASON, text)

    def _dialect(self, model: str) -> Dialect:
        dialect = self._dialects.get(model)
        if dialect is None:
            make = _DIALECTS[self.spec.dialect]
            dialect = self._dialects[model] = make(self.spec, model, self._client.address)
        return dialect

    async def prices(self, model: str | None = None) -> ModelPrices | None:
        model = model or self.model
        if model not in self._prices:
            find = partial(prices_of, model, self._client.address, self.spec.prices)
            # The search for prices runs in a thread, because the first search loads the public
            # lists.
            self._prices[model] = await asyncio.to_thread(find)
        return self._prices[model]

    async def _counted(
        self,
        model: str,
        attempt: Callable[[Callable[[], None]], Awaitable[AssistantMessage | ModelError]],
    ) -> AssistantMessage | ModelError:
        began, first_at = self._now(), None

        def begins() -> None:
            nonlocal first_at
            first_at = self._now()

        outcome, may_recover = "cancelled", True
        try:
            answer = await attempt(begins)
            outcome = answer.code if isinstance(answer, ModelError) else "ok"
            may_recover = not isinstance(answer, ModelError) or answer.retryable
            if isinstance(answer, AssistantMessage) and first_at is not None:
                answer.metadata["first_token_ms"] = round((first_at - began) * 1000)
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
        """Send one request and read the answer. Return an error instead of raising it.

        A raised error would have the transport's error as its context, and the transport's error
        may quote the request, including the key.

        Args:
            lost: called with the usage of a request that was sent and not refused, if the answer is
                incomplete.
            begins: called when the first piece of the answer arrives.
        """
        asked_at = asyncio.get_running_loop().time()
        builder, response, request = None, None, Request()
        try:
            try:
                response = await self._client.post(path, body, request)
            except NETWORK_ERRORS as error:
                return self._report.unreachable(error)
            if not is_success(response):
                request.is_owed = False
                return await self._client.refusal(response, self._clock)
            builder = begin()
            await read(response, builder, self._report, asked_at, on_delta, begins)
            answer = builder.finish(self._clock(), self._new_id, sent)
            request.is_owed = False
            return answer
        except ModelError as error:
            return error
        finally:
            if response is not None:
                response.close()  # closes the connection if the stream was not read to its end
            if request.is_owed:
                lost((builder or begin()).usage_so_far(sent))


def _tell_lost(options: ModelOptions, pay: Callable[[Usage], None], usage: Usage) -> None:
    """Report the usage of a request whose answer broke off or was cancelled."""
    pay(usage)
    if options.on_lost is not None:
        options.on_lost(usage)


def _without(secrets: Redactor, answer: AssistantMessage) -> AssistantMessage:
    """Remove secrets from an answer, because a server may repeat secrets of the request."""
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
    """Return a client of one server. The client ignores environment variables.

    Args:
        model: default model, for calls whose options have no model.

    Raises:
        InvalidInputError: the server's description is invalid.
    """
    return ModelProvider(spec, model)
