"""One connection to an MCP server with the official SDK, for older and newer protocols.

Newer protocols are the versions from 2026-07-28 on. :mod:`bottega.tools.egress`
sends the HTTP requests: guarded, bounded and without redirects. A server that is a program is a
child process, which exchanges lines of JSON with this process.
"""

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
from pydantic import JsonValue

from bottega.errors import InvalidInputError, UnavailableError
from bottega.logger import Logger
from bottega.outside import STEP_BYTES, BoundedReader, OutsideError, check_json
from bottega.tools.egress import Egress, EgressError, EgressRefusedError
from bottega.tools.mcp import McpError, McpServer
from bottega.trace_context import with_trace

_INHERITED = ("PATH", "HOME", "LANG")
_MOST_LOGGED = 50
"""Maximum number of logged lines of each 64 KB of standard error."""
_MOST_NONSENSE = 1000
"""Maximum number of lines without a message in a connection. Programs may write a greeting."""

# This script starts a server's program. On Linux, the program also ends if SIGKILL ends Bottega.
_START = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""

log = Logger(__name__)


def environment_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return a program's environment variables: PATH, HOME, LANG of this process, and ``env``."""
    own = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return own | dict(env)


@asynccontextmanager
async def program(server: McpServer) -> AsyncIterator[tuple[Any, Any]]:
    """Run a server's command; yield a stream from the program, and a stream to the program.

    At the end of the ``async with`` block, the program's process group is killed.

    Raises:
        McpError: the command cannot be started.
    """
    import anyio  # imported only when an MCP server is used

    process = await _started(server)
    into, received = anyio.create_memory_object_stream[Any](0)
    sent, out_of = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_read(server, process, into)),
        asyncio.create_task(_write(process, out_of)),
        asyncio.create_task(_log(server, process)),
    ]
    try:
        async with received, sent:
            yield received, sent
    finally:
        for task in tasks[:2]:
            task.cancel()
        await _end(process)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _started(server: McpServer) -> asyncio.subprocess.Process:
    command = server.command
    assert command is not None
    words = [command.command, *command.args]
    if sys.platform == "linux":
        words = [sys.executable, "-ISc", _START, str(os.getpid()), *words]
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment_of(command.env),
            start_new_session=True,
        )
    except OSError as error:
        failure = f"the command of the MCP server '{server.name}' does not start: {error.strerror}"
    raise McpError(failure)


async def _read(server: McpServer, process: asyncio.subprocess.Process, into: Any) -> None:
    """Forward the program's messages; end the connection if a message costs too much to read."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    lines_left = _MOST_NONSENSE
    async with into:
        try:
            async for line in _lines(process.stdout, server.max_bytes):
                check_json(line)
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    log.debug("mcp.not_a_message", server=server.name)
                    lines_left -= 1
                    if not lines_left:
                        raise OutsideError(f"{_MOST_NONSENSE} lines that are no messages") from None
                    continue
                await into.send(SessionMessage(message))
        except OutsideError as error:
            log.warning("mcp.refused", server=server.name, sent=error.detail)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


async def _lines(stream: asyncio.StreamReader, longest: int) -> AsyncIterator[bytes]:
    """Yield the lines of a stream that are not blank; let other tasks run after each 64 KB.

    Raises:
        OutsideError: a line is too long.
    """
    begun: list[bytes] = []
    size = 0
    while piece := await stream.read(STEP_BYTES):
        first, *rest = piece.split(b"\n")
        begun.append(first)
        size += len(first)
        if size > longest:
            raise OutsideError(f"a line of more than {longest} bytes")
        if rest:
            for line in (b"".join(begun), *rest[:-1]):
                if line and not line.isspace():
                    yield line
            begun, size = [rest[-1]], len(rest[-1])
        await asyncio.sleep(0)


async def _write(process: asyncio.subprocess.Process, out_of: Any) -> None:
    assert process.stdin is not None
    async with out_of:
        async for message in out_of:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            with contextlib.suppress(OSError):
                await process.stdin.drain()


async def _log(server: McpServer, process: asyncio.subprocess.Process) -> None:
    """Log the program's standard error in short lines; if there are too many lines, omit some."""
    assert process.stderr is not None
    while piece := await process.stderr.read(STEP_BYTES):
        for line in piece.splitlines()[:_MOST_LOGGED]:
            if text := line[:500].decode(errors="replace").rstrip():
                log.debug("mcp.stderr", server=server.name, text=text)
        await asyncio.sleep(0)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the program's input, wait at most 1 s for its end, and kill its process group."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            # A program should end within 1 s after its input was closed.
            async with asyncio.timeout(1.0):
                await process.wait()
    finally:
        # Kill the group even if the program has ended, because child processes may remain.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # Close the transport: a pipe stays open while it is full, or while a child process uses it.
        process._transport.close()  # type: ignore[attr-defined]
    await process.wait()


