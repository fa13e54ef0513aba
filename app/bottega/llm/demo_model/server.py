"""The demo model as a web application: chat completions and the list of models."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from bottega.llm.demo_model.rules import Answer, decide, usage

Decide = Callable[[dict[str, Any]], Answer | ASGIApp]
"""Function that answers a request's body. It may return an ASGI application, which then answers
the whole request."""


class _Function(BaseModel):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Tool] | None = None


class _ChatRequest(BaseModel):
    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None


DONE = b"data: [DONE]\n\n"


def create_app(
    decide: Decide = decide,
    *,
    latency_s: float = 0.0,
    token_delay_s: float = 0.0,
) -> Starlette:
    """Make an OpenAI-compatible server.

    Args:
        latency_s: seconds before the answer begins.
        token_delay_s: seconds before each further piece of a stream.
    """

    async def completions(request: Request) -> ASGIApp:
        body = await _body(request)
        answer = decide(body)
        await asyncio.sleep(latency_s)
        return response(answer, body, token_delay_s) if isinstance(answer, Answer) else answer

    # Starlette calls the result of an endpoint as an ASGI application.
    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", _models, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _problem})


def response(answer: Answer, request: dict[str, Any], token_delay_s: float = 0.0) -> Response:
    if not request.get("stream"):
        return Response(completion(answer, request), media_type="application/json")
    if not token_delay_s:
        return Response(b"".join(chunks(answer, request)), media_type="text/event-stream")

    async def stream() -> AsyncIterator[bytes]:
        for piece in chunks(answer, request):
            yield piece
            await asyncio.sleep(token_delay_s)

    return StreamingResponse(stream(), media_type="text/event-stream")


def completion(answer: Answer, request: dict[str, Any]) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = _calls(answer, request)
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer)}
    head = _head(request, "chat.completion")
    return to_json({**head, "choices": [choice], "usage": usage(answer, request)})


def chunks(answer: Answer, request: dict[str, Any]) -> Iterator[bytes]:
    """Encode the answer as server-sent events: words, calls, finish reason, usage if requested."""
    head = _head(request, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in re.findall(r"\s*\S+|\s+$", answer.text)]
    for index, call in enumerate(_calls(answer, request)):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        start = {**call, "index": index, "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [start]})
        for piece in (arguments[:9], arguments[9:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    for delta in deltas:
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = {"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}
    yield event({**head, "choices": [end]})
    if (request.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(answer, request)})
    yield DONE


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % to_json(data)


def error(message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    kind = "invalid_request_error"
    return to_json({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    chat_id = f"chatcmpl-{_digest(request)}"
    return {"id": chat_id, "object": kind, "created": 0, "model": request["model"]}


def _digest(request: dict[str, Any]) -> str:
    """Return a short hash of model and messages, for ids."""
    data = to_json([request["model"], request["messages"]])
    return blake2b(data, digest_size=9).hexdigest()


def _calls(answer: Answer, request: dict[str, Any]) -> list[dict[str, Any]]:
    digest = _digest(request) if answer.calls else ""
    return [
        {
            "id": f"call_{digest}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": to_json(call.arguments).decode()},
        }
        for number, call in enumerate(answer.calls)
    ]


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "stop"


async def _body(request: Request) -> dict[str, Any]:
    """Read the request's body.

    Raises:
        HTTPException: the body is no request; ``detail`` is the body of the answer.
    """
    data = await request.body()
    try:
        _ChatRequest.model_validate_json(data)
    except ValidationError as invalid:
        first = invalid.errors(include_context=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        raise HTTPException(400, error(first["msg"], param=param).decode()) from None
    body: dict[str, Any] = from_json(data)
    return body


async def _problem(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    content = failure.detail.encode()
    if failure.status_code != 400:  # an error of Starlette
        message = f"{failure.detail}: {request.method} {request.url.path}"
        content = error(message, code="unknown_url")
    return Response(content, failure.status_code, media_type="application/json")


async def _models(request: Request) -> Response:
    model = {"id": "demo", "object": "model", "created": 0, "owned_by": "bottega"}
    return Response(to_json({"object": "list", "data": [model]}), media_type="application/json")
