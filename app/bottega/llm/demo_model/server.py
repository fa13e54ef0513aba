"""The demo model as a program: ``python -m bottega.llm.demo_model.server``.

It serves chat completions and the list of models on loopback, and prints one line, ``{"port": N}``,
when it accepts connections.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from typing import Any

import uvicorn
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from bottega.llm.demo_model.rules import Answer, decide, usage

Decide = Callable[[dict[str, Any]], Answer | ASGIApp]
"""Function that answers a request's body. It may return an ASGI application, which then answers
the whole request."""
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
        try:
            body = from_json(await request.body())
            if not all("role" in each for each in body["messages"]):
                raise ValueError("a message has no role")
        except (ValueError, TypeError, LookupError) as invalid:
            message = f"this is no request for chat completions: {invalid}"
            return Response(error(message), 400, media_type="application/json")
        answer = decide(body)
        await asyncio.sleep(latency_s)
        return response(answer, body, token_delay_s) if isinstance(answer, Answer) else answer

    # Starlette calls the result of an endpoint as an ASGI application.
    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", _models, methods=["GET"]),
    ]
    return Starlette(routes=routes)


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


def error(message: str, *, code: str | None = None) -> bytes:
    kind = "invalid_request_error"
    return to_json({"error": {"message": message, "type": kind, "param": None, "code": code}})


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


async def _models(request: Request) -> Response:
    model = {"id": "demo", "object": "model", "created": 0, "owned_by": "bottega"}
    return JSONResponse({"object": "list", "data": [model]})


def main() -> None:
    options = _options()
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except OSError as refused:
        sys.exit(f"cannot listen on 127.0.0.1:{options.port}: {refused.strerror}")
    if options.exit_with_parent:
        threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    latency_s, delay_s = options.latency_ms / 1000, options.token_delay_ms / 1000
    config = uvicorn.Config(
        create_app(latency_s=latency_s, token_delay_s=delay_s),
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=0,  # nobody needs answers after a stop
    )
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)  # noqa: T201
    uvicorn.Server(config).run(sockets=[listener])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bottega demo-model", description="A deterministic model for demos and tests."
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--latency-ms", type=float, default=0, help="before an answer begins")
    parser.add_argument("--token-delay-ms", type=float, default=0, help="between its words")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop when standard input ends"
    )
    return parser.parse_args()


def _exit_at_end_of_input() -> None:
    """Exit when standard input ends: the system closes it when the parent ends or is killed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
