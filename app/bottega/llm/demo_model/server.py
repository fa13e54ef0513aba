"""The demo model's server: chat completions and the list of models, on loopback."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from hashlib import blake2b
from typing import Any

import uvicorn
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bottega.llm.demo_model.rules import Answer, decide, usage


def serve(port: int, *, latency_ms: float = 0, token_delay_ms: float = 0) -> None:
    """Serve the demo model. Print one line, ``{"port": N}``, when the server accepts connections.

    Args:
        port: number of the port; 0 means any free port.
        latency_ms: milliseconds before an answer begins.
        token_delay_ms: milliseconds between the words of a stream.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as refused:
        sys.exit(f"cannot listen on 127.0.0.1:{port}: {refused.strerror}")
    config = uvicorn.Config(
        create_app(latency_s=latency_ms / 1000, token_delay_s=token_delay_ms / 1000),
        log_config=None,
        log_level="critical",
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=0,  # no client needs an answer after a stop
    )
    with contextlib.suppress(KeyboardInterrupt):
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)  # noqa: T201
        uvicorn.Server(config).run(sockets=[listener])


def _exit_at_end_of_input() -> None:
    """Exit when standard input ends, which happens when the parent process ends."""
    sys.stdin.buffer.read()
    os._exit(0)


def create_app(*, latency_s: float = 0.0, token_delay_s: float = 0.0) -> Starlette:
    """Make an OpenAI-compatible server."""

    async def completions(request: Request) -> Response:
        try:
            body = from_json(await request.body())
            answer = decide(body)
        except (ValueError, TypeError, LookupError) as invalid:
            text = f"this is no request for chat completions: {invalid!r}"
            return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, 400)
        await asyncio.sleep(latency_s)
        return response(answer, body, token_delay_s)

    async def models(request: Request) -> Response:
        model = {"id": "demo", "object": "model", "created": 0, "owned_by": "bottega"}
        return JSONResponse({"object": "list", "data": [model]})

    chat = Route("/v1/chat/completions", completions, methods=["POST"])
    return Starlette(routes=[chat, Route("/v1/models", models)])


def response(answer: Answer, request: dict[str, Any], token_delay_s: float = 0.0) -> Response:
    if not request.get("stream"):
        return JSONResponse(completion(answer, request))

    async def stream() -> AsyncIterator[bytes]:
        for piece in chunks(answer, request):
            yield piece
            await asyncio.sleep(token_delay_s)

    return StreamingResponse(stream(), media_type="text/event-stream")


def completion(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer as an object. Its ids depend only on the model and the messages."""
    asked = to_json([request["model"], request["messages"]])
    digest = blake2b(asked, digest_size=9).hexdigest()
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    for number, call in enumerate(answer.calls):
        function = {"name": call.name, "arguments": to_json(call.arguments).decode()}
        item = {"id": f"call_{digest}_{number}", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(item)
    reason = "tool_calls" if answer.calls else "stop"
    return {
        "id": f"chatcmpl-{digest}",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": usage(answer, request),
    }


def chunks(answer: Answer, request: dict[str, Any]) -> Iterator[bytes]:
    """Encode the answer as server-sent events: words, calls, finish reason, usage if requested."""
    whole = completion(answer, request) | {"object": "chat.completion.chunk"}
    (choice,), used = whole["choices"], whole.pop("usage")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in re.findall(r"\s*\S+|\s+$", answer.text)]
    calls = enumerate(choice["message"].get("tool_calls", ()))
    deltas += [{"tool_calls": [call | {"index": number}]} for number, call in calls]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
    events = [{**whole, "choices": [each]} for each in choices]
    if (request.get("stream_options") or {}).get("include_usage"):
        events.append({**whole, "choices": [], "usage": used})
    for each in events:
        yield b"data: %b\n\n" % to_json(each)
    yield b"data: [DONE]\n\n"


if __name__ == "__main__":  # the process that :mod:`bottega.llm.demo_process` starts
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    serve(0, latency_ms=float(sys.argv[1]), token_delay_ms=float(sys.argv[2]))
