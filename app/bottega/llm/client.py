"""The connection to a model's server: the SDK's clients, used through ``client.post``.

``client.post`` takes bytes and returns the raw response. The SDK's high-level calls walk the whole
history each time. The SDK still does authentication, base URL, proxies, timeouts and status errors.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary

import aiohttp
import httpx2
from openai import AsyncOpenAI, AsyncStream, DefaultAioHttpClient, Omit, OpenAIError

from bottega.errors import InvalidInputError
from bottega.llm.errors import ErrorMapper

NO_KEY = "none"
"""Placeholder key for a server that needs none; it is not a secret."""

NETWORK_ERRORS = (OpenAIError, httpx2.HTTPError, aiohttp.ClientError, ssl.SSLError, OSError)
"""Errors of sending a request and reading its answer."""

_CONNECT_TIMEOUT_S = 10.0
# Headers in which the SDK describes this machine; building them takes time at every call.
_LEFT_OUT = cast(
    "Mapping[str, str]",
    {
        f"X-Stainless-{part}": Omit()
        for part in ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async")
    },
)
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class ModelClient:
    """The SDK's clients, one per event loop, since connections belong to a loop.

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
        self._api_key = _checked_key(api_key)
        self._base_url = base_url
        self._timeout = httpx2.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = (
            WeakKeyDictionary()
        )
        client = self._open()  # now: wrong settings fail at the start
        self._spare: AsyncOpenAI | None = client
        self.address = _address(client.base_url)
        self.report = ErrorMapper(self.address, "" if client.api_key == NO_KEY else client.api_key)

    async def post(self, path: str, body: bytes) -> httpx2.Response:
        """Send a request; return when the status is known, before the body is read.

        Raises:
            OpenAIError: as the SDK maps it.
        """
        response = await self._client().post(
            path,
            cast_to=httpx2.Response,
            content=body,
            stream=True,
            stream_cls=AsyncStream[bytes],
        )
        # With this cast_to the SDK returns the raw response and ignores stream_cls.
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
        # A server on this machine is reached without the environment's proxies.
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
                "there is no API key for the model: set OPENAI_API_KEY, or pass api_key=…; if the "
                f"server needs none, use any text, such as '{NO_KEY}'",
                code="model_unauthorized",
            ) from None


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