_MOST_UNITS, _LINE, _KEY = 200_000, 15, 3
"""Maximum number of JSON values in an answer; a line counts as _LINE, a key as _KEY values."""
_SHORTEST_LINE, _FREE_LINES = 16, 5000
"""Minimum average size in bytes of a stream's lines, after the first _FREE_LINES lines."""
_UNTOLD = frozenset({404, 405})
"""Statuses of servers that do not support a method; the SDK then tries another method."""


@dataclass(slots=True, eq=False)
class SentRequest:
    """The outcome of a request, with details that the SDK does not report.

    Attributes:
        failure: reason of the failure, for people. If its code is ``egress_bad_answer``, the server
            may have executed the request.
        is_forgotten: true if the server no longer has the session and so did not execute the
            request.
    """

    failure: InvalidInputError | UnavailableError | None = None
    is_forgotten: bool = False


sent_request: ContextVar[SentRequest] = ContextVar("sent_request")
"""Outcome of the current task's request. The SDK sends a request in the context of its task."""


class McpTransport(httpx2.AsyncBaseTransport):
    """HTTP transport for the requests of one connection to a server.

    Attributes:
        own: outcome of requests that belong to no call: they open the connection, or listen.
    """

    def __init__(self, egress: Egress, tenant: str, max_bytes: int) -> None:
        self._egress = egress
        self._tenant = tenant
        self._max_bytes = max_bytes
        self.own = SentRequest()
        self._mirrored: dict[str, Mapping[tuple[str, ...], str]] = {}

    def mirror(self, tool: str, schema: Mapping[str, Any]) -> None:
        """Remember which arguments of a tool's calls are also sent in headers.

        With the keyword ``x-mcp-header``, a tool's schema requires that a header repeats an
        argument (protocol version 2026-07-28).
        """
        if tool not in self._mirrored:
            from mcp.shared.inbound import x_mcp_header_map

            self._mirrored[tool] = x_mcp_header_map(schema)

    def _add_mirrored(self, request: httpx2.Request) -> None:
        # The SDK sends the name of the method in a header only with a newer protocol.
        if request.headers.get("mcp-method") == "tools/call" and any(self._mirrored.values()):
            from mcp.shared.inbound import mcp_param_headers

            params = json.loads(request.content)["params"]
            names = self._mirrored.get(params["name"], {})
            request.headers.update(mcp_param_headers(names, params.get("arguments") or {}))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        # The client requests no compression, because decompression can make an answer 1,000 times
        # larger.
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
            location = response.headers.get("location", "")[:200]
            refused = f"redirects to {location}, which is not followed: store that URL instead"
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
            # A gateway may have sent this answer while the server still executes the request.
            sent.failure = EgressError(f"{said} without a message of MCP", code="egress_bad_answer")
        elif status >= 400 and status not in _UNTOLD:
            sent.failure = EgressError(said)
        if status == 404 and "mcp-session-id" in request.headers:
            sent.is_forgotten = True
        return response


async def _is_message(response: httpx2.Response, kind: str) -> bool:
    """Return true if a body is a message of MCP, false for a web page or a gateway's error."""
    if kind.lower().startswith("text/event-stream"):
        return response.status_code == 200
    return kind.lower().startswith("application/json") and b'"jsonrpc"' in await response.aread()


