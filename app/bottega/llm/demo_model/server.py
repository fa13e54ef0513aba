"""The demo model as a web application."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.llm.demo_model import embeddings, wire
from bottega.llm.demo_model.checks import problem
from bottega.llm.demo_model.conversation import Answer
from bottega.llm.demo_model.decide import decide as demo_decide

Decide = Callable[[dict[str, Any]], Answer | ASGIApp | Awaitable[Answer | ASGIApp]]
"""Answers a request's body. An ASGI application answers the whole request itself."""

Embed = Callable[[dict[str, Any]], Awaitable[bytes | ASGIApp]]
"""Answers the body of a request for embeddings, or returns an application that does."""
Problem = Callable[[Any], tuple[str, str | None] | None]

_JSON = "application/json"
_STREAM = "text/event-stream"
_MAX_BODY = 64 * 1024 * 1024


def create_app(
    decide: Decide = demo_decide,
    *,
    embed: Embed | None = None,
    latency_s: float = 0.0,
    token_delay_s: float = 0.0,
    on_request: Callable[[dict[str, Any]], None] | None = None,
    on_disconnect: Callable[[], None] | None = None,
) -> Starlette:
    """Make an OpenAI-compatible server: chat completions, the list of models, and embeddings.

    Args:
        embed: answers requests for embeddings; ``None``: there is no such route.
        latency_s: seconds before the answer begins.
        token_delay_s: seconds before each further piece of a stream.
        on_request: gets the body of each valid chat request.
        on_disconnect: called when a client disconnects before its answer is complete.
    """

    async def answer(body: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        found = decide(body)
        if isinstance(found, Awaitable):
            found = await found
        if latency_s:
            await asyncio.sleep(latency_s)
        if not isinstance(found, Answer):
            await found(scope, receive, send)
        elif body.get("stream"):
            await _stream(found, body, send, token_delay_s)
        else:
            response = Response(wire.completion(found, body), media_type=_JSON)
            await response(scope, receive, send)

    async def completions(request: Request) -> ASGIApp:
        body = await _body(request, problem)
        if on_request is not None:
            on_request(body)
        return _Watched(lambda *channel: answer(body, *channel), on_disconnect)

    async def vectors(request: Request) -> ASGIApp:
        assert embed is not None
        found = await embed(await _body(request, embeddings.problem))
        return found if not isinstance(found, bytes) else Response(found, media_type=_JSON)

    # Starlette calls the result of an endpoint as an ASGI application.
    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", _models, methods=["GET"]),
    ]
    if embed is not None:
        routes.append(Route("/v1/embeddings", vectors, methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _problem})


class _Watched:
    """Runs an application until it is done or its client disconnects."""

    def __init__(self, app: ASGIApp, on_disconnect: Callable[[], None] | None) -> None:
        self._app = app
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._app(scope, receive, send))
        gone = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            hung_up = not work.done()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if hung_up:
            if self._on_disconnect is not None:
                self._on_disconnect()
        else:
            work.result()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(answer: Answer, body: dict[str, Any], send: Send, token_delay_s: float) -> None:
    headers = [(b"content-type", _STREAM.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    pieces = wire.chunks(answer, body)
    if token_delay_s:
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(token_delay_s)
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": b"".join(pieces)})


async def _body(request: Request, problem: Problem) -> dict[str, Any]:
    """Read and validate the request's body.

    Raises:
        HTTPException: it is too long, invalid JSON, or has a problem. ``detail`` is the answer.
    """
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > _MAX_BODY:
                raise _refusal("The body is too long.", status=413)
    except ClientDisconnect:
        raise _refusal("The client hung up.") from None
    try:
        body = from_json(bytes(data))
    except ValueError:
        raise _refusal("We could not parse the JSON body of your request.") from None
    if wrong := problem(body):
        raise _refusal(*wrong)
    checked: dict[str, Any] = body
    return checked


def _refusal(message: str, param: str | None = None, *, status: int = 400) -> HTTPException:
    return HTTPException(status, detail=wire.error(message, param=param).decode())


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content = error.detail.encode()
    if not content.startswith(b"{"):  # one of Starlette's own
        message = f"{error.detail}: {request.method} {request.url.path}"
        content = wire.error(message, code="unknown_url")
    return Response(content, error.status_code, error.headers, media_type=_JSON)


async def _models(request: Request) -> Response:
    model = {"id": "demo", "object": "model", "created": 0, "owned_by": "bottega"}
    return Response(to_json({"object": "list", "data": [model]}), media_type=_JSON)
