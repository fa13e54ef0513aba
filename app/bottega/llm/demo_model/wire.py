"""Encoding of an answer for Chat Completions: complete, or as a stream of chunks."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import to_json

from bottega.llm.demo_model.conversation import Answer, text_of

_WORD = re.compile(r"\s*\S+|\s+$")
_CHARACTERS_PER_TOKEN = 4

DONE = b"data: [DONE]\n\n"


def completion(answer: Answer, request: dict[str, Any]) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = _calls(answer, request)
    choice = {"index": 0, "message": message, "finish_reason": _reason(answer)}
    head = _head(request, "chat.completion")
    return to_json({**head, "choices": [choice], "usage": usage(answer, request)})


def chunks(answer: Answer, request: dict[str, Any]) -> Iterator[bytes]:
    """Encode the answer as server-sent events: words, calls, finish reason, requested usage."""
    head = _head(request, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    for word in _WORD.findall(answer.text):
        yield chunk({"content": word})
    for index, call in enumerate(_calls(answer, request)):
        function = call["function"]
        half = len(function["arguments"]) // 2
        start = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield chunk({"tool_calls": [start]})
        for piece in (function["arguments"][:half], function["arguments"][half:]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _reason(answer))
    options = request.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(answer, request)})
    yield DONE


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % to_json(data)


def error(message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    kind = "invalid_request_error"
    return to_json({"error": {"message": message, "type": kind, "param": param, "code": code}})


def usage(answer: Answer, request: dict[str, Any]) -> dict[str, int]:
    """Estimate input and output tokens at a fixed number of characters each."""
    read = sum(len(text_of(message)) for message in request["messages"])
    for message in request["messages"]:
        for call in message.get("tool_calls") or ():
            read += len(call["function"]["name"]) + len(call["function"]["arguments"])
    if tools := request.get("tools"):
        read += len(to_json(tools))
    written = len(answer.text)
    written += sum(len(call.name) + len(to_json(call.arguments)) for call in answer.calls)
    prompt, output = _tokens(read), _tokens(written)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def _tokens(characters: int) -> int:
    return -(-characters // _CHARACTERS_PER_TOKEN)


def _head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{_digest(request)}",
        "object": kind,
        "created": 0,
        "model": request["model"],
    }


def _digest(request: dict[str, Any]) -> str:
    """Return a short hash of model and messages, for ids."""
    data = to_json([request["model"], request["messages"]])
    return hashlib.blake2b(data, digest_size=9).hexdigest()


def _calls(answer: Answer, request: dict[str, Any]) -> list[dict[str, Any]]:
    if not answer.calls:
        return []
    digest = _digest(request)
    return [
        {
            "id": f"call_{digest}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": to_json(call.arguments).decode()},
        }
        for number, call in enumerate(answer.calls)
    ]


def _reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "stop"
