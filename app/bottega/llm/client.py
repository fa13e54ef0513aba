"""The connection to a model's server, by aiohttp."""

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
import httpx2
from pydantic_core import from_json
from yarl import URL

from bottega.clock import Clock
from bottega.errors import InvalidInputError, ModelError
from bottega.llm.errors import ErrorMapper, places_of
from bottega.llm.prices import LOOPBACK
from bottega.llm.server import ANTHROPIC_VERSION, VENDORS, VERSION_HEADER, ServerSpec
from bottega.network import NETWORK_ERRORS, body_of, open_session, reader_of
from bottega.outside import OutsideError
from bottega.trace_context import with_trace

T = TypeVar("T")

MOST_MODELS = 1000
"""Models of one server for which something is kept. Users may name any."""

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
"""Headers that may be sent to another host, or that aiohttp takes away."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
"""Name of a header (RFC 9110, section 5.6.2)."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LONGEST_ERROR_S = 10.0


@dataclass(slots=True)
class Request:
    """A request of one try.

    Attributes:
        is_owed: it was written, and has neither been refused nor paid.
    """

    is_owed: bool = False


class ModelClient:
    """Sends requests to one server, with one pool of connections per event loop.

    A pool closes at the latest when its event loop shuts down, as at the end of ``asyncio.run``.

    Attributes:
        address: the server's URL without credentials.
        report: makes errors that do not show the key.

    Raises:
        InvalidInputError: the address is not one.
    """

    def __init__(self, spec: ServerSpec) -> None:
        given = _base(spec)
        self._base = given.copy_with(userinfo=b"")
        self.address = _address(self._base)
        self.report = ErrorMapper(
            self.address, spec.api_key or "", places_of(spec), hidden=spec.hidden
        )
        self._headers = _headers(spec, given.userinfo)
        self._guard = spec.guard
        self._look_up = spec.look_up
        # A redirect may lead to another host: aiohttp takes only the header Authorization away.
        is_plain = spec.guard is None and _PUBLIC.issuperset(map(str.lower, spec.headers))
        self._follows = is_plain and spec.dialect in ("chat", "responses")
        self._proxy = None if spec.guard else _proxy(self._base)
        timeout_s = spec.timeout_s
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            connect=timeout_s,  # with the wait for a free connection
            sock_connect=min(10.0, timeout_s),
            sock_read=timeout_s,
        )
        self._urls: dict[str, URL] = {}
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            WeakKeyDictionary()
        )
        self._opened: WeakKeyDictionary[
            asyncio.AbstractEventLoop, AsyncGenerator[aiohttp.ClientSession, None]
        ] = WeakKeyDictionary()

    async def post(self, path: str, body: bytes, request: Request) -> aiohttp.ClientResponse:
        """Send a request; return when the status is known, before the body is read.

        The caller closes the response. ``request`` is owed from when its body is written.

        Raises:
            NETWORK_ERRORS: there is no answer.
        """
        url = self._urls.get(path)
        if url is None:
            raw_path = self._base.raw_path.rstrip(b"/") + path.encode()
            url = URL(str(self._base.copy_with(raw_path=raw_path)), encoded=True)
            keep(self._urls, path, url)
        try:
            # Not the session's headers: aiohttp sends those, with the key, to a proxy too.
            return await (await self._session()).post(
                url,
                data=body,
                headers=with_trace(self._headers),
                proxy=self._proxy,
                allow_redirects=self._follows,
                trace_request_ctx=request,
            )
        except ValueError as error:
            if self._follows or isinstance(error, aiohttp.ClientError):  # a host of a redirect
                raise aiohttp.ClientError("the redirect cannot be followed") from error
            raise

    async def refusal(self, response: aiohttp.ClientResponse, clock: Clock) -> ModelError:
        """Make the error of a response whose status is not a success, from the body's start."""
        body = bytearray()
        try:
            async with (
                asyncio.timeout(_LONGEST_ERROR_S),
                aclosing(body_of(response, reader_of(response, 65_536))) as pieces,
            ):
                async for piece in pieces:
                    body += piece
        except (*NETWORK_ERRORS, OutsideError):
            pass  # the status is known
        return self.report.refused(response.status, _decoded(body), response.headers, clock())

    async def aclose(self) -> None:
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is not None:
            await opened.aclose()

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if (session := self._sessions.get(loop)) is None:
            self._opened[loop] = opened = self._open(loop)
            session = self._sessions[loop] = await anext(opened)
        return session

    async def _open(
        self, loop: asyncio.AbstractEventLoop
    ) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Yield a session; close it with the generator, as an event loop does that shuts down."""
        session = open_session(
            self._timeout,
            most=1000,
            kept_s=5.0,
            look_up=self._look_up,
            guard=self._guard,
            traces=[_written()],
        )
        try:
            async with session:
                yield session
        finally:
            del self._sessions[loop], self._opened[loop]


def keep(kept: dict[str, T], key: str, value: T) -> T:
    """Keep a value, and drop the oldest if there are too many; return it."""
    while len(kept) >= MOST_MODELS:
        del kept[next(iter(kept))]
    kept[key] = value
    return value


def is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


def _base(spec: ServerSpec) -> httpx2.URL:
    try:
        return httpx2.URL(spec.base_url or VENDORS[spec.dialect])
    except (httpx2.InvalidURL, TypeError):
        raise InvalidInputError(f"{_NOT_A_URL}: {spec.base_url!r}") from None


def _headers(spec: ServerSpec, login: bytes) -> dict[str, str]:
    """Return all headers of a request; the server's own replace those of the dialect.

    Args:
        login: user and password in the server's URL; empty if there are none.

    Raises:
        InvalidInputError: both the key and the login would be the header Authorization, or a header
            cannot be sent.
    """
    own = {"Accept": "application/json", "Content-Type": "application/json"}
    own["Accept-Encoding"] = "identity"  # a compressed answer can be a thousand times larger
    if spec.dialect == "anthropic":
        own[VERSION_HEADER] = ANTHROPIC_VERSION
    if spec.api_key is not None:
        name, template = _KEY_HEADERS[spec.dialect]
        own[name] = template.format(spec.api_key)
    if login:
        if "Authorization" in own or any(name.lower() == "authorization" for name in spec.headers):
            raise InvalidInputError(
                "a model's base URL with user and password cannot be sent together with a key"
            )
        own["Authorization"] = f"Basic {b64encode(unquote_to_bytes(login)).decode()}"
    given = {name.lower() for name in spec.headers}
    found = {name: value for name, value in own.items() if name.lower() not in given}
    found |= spec.headers
    for name, value in found.items():
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            raise InvalidInputError(
                f"the header {name!r} of a model's server has a name or a value that cannot be sent"
            )
    return found


def _written() -> aiohttp.TraceConfig:
    """Return what notes that a request is owed, when its body is written."""

    async def write(session: Any, context: Any, chunk: Any) -> None:
        context.trace_request_ctx.is_owed = True

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(write)
    return trace


def _proxy(url: httpx2.URL) -> str | None:
    """Return the environment's proxy for a server; none for this machine."""
    proxies = getproxies()
    direct = (name.strip() for name in proxies.get("no", "").split(","))
    if url.host in LOOPBACK or any(_is_named(url, name) for name in direct):
        return None
    if proxy_bypass(url.host) or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _is_named(url: httpx2.URL, name: str) -> bool:
    """Return true if a part of ``NO_PROXY`` is the server's URL, or a network that it is in."""
    if name == f"{url.scheme}://{url.host}":
        return True
    try:
        return ip_address(url.host) in ip_network(name.strip("[]"), strict=False)
    except ValueError:
        return False


def _decoded(body: bytes | bytearray) -> object:
    """Return a body as JSON, also if its end is missing; else as text."""
    try:
        return from_json(body, allow_partial="trailing-strings")
    except ValueError:
        return body.decode("utf-8", "replace").strip()


def _address(url: httpx2.URL) -> str:
    """Return the URL without credentials and query."""
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInputError(_NOT_A_URL)
    port = f":{url.port}" if url.port else ""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"
