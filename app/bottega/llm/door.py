"""The way to a model's server: the SDK's clients, and their low-level door.

The door is ``client.post`` with bytes in and the raw response out: the SDK's high-level one walks
the whole history at every call. Authentication, base URL, proxies, timeouts and status errors stay
the SDK's.
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
from bottega.llm.failures import Reporter

NO_KEY = "none"
"""Stands for the key of a server that wants none; it is no secret."""

NETWORK_ERRORS = (OpenAIError, httpx2.HTTPError, aiohttp.ClientError, ssl.SSLError, OSError)
"""What asking a server, and reading its answer, may raise."""

_CONNECT_TIMEOUT_S = 10.0
# Headers by which the SDK tells its maker about this machine; each costs time at every call.
_LEFT_OUT = cast(
    "Mapping[str, str]",
    {
        f"X-Stainless-{part}": Omit()
        for part in ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async")
    },
)
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Door:
    """The SDK's clients, one per event loop, since connections belong to their loop.

    Args:
        api_key: ``None`` takes ``OPENAI_API_KEY``.
        base_url: ``None`` takes ``OPENAI_BASE_URL``, then OpenAI's own.
        timeout_s: longest silence of the server, in seconds.

    Attributes:
        address: of the server, fit to be shown.
        report: makes errors that do not show the key.

    Raises:
        InvalidInputError: there is no key, or an argument cannot be used.
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

    async def post(self, path: str, body: bytes) -> httpx2.Response:
        """Send a request; answers once the status is known, with the body still to be read.

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
