"""HTTP for MCP servers: through the guarded connections, without redirects, bounded."""

import json
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx2

from bottega.errors import InvalidInputError, UnavailableError
from bottega.outside import BoundedReader, OutsideError
from bottega.tools.egress import Egress, EgressError
from bottega.trace_context import with_trace

_MOST_UNITS, _LINE, _KEY = 200_000, 15, 3
"""Values of JSON in an answer; a line, and the key of an object, count as so many."""
_SHORTEST_LINE, _FREE_LINES = 16, 5000
"""Least bytes of a line of a stream on average, beyond the first ones."""
_UNTOLD = frozenset({404, 405})
"""Answers of servers that do not know a method; the SDK tries another."""


@dataclass(slots=True, eq=False)
class SentRequest:
    """The fate of a request; the SDK tells less.

    Attributes:
        failure: why it failed, for people. ``egress_bad_answer``: the server may have done it.
        is_forgotten: the server no longer knows the session, and did not do what was asked.
    """

    failure: InvalidInputError | UnavailableError | None = None
    is_forgotten: bool = False


sent_request: ContextVar[SentRequest] = ContextVar("sent_request")
"""Of the request that a task makes; the SDK sends it in the context of that task."""


class McpTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of one connection to a server.

    Attributes:
        own: outcome of the requests that open the connection, and listen.
    """

    def __init__(self, egress: Egress, tenant: str, max_bytes: int) -> None:
        """Create it for a tenant; ``max_bytes`` limits each answer."""
        self._egress = egress
        self._tenant = tenant
        self._max_bytes = max_bytes
        self.own = SentRequest()
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
            sent_request.get(self.own).failure = error
            raise

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        reader = BoundedReader(self._max_bytes, units=_MOST_UNITS)
        response = await self._egress.stream(request, self._tenant, reader)
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
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        kind = response.headers.get("content-type", "")
        sent = sent_request.get(self.own)
        response.stream = _Bounded(stream, reader, "event-stream" in kind, sent, request.url.host)
        status = response.status_code
        said = f"{request.url.host} answered {status} {response.reason_phrase}"
        if (status >= 500 or status == 200) and not await _is_message(response, kind):
            # A gateway may say so of a request that the server carries out.
            sent.failure = EgressError(f"{said} without a message of MCP", code="egress_bad_answer")
        elif status >= 400 and status not in _UNTOLD:
            sent.failure = EgressError(said)
        if status == 404 and "mcp-session-id" in request.headers:
            sent.is_forgotten = True
        return response


async def _is_message(response: httpx2.Response, kind: str) -> bool:
    """Return whether a body is of the protocol, and not that of a page or a gateway."""
    if kind.lower().startswith("text/event-stream"):
        return response.status_code == 200
    return kind.lower().startswith("application/json") and b'"jsonrpc"' in await response.aread()


class _Bounded(httpx2.AsyncByteStream):
    """An answer that is refused when it grows too long, or costs too much to read.

    Args:
        is_stream: it consists of server-sent events.
    """

    def __init__(
        self,
        stream: httpx2.AsyncByteStream,
        reader: BoundedReader,
        is_stream: bool,
        sent: SentRequest,
        host: str,
    ) -> None:
        self._stream = stream
        self._reader = reader
        self._is_stream = is_stream
        self._is_begun = False
        self._room = _FREE_LINES
        self._sent = sent
        self._host = host

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for step in self._stream:
                self._count(step)
                yield step
        except OutsideError as error:
            failure = error
        else:
            return
        said = f"{self._host} sent {failure.detail}"
        self._sent.failure = EgressError(said, code="egress_bad_answer")
        raise self._sent.failure

    def _count(self, step: bytes) -> None:
        """Count the lines of events, and the values of JSON: the SDK reads them slowly."""
        if not self._is_begun and (text := step.lstrip()):
            self._is_begun = True
            if text.startswith(b"["):  # the SDK would validate each message, and use none
                raise OutsideError("a list of messages, which the protocol has no more")
        keys = step.count(b'":') - step.count(b'\\":')  # not those in texts
        self._reader.count(step.count(b",") + step.count(b"[") + _KEY * max(0, keys))
        if self._is_stream:
            lines = step.count(b"\n") + step.count(b"\r")
            self._reader.count(_LINE * lines)
            self._room += len(step) // _SHORTEST_LINE - lines
            if self._room < 0:
                raise OutsideError(f"lines of less than {_SHORTEST_LINE} bytes")

    async def aclose(self) -> None:
        await self._stream.aclose()
