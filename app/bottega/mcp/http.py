"""HTTP for MCP servers: through the guarded connections, without redirects, bounded."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

from bottega.errors import InvalidInputError, UnavailableError
from bottega.tools.egress import Egress, EgressError
from bottega.trace_context import with_trace

_UNTOLD = frozenset({404, 405})
"""Answers of servers that do not know a method; the SDK tries another."""


class McpTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of one connection to a server.

    Attributes:
        failure: why the last request failed, for people; the SDK tells less.
        is_forgotten: the server no longer knows the session, and did not do what was asked.
    """

    def __init__(self, egress: Egress, tenant: str, max_bytes: int) -> None:
        """Create it for a tenant; ``max_bytes`` limits each answer."""
        self._egress = egress
        self._tenant = tenant
        self._max_bytes = max_bytes
        self.failure: InvalidInputError | UnavailableError | None = None
        self.is_forgotten = False
        self._mirrored: dict[str, Mapping[tuple[str, ...], str]] = {}

    def mirror(self, tool: str, schema: Mapping[str, Any]) -> None:
        """Send arguments of a tool's calls in headers too, if its schema says so.

        Only servers of the protocol 2026-07-28 may want it, by the keyword ``x-mcp-header``.
        """
        if tool not in self._mirrored:
            from mcp.shared.inbound import x_mcp_header_map

            self._mirrored[tool] = x_mcp_header_map(schema)

    def _add_mirrored(self, request: httpx2.Request) -> None:
        # The SDK names the method in a header only in the newer protocol.
        if request.headers.get("mcp-method") == "tools/call" and any(self._mirrored.values()):
            from mcp.shared.inbound import mcp_param_headers

            params = json.loads(request.content)["params"]
            wanted = self._mirrored.get(params["name"], {})
            request.headers.update(mcp_param_headers(wanted, params.get("arguments") or {}))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        # A compressed answer could be a thousand times larger than what arrives.
        request.headers["accept-encoding"] = "identity"
        request.headers.update(with_trace({}))
        self._add_mirrored(request)
        try:
            return await self._answer(request)
        except (InvalidInputError, UnavailableError) as error:
            self.failure = error
            raise

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._egress.stream(request, self._tenant)
        encoding = response.headers.get("content-encoding", "identity")
        refused = None
        if response.is_redirect:
            place = response.headers.get("location", "")[:200]
            refused = f"redirects to {place}, which is not followed: store that URL"
        elif encoding.strip().lower() != "identity":
            refused = "compressed its answer, although it must not"
        if refused is not None:
            await response.aclose()
            raise EgressError(f"{request.url.host} {refused}", code="egress_bad_answer")
        if response.status_code >= 400 and response.status_code not in _UNTOLD:
            self.failure = EgressError(
                f"{request.url.host} answered {response.status_code} {response.reason_phrase}"
            )
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            self.is_forgotten = True
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(stream, self._max_bytes, self, request.url.host)
        return response


class _Bounded(httpx2.AsyncByteStream):
    """An answer that is refused when it grows too long."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, left: int, owner: McpTransport, host: str
    ) -> None:
        self._stream = stream
        self._left = left
        self._owner = owner
        self._host = host

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                self._owner.failure = EgressError(
                    f"the answer of {self._host} is longer than the server's max_bytes",
                    code="egress_bad_answer",
                )
                raise self._owner.failure
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
