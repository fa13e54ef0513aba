"""The connection to a model's server: the SDK's settings and headers, sent by aiohttp.

The SDK reads key, address and organisation, and makes the headers, once for each server. Its own
calls walk the whole history and build URL and headers each time.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator
from functools import cache
from ipaddress import ip_address, ip_network
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
import httpx2
from openai import AsyncOpenAI, Omit, OpenAIError
from pydantic_core import from_json
from yarl import URL

from bottega.clock import Clock
from bottega.errors import InvalidInputError, ModelError
from bottega.llm.errors import ErrorMapper

NO_KEY = "none"
"""Placeholder key for a server that needs none; it is not a secret."""

NETWORK_ERRORS = (aiohttp.ClientError, ssl.SSLError, OSError, TimeoutError)
"""Errors of sending a request and reading its answer."""

_CONNECT_TIMEOUT_S = 10.0
_KEPT_S = 5.0
_MOST_CONNECTIONS = 1000
_LONGEST_ERROR = 65_536
_LONGEST_ERROR_S = 10.0
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class ModelClient:
    """Sends requests to one server, with one pool of connections per event loop.

    Args:
        api_key: ``None`` takes ``OPENAI_API_KEY``.
        base_url: ``None`` takes ``OPENAI_BASE_URL``, then OpenAI's own.
        timeout_s: longest silence of the server, in seconds.

    Attributes:
        address: the server's URL without credentials.
        report: makes errors that do not show the key.

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    def __init__(self, api_key: str | None, base_url: str | None, timeout_s: float) -> None:
        sdk = _sdk_client(_checked_key(api_key), base_url)  # now: wrong settings fail at the start
        self.address = _address(sdk.base_url)
        self.report = ErrorMapper(self.address, "" if sdk.api_key == NO_KEY else sdk.api_key)
        self._base = sdk.base_url
        self._headers = _headers(sdk)
        self._proxy = _proxy(sdk.base_url)
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            connect=timeout_s,  # with the wait for a free connection
            sock_connect=min(_CONNECT_TIMEOUT_S, timeout_s),
            sock_read=timeout_s,
        )
        self._urls: dict[str, URL] = {}
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            WeakKeyDictionary()
        )

    async def post(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        """Send a request; return when the status is known, before the body is read.

        The caller closes the response.

        Raises:
            NETWORK_ERRORS: there is no answer.
        """
        url = self._urls.get(path)
        if url is None:
            raw_path = self._base.raw_path + path.lstrip("/").encode()
            url = self._urls[path] = URL(str(self._base.copy_with(raw_path=raw_path)), encoded=True)
        try:
            # Not the session's headers: aiohttp sends those, with the key, to a proxy too.
            return await self._session().post(
                url, data=body, headers=self._headers, proxy=self._proxy
            )
        except ValueError as error:  # a header, or a host of a redirect, that cannot be used
            raise aiohttp.ClientError("the request cannot be sent") from error

    async def refusal(self, response: aiohttp.ClientResponse, clock: Clock) -> ModelError:
        """Make the error of a response whose status is not a success, from the body's start."""
        body = bytearray()
        try:
            async with asyncio.timeout(_LONGEST_ERROR_S):
                async for piece in pieces_of(response):
                    body += piece
                    if len(body) >= _LONGEST_ERROR:
                        break
        except NETWORK_ERRORS:
            pass  # the status is known
        return self.report.refused(response.status, _decoded(body), response.headers, clock())

    async def aclose(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=_MOST_CONNECTIONS, keepalive_timeout=_KEPT_S, ssl=_certificates()
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
            )
        return session


def is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


async def pieces_of(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of an answer as they arrive."""
    async for piece in response.content.iter_any():
        yield piece


def _sdk_client(api_key: str | None, base_url: str | None) -> AsyncOpenAI:
    """Make the SDK's client, which resolves settings; no request goes through it."""
    unused = httpx2.AsyncClient(trust_env=False, verify=_certificates())
    try:
        return AsyncOpenAI(api_key=api_key, base_url=base_url, http_client=unused)
    except OpenAIError:
        raise InvalidInputError(
            "there is no API key for the model: set OPENAI_API_KEY, or pass api_key=…; if the "
            f"server needs none, use any text, such as '{NO_KEY}'",
            code="model_unauthorized",
        ) from None


def _headers(sdk: AsyncOpenAI) -> dict[str, str]:
    """Return the SDK's headers, without those that describe this machine."""
    headers = {**sdk.auth_headers, **sdk.default_headers}
    return {
        name: value
        for name, value in headers.items()
        if not isinstance(value, Omit) and not name.startswith("X-Stainless")
    }


def _proxy(url: httpx2.URL) -> str | None:
    """Return the environment's proxy for a server; none for this machine."""
    proxies = getproxies()
    direct = (name.strip() for name in proxies.get("no", "").split(","))
    if url.host in _LOOPBACK or any(_is_named(url, name) for name in direct):
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
    try:
        return from_json(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()


@cache
def _certificates() -> ssl.SSLContext:
    """Load the trusted certificates once for all clients: it takes 20 ms."""
    return httpx2.create_ssl_context()


def _checked_key(api_key: str | None) -> str | None:
    """Return the key without surrounding blanks, such as the line end of a file."""
    if api_key is None:
        api_key = os.environ.get("OPENAI_API_KEY")
    key = api_key.strip() if api_key is not None else None
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidInputError(
            "the API key contains invalid characters; copy it again",
            code="model_unauthorized",
        )
    return key


def _address(url: httpx2.URL) -> str:
    """Return the URL without credentials and query."""
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInputError("OPENAI_BASE_URL must be an http(s) URL such as https://host/v1")
    port = f":{url.port}" if url.port else ""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"
