"""A model's API for tests: a real server on loopback, whose answers a test scripts.

    async with FakeModel() as model:
        model.script(text("hello"), http_error(429, {"retry-after": "2"}), calls(("add", {"a": 1})))
        provider = OpenAIProvider("any", api_key="test-key", base_url=model.base_url)

Replies are used up in the order in which requests arrive; after them ``decide`` answers, which is
the demo model's unless the test gives its own. Where requests run side by side their order is
open: script them by a ``decide`` that looks at the request.
"""

import asyncio
import json
import socket
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, Self

import numpy as np
import uvicorn
from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.agents.parts import tokens_in
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.llm.demo_model import server as demo_server
from bottega.llm.demo_model.rules import Answer, DemoCall
from bottega.llm.demo_model.rules import decide as demo_decide
from tests.waiting import deadline, until

DONE = b"data: [DONE]\n\n"
_HANG_UP = "fake_model.hang_up"

Vectorise = Callable[[Sequence[str]], Awaitable[NDArray[np.float32]]]
"""Function that computes the vectors of texts, one row per text."""

Reply = Answer | Callable[[dict[str, Any]], ASGIApp]
"""Reply to a request: an answer, or a function that makes the response to its body."""


def vectors_body(vectors: NDArray[Any], request: dict[str, Any]) -> bytes:
    """Build the answer to a request for embeddings, in the encoding that it asks for."""
    in_base64 = request.get("encoding_format") == "base64"
    rows = [
        b64encode(row.astype("<f4").tobytes()).decode() if in_base64 else row.tolist()
        for row in vectors
    ]
    data = [{"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)]
    texts = request["input"]
    tokens = tokens_in(len(texts) if isinstance(texts, str) else sum(map(len, texts)))
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return to_json({"object": "list", "data": data, "model": request["model"], "usage": used})


def text(content: str) -> Answer:
    """Build a final answer."""
    return Answer(content)


def calls(*items: tuple[str, dict[str, Any]], content: str = "") -> Answer:
    """Build tool calls ``(name, arguments)``, all in one message."""
    return Answer(content, tuple(DemoCall(name, arguments) for name, arguments in items))


def http_error(
    status: int,
    headers: Mapping[str, str] | None = None,
    *,
    message: str = "scripted error",
    code: str | None = None,
) -> Reply:
    """Build an error in the form of OpenAI's API."""
    return http_reply(
        error_body(message, code), status=status, headers=headers, media_type="application/json"
    )


def error_body(message: str, code: str | None = None) -> bytes:
    kind = "invalid_request_error"
    return to_json({"error": {"message": message, "type": kind, "param": None, "code": code}})


def http_reply(
    body: bytes,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    media_type: str = "text/event-stream",
) -> Reply:
    """Reply with these bytes as a whole."""
    return lambda request: Response(body, status, headers, media_type)


def sse(*events: Any, done: bool = True) -> Reply:
    """Stream these events: dicts are sent as JSON, text unchanged."""
    parts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    body = "".join(f"data: {part}\n\n" for part in parts).encode()
    return http_reply(body + (DONE if done else b""))


def chunk(
    content: str | None = None,
    *,
    tool_calls: list[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
    **delta: Any,
) -> dict[str, Any]:
    """Build one chunk of a stream, for :func:`sse`."""
    if content is not None:
        delta["content"] = content
    if tool_calls is not None:
        delta["tool_calls"] = tool_calls
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def cut(answer: Answer, *, events: int) -> Reply:
    """Send the first ``events`` events of an answer's stream, then break the connection."""
    return lambda request: _Stream(list(demo_server.chunks(answer, request))[:events], ends=False)


def hang_up() -> Reply:
    """Break the connection without an answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_HANG_UP]()
        await asyncio.Event().wait()  # until the server sees it too

    return lambda request: app


def gated(gate: asyncio.Event, reply: Reply) -> Reply:
    """Send ``reply`` once ``gate`` is set."""

    def make(request: dict[str, Any]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await gate.wait()
            await response(reply, request)(scope, receive, send)

        return app

    return make


def sse_until(gate: asyncio.Event, *events: dict[str, Any]) -> Reply:
    """Stream these events, and nothing more until ``gate`` is set; then the answer breaks off."""
    sent = [b"data: %b\n\n" % to_json(event) for event in events]
    return lambda request: _Stream([*sent, b""], ends=False, gate=gate, wait_at=len(sent))


def gated_within(gate: asyncio.Event, answer: Answer, *, events: int) -> Reply:
    """Stream an answer that stops after ``events`` events until ``gate`` is set."""
    return lambda request: _Stream(
        list(demo_server.chunks(answer, request)), gate=gate, wait_at=events
    )


def gated_cut(gate: asyncio.Event, answer: Answer, *, events: int) -> Reply:
    """Send the first ``events`` events of an answer; once ``gate`` is set, break the connection."""

    def make(request: dict[str, Any]) -> ASGIApp:
        sent = list(demo_server.chunks(answer, request))[: events + 1]
        return _Stream(sent, ends=False, gate=gate, wait_at=events)

    return make


def free_port() -> int:
    """Return a port on which nothing listens yet, for a server that is started later."""
    with socket.socket() as picking:
        picking.bind(("127.0.0.1", 0))
        port: int = picking.getsockname()[1]
        return port


def response(reply: Reply, request: dict[str, Any]) -> ASGIApp:
    """Return the application that gives ``reply`` to ``request``."""
    if not isinstance(reply, Answer):
        return reply(request)
    if not request.get("stream"):
        return JSONResponse(demo_server.completion(reply, request))
    return _Stream(list(demo_server.chunks(reply, request)))


class _Stream:
    """Stream that may wait for a gate before one event, or break off after the last."""

    def __init__(
        self,
        events: list[bytes],
        *,
        ends: bool = True,
        gate: asyncio.Event | None = None,
        wait_at: int = 0,
    ) -> None:
        self._events = events
        self._ends = ends
        self._gate = gate
        self._wait_at = wait_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, event in enumerate(self._events):
            if self._gate is not None and number == self._wait_at:
                await self._gate.wait()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        # A response that an application leaves open makes the server close the connection.
        if self._ends:
            await send({"type": "http.response.body", "body": b""})


class Watched:
    """Application wrapper that runs until it is done or its client hangs up."""

    def __init__(self, app: ASGIApp, on_disconnect: Callable[[], None]) -> None:
        self._app = app
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._app(scope, receive, send))
        gone = asyncio.ensure_future(receive())  # the body was read: only the end can come
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        hung_up = not work.done()
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
        if hung_up:
            self._on_disconnect()
        else:
            work.result()


def unpaired(messages: Sequence[dict[str, Any]]) -> str | None:
    """Return OpenAI's error for a history in which a call has no result directly after it."""
    waiting: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message.get("tool_call_id") not in waiting:
                return "messages with role 'tool' must be a response to preceding 'tool_calls'"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            break
        waiting = {call["id"] for call in message.get("tool_calls") or ()}
    return f"these tool calls have no result: {', '.join(sorted(waiting))}" if waiting else None


class FakeModel:
    """Model's API on an ephemeral port, while the ``async with`` block lasts.

    Args:
        decide: answers requests without a script; a pure function of the request's body.
        token_delay_s: seconds between the pieces of a stream; 0 sends it whole.
        port: 0 picks one; see :func:`free_port`.
        host: address that it listens on.
        embed: computes the vectors that it answers with.

    Attributes:
        requests: bodies of all chat requests, in order of arrival.
        headers: of all chat requests, in order of arrival; names in lower case.
        embedded: bodies of all requests for embeddings, in order of arrival.
        disconnects: number of clients that hung up before their answer was complete.
        base_url: for the provider; known inside the block.
        decide: may be replaced while the model serves.
        embeds: while it is false, requests for embeddings are answered 503.
    """

    path: ClassVar[str] = "/v1/chat/completions"

    def __init__(
        self,
        decide: Callable[[dict[str, Any]], Reply] = demo_decide,
        *,
        token_delay_s: float = 0.0,
        port: int = 0,
        host: str = "127.0.0.1",
        embed: Vectorise = BuiltinEmbedder().embed,
    ) -> None:
        self.port, self._host = port, host
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.embedded: list[dict[str, Any]] = []
        self.disconnects = 0
        self.embeds = True
        self.base_url = ""
        self.decide = decide
        self._token_delay_s = token_delay_s
        route = Route(self.path, self._respond, methods=["POST"])
        self._demo: ASGIApp = Starlette(routes=[route, *demo_server.create_app().routes])
        self._usually = decide
        self._script: deque[Reply] = deque()
        self._vectors: deque[Reply | None] = deque()
        self._embed = embed
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        self._stack = AsyncExitStack()

    def forget(self) -> None:
        """Forget the requests and the script, for another test."""
        self._check()
        for each in (self.requests, self.embedded, self._script, self._vectors):
            each.clear()
        self.disconnects, self.embeds, self.decide = 0, True, self._usually

    def script(self, *replies: Reply) -> None:
        """Answer the next requests with these, one each."""
        self._script.extend(replies)

    def script_vectors(self, *replies: Reply | None) -> None:
        """Answer the next requests for embeddings; ``None`` gives the demo model's vectors."""
        self._vectors.extend(replies)

    async def received(self, count: int = 1) -> dict[str, Any]:
        """Wait until ``count`` requests have arrived; return the last of them."""
        await self._until(lambda: len(self.requests), count, "requests")
        return self.requests[count - 1]

    async def asked_for_vectors(self, count: int = 1) -> None:
        """Wait until ``count`` requests for embeddings have arrived."""
        await self._until(lambda: len(self.embedded), count, "requests for embeddings")

    async def disconnected(self, count: int = 1) -> None:
        """Wait until ``count`` clients have hung up."""
        await self._until(lambda: self.disconnects, count, "disconnects")

    async def __aenter__(self) -> Self:
        listener = socket.create_server((self._host, self.port))
        self.base_url = f"http://{self._host}:{listener.getsockname()[1]}/v1"
        await self._stack.enter_async_context(serving(self._app, listener))
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._stack.aclose()
        if error is None:
            self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise AssertionError("the fake model's script failed") from self._broken

    def _answer(self, request: dict[str, Any]) -> Answer | ASGIApp:
        reply = self._script.popleft() if self._script else self.decide(request)
        return reply if isinstance(reply, Answer) else response(reply, request)

    async def _respond(self, chat: Request) -> ASGIApp:
        request: dict[str, Any] = await chat.json()
        if wrong := unpaired(request["messages"]):
            return response(http_error(400, message=wrong), request)
        self._on_request(request)
        reply = self._answer(request)
        if isinstance(reply, Answer):
            reply = demo_server.response(reply, request, self._token_delay_s)
        return Watched(reply, self._on_disconnect)

    async def _vectors_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = json.loads(await Request(scope, receive).body())
        self.embedded.append(request)
        self._changed.set()
        reply = self._vectors.popleft() if self._vectors else None
        if not self.embeds:
            reply = http_error(503)
        if reply is None:
            body = vectors_body(await self._embed(request["input"]), request)
            reply = http_reply(body, media_type="application/json")
        await response(reply, request)(scope, receive, send)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Build the demo model's application; its exceptions reach the test, not the client."""
        app = self._demo
        if scope["path"].endswith("/embeddings"):
            app = self._vectors_app
        else:
            fields = ((name.decode(), value.decode("latin-1")) for name, value in scope["headers"])
            self.headers.append(dict(fields))
        try:
            await app(scope, receive, send)
        except Exception as error:
            self._broken = error
            self._changed.set()
            raise

    def _on_request(self, request: dict[str, Any]) -> None:
        self.requests.append(request)
        self._changed.set()

    def _on_disconnect(self) -> None:
        self.disconnects += 1
        self._changed.set()

    async def _until(self, number: Callable[[], int], wanted: int, what: str) -> None:
        async with deadline(lambda: f"{number()} of {wanted} {what}"):
            while number() < wanted:
                self._check()
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve ``app`` while the block lasts, inside this event loop.

    Uses parts of ``Server.serve``, which itself takes over signals and sleeps at its end.
    """
    config = uvicorn.Config(
        _with_hang_up(app, lambda: state.connections),
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=600,
    )
    config.load()
    server = uvicorn.Server(config)
    state = server.server_state
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    try:
        yield
    finally:
        for listening in server.servers:
            listening.close()
        for connection in list(state.connections):
            connection.transport.abort()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not state.connections)  # uvicorn gives no notice of the last one


def _with_hang_up(app: ASGIApp, connections: Callable[[], Iterable[Any]]) -> ASGIApp:
    """Wrap ``app``; its scope gets a function that breaks the connection."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        def hang_up() -> None:
            for connection in list(connections()):
                if connection.client == scope["client"]:
                    connection.transport.abort()

        scope[_HANG_UP] = hang_up
        await app(scope, receive, send)

    return wrapped