class _Bounded(httpx2.AsyncByteStream):
    """Body of an answer; reading fails if the body is too long or would take too long to parse.

    Args:
        is_stream: true if the body consists of server-sent events.
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
        words = f"{self._host} sent {failure.detail}"
        self._sent.failure = EgressError(words, code="egress_bad_answer")
        raise self._sent.failure

    def _count(self, step: bytes) -> None:
        """Count lines and JSON values in a body's next bytes; refuse a body that has too many."""
        if not self._is_begun and (text := step.lstrip()):
            self._is_begun = True
            if text.startswith(b"["):  # the SDK would validate a list's messages, but use none
                raise OutsideError("a list of messages, which the protocol no longer has")
        keys = step.count(b'":') - step.count(b'\\":')  # an escaped quote does not end a string
        self._reader.count(step.count(b",") + step.count(b"[") + _KEY * max(0, keys))
        if self._is_stream:
            lines = step.count(b"\n") + step.count(b"\r")
            self._reader.count(_LINE * lines)
            self._room += len(step) // _SHORTEST_LINE - lines
            if self._room < 0:
                raise OutsideError(f"lines of less than {_SHORTEST_LINE} bytes")

    async def aclose(self) -> None:
        await self._stream.aclose()


_T = TypeVar("_T")
OnProgress = Callable[[float, float | None, str | None], None]
"""Function that receives a call's progress: the amount, the total (None: unknown), and a text."""
OnQuestion = Callable[[str, dict[str, JsonValue]], Awaitable[dict[str, Any] | None]]
"""Function (question, JSON Schema of the answer) → a person's answer, or None if declined."""

QUESTION_S = 600.0
"""Seconds within which people must answer. The server waits for the answer, too."""


class McpUnansweredError(McpError):
    """Error of a request without a readable answer; the server may have executed the request."""


class McpForgottenError(McpError):
    """Error of a request that the server did not execute, because it forgot the session."""


@dataclass(slots=True, eq=False)
class _Call:
    limit: asyncio.Timeout
    timeout_s: float
    ask: OnQuestion | None

    async def asked(self, params: Any) -> Any:
        """Ask the person who must answer the server's question; pause the call's time limit."""
        from mcp_types import ElicitResult

        if self.ask is None or params.mode != "form":
            return ElicitResult(action="decline")
        schema, due = params.requested_schema, self.limit.when()
        left_s = self.timeout_s if due is None else due - _now()
        self.limit.reschedule(None)
        try:
            async with asyncio.timeout(QUESTION_S):
                answer = await self.ask(params.message, schema)
        except TimeoutError:
            answer = None
        finally:
            self.limit.reschedule(_now() + left_s)
        if answer is None:
            return ElicitResult(action="decline")
        self.limit.reschedule(_now() + self.timeout_s)
        return ElicitResult(action="accept", content=answer)


def _task(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Start an asyncio task whose error asyncio does not log, even if no code awaits the task."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _now() -> float:
    return asyncio.get_running_loop().time()


class Connection:
    """A connection to an MCP server; a separate asyncio task keeps the connection open.

    Args:
        on_changed: called once when the server reports that its tools have changed. With ``None``,
            the client does not request reports about changed tools.

    Attributes:
        is_open: false after the connection broke off or was closed.
        secrets: secrets that the client sent to the server, and that texts must not contain.
    """

    def __init__(
        self,
        server: McpServer,
        egress: Egress,
        on_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._server = server
        self._egress = egress
        self._on_changed = on_changed
        self._transport: McpTransport | None = None
        self._calls: list[_Call] = []
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.secrets: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done() and not self._closing.is_set()

    async def open(self) -> None:
        """Connect, and agree on a protocol version.

        Raises:
            McpError: the server cannot be reached, or refuses the connection.
        """
        # The package mcp is imported late and in a thread, because the import takes 1 s and 50 MB.
        await asyncio.to_thread(importlib.import_module, "mcp")
        self._task = _task(self._hold())
        try:
            async with asyncio.timeout(self._server.timeout_s):
                await asyncio.wait((self._ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.close()
            words = f"did not answer within {self._server.timeout_s:g} s"
            raise self._failed(self._own(), words) from None
        except asyncio.CancelledError:
            await self.close()
            raise
        if not self._ready.done():
            raise self._failed(self._own(), _words(self._task))

    def mirror(self, tool: str, schema: Mapping[str, JsonValue]) -> None:
        """Repeat arguments of a tool's calls in headers; see :meth:`McpTransport.mirror`."""
        if self._transport is not None:
            self._transport.mirror(tool, schema)

    async def close(self) -> None:
        """End the connection. If the server is a program, kill the program's process group."""
        self._closing.set()
        if self._task is None:
            return
        # A connection that never opened is cancelled at once, because there is nothing to close.
        _, late = await asyncio.wait((self._task,), timeout=5.0 if self._ready.done() else 0)
        for task in late:
            task.cancel()
            await asyncio.wait((task,))

    async def request(
        self,
        make: Callable[[Any, Any], Any],
        *,
        on_progress: OnProgress | None = None,
        on_question: OnQuestion | None = None,
    ) -> dict[str, Any]:
        """Send a request and wait for the result; answer the server's questions meanwhile.

        Args:
            make: function that makes the request from the answers to the server's questions, and
                from the state that the server sent with the questions. In the first call of
                ``make``, both arguments are None.

        Returns:
            The server's unchanged result.

        Raises:
            McpError: no answer arrived in time, or the answer is an error.
        """
        session, task = self._ready.result(), self._task
        assert task is not None
        sent_request = SentRequest()
        asking = _task(self._rounds(session, make, sent_request, on_progress, on_question))
        try:
            await asyncio.wait((asking, task), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self._unanswered(sent_request, _words(task))
            return asking.result()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait((asking,))

    async def _rounds(
        self,
        session: Any,
        make: Callable[[Any, Any], Any],
        request: SentRequest,
        on_progress: OnProgress | None,
        on_question: OnQuestion | None,
    ) -> dict[str, Any]:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        sent_request.set(request)
        timeout_s = self._server.timeout_s
        progress_callback = None if on_progress is None else _telling(on_progress)
        answers = state = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                call = _Call(limit, timeout_s, on_question)
                self._calls.append(call)
                try:
                    while True:
                        async with self._turn():
                            result = await _sent(session, make(answers, state), progress_callback)
                        if result.get("resultType") != "input_required":
                            return result
                        answers = await _answered(result, call)
                        state = _text(result.get("requestState"))
                finally:
                    self._calls.remove(call)
        except TimeoutError:
            raise self._unanswered(request, f"did not answer within {timeout_s:g} s") from None
        except MCPError as error:
            if request.is_forgotten:
                self._closing.set()
                name = self._server.name
                raise McpForgottenError(f"the MCP server '{name}' ended the session") from None
            if error.error.code == CONNECTION_CLOSED:
                self._closing.set()
                raise self._unanswered(request, "closed the connection") from None
            raise self._refused(request, error.error.message[:500]) from None
        except ValueError:
            raise self.unreadable() from None

    def _turn(self) -> AbstractAsyncContextManager[Any]:
        """Return the semaphore that limits a tenant's HTTP calls. Calls of programs need none."""
        if self._transport is None:
            return nullcontext()
        return self._egress.turn(self._server.tenant)

    async def _hold(self) -> None:
        """Open the connection, and end it after :meth:`close`; the SDK needs one task for both."""
        from mcp import Client

        async with (
            self._streams() as transport,
            Client(
                transport,
                cache=None,
                elicitation_callback=self._elicit,
                message_handler=self._heard,
                client_info=_myself(),
            ) as client,
        ):
            self._ready.set_result(client.session)
            listening = _task(self._listen(client))
            try:
                await self._closing.wait()
            finally:
                listening.cancel()
                await asyncio.wait((listening,))

    async def _listen(self, client: Any) -> None:
        """Ask a server with a newer protocol to report changes of its tools."""
        offered = client.server_capabilities.tools
        if self._on_changed is None or offered is None or not offered.list_changed:
            return
        async with client.listen(tools_list_changed=True) as changes:
            async for _ in changes:
                await self._tell()
                return

    async def _heard(self, message: Any) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            await self._tell()

    async def _tell(self) -> None:
        """Call ``on_changed`` when the server reports a change for the first time."""
        tell, self._on_changed = self._on_changed, None
        if tell is not None:
            await tell()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        server = self._server
        if server.url is None:
            yield program(server)
            return
        from mcp.client.streamable_http import streamable_http_client

        headers, secrets = await server.headers()
        self.secrets = tuple(secrets)
        self._transport = McpTransport(self._egress, server.tenant, server.max_bytes)
        async with httpx2.AsyncClient(
            transport=self._transport,
            headers={"user-agent": "bottega", **headers},
            timeout=None,
            trust_env=False,
        ) as client:
            yield streamable_http_client(
                server.url, http_client=client, max_sse_event_size=server.max_bytes
            )

    async def _elicit(self, context: Any, params: Any) -> Any:
        """Answer a question of a server with an older protocol.

        In older protocols, a question does not name its call, so assume the newest call.
        """
        from mcp_types import ElicitResult

        if not self._calls:
            return ElicitResult(action="decline")
        return await self._calls[-1].asked(params)

    def unreadable(self) -> McpError:
        """Return the error to raise for an answer that breaks the protocol."""
        return self._unanswered(SentRequest(), "sent an answer that the protocol does not allow")

    def _own(self) -> SentRequest:
        return SentRequest() if self._transport is None else self._transport.own

    def _unanswered(self, sent_request: SentRequest, words: str) -> McpError:
        """Return the error of a request without a readable answer.

        The error is :class:`McpUnansweredError` if the server may have received the request.
        """
        error = self._failed(sent_request, words)
        if sent_request.failure is None or sent_request.failure.code == "egress_bad_answer":
            return McpUnansweredError(error.detail, code=error.code)
        return error

    def _refused(self, sent_request: SentRequest, message: str) -> McpError:
        """Return the error of a request to which the server or a gateway answered with an error."""
        if sent_request.failure is not None and sent_request.failure.code == "egress_bad_answer":
            return self._unanswered(sent_request, message)
        detail = "" if sent_request.failure is None else f" ({sent_request.failure.detail})"
        return McpError(f"the MCP server '{self._server.name}' answered: {message}{detail}")

    def _failed(self, sent_request: SentRequest, words: str) -> McpError:
        """Return the error of a failed request, with the transport's reason, if any."""
        name, failure = self._server.name, sent_request.failure
        if isinstance(failure, EgressRefusedError):
            return McpError(f"the MCP server '{name}': {failure.detail}", code="egress_forbidden")
        if failure is not None:
            return McpError(f"the MCP server '{name}': {failure.detail}")
        return McpError(f"the MCP server '{name}' {words}")


def _telling(on_progress: OnProgress) -> Callable[..., Awaitable[None]]:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        on_progress(progress, total, message)

    return report


async def _sent(session: Any, request: Any, told: Callable[..., Any] | None) -> dict[str, Any]:
    """Send a request; return the server's result without validation.

    The function does not use ``session.send_request``, because that method refuses a whole result
    if one item of the result is unknown. The SDK sends its subscriptions in the same way.
    """
    data = request.model_dump(by_alias=True, mode="json", exclude_none=True)
    options: dict[str, Any] = {} if told is None else {"on_progress": told}
    session._stamp(data, options)
    result = await session._dispatcher.send_raw_request(data["method"], data["params"], options)
    if not isinstance(result, dict):
        raise ValueError("the result is not an object")
    return result


async def _answered(result: Mapping[str, Any], call: _Call) -> dict[str, Any] | None:
    """Answer the questions of a server with a newer protocol; decline its other requests."""
    from mcp_types import ElicitRequest, ElicitResult
    from pydantic import ValidationError

    answers: dict[str, Any] = {}
    requests = result.get("inputRequests")
    for name, asked in requests.items() if isinstance(requests, dict) else ():
        try:
            question = ElicitRequest.model_validate(asked, by_name=False)
        except ValidationError:
            answers[name] = ElicitResult(action="decline")
        else:
            answers[name] = await call.asked(question.params)
    if not answers:
        await asyncio.sleep(0.1)  # the server asks no question, but asks for the request again
    return answers or None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _myself() -> Any:
    from importlib.metadata import version

    from mcp_types import Implementation

    return Implementation(name="bottega", version=version("bottega"))


def _words(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() or not task.done() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, InvalidInputError | UnavailableError):
        return f"failed: {error.detail}"
    return "closed the connection" if error is None else f"failed ({type(error).__name__})"
