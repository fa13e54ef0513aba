"""A model's Responses API for tests: a real server on loopback, whose answers a test scripts.

    async with FakeResponses() as model:
        model.script(answer(thought("rs_1"), call("add", {"a": 1})), answer(say("hello")))
        provider = OpenAIProvider(
            "any", api="responses", api_key="test-key", base_url=model.base_url
        )

It serves and scripts as :class:`~tests.fake_model.FakeModel` does, whose other replies (errors,
gates, raw bytes) fit too. Like the real API it refuses an invalid stateless conversation.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from bottega.llm.demo_model.rules import Answer
from tests.fake_model import FakeModel, Reply, Watched, _Stream, error_body

Item = dict[str, Any]


def say(text: str, *, phase: str | None = None) -> Item:
    """Build a message of the model."""
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}
    return item if phase is None else item | {"phase": phase}


def refuse(text: str) -> Item:
    """Build a message by which the model refuses."""
    return say("") | {"content": [{"type": "refusal", "refusal": text}]}


def call(name: str, arguments: dict[str, Any] | str, *, call_id: str = "c1") -> Item:
    """Build a call; arguments that are no dict are sent unchanged."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    item = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id}
    return item | {"name": name, "arguments": raw}


def thought(id_: str, *, encrypted: str | None = "gAAAA==", summary: str | None = None) -> Item:
    """Build reasoning; a stateless server cannot take it back without ``encrypted``."""
    parts = [{"type": "summary_text", "text": summary}] if summary else []
    return {"type": "reasoning", "id": id_, "summary": parts, "encrypted_content": encrypted}


def events(*items: Item, reason: str | None = None, **response: Any) -> list[dict[str, Any]]:
    """Return the events of an answer, as OpenAI sends them.

    Args:
        reason: why the answer is incomplete; ``None``: it is complete.
        response: further fields of the final response, such as ``usage``.
    """
    output = [item | {"status": "completed"} for item in items]
    status = "incomplete" if reason else "completed"
    final: dict[str, Any] = {"object": "response", "status": status, "error": None}
    final |= {"incomplete_details": {"reason": reason} if reason else None, "output": output}
    begun: Item = {"object": "response", "status": "in_progress", "error": None, "output": []}
    found = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for index, item in enumerate(output) for event in _item_events(index, item)),
        {"type": f"response.{status}", "response": final | response},
    ]
    return [event | {"sequence_number": number} for number, event in enumerate(found)]


def answer(*items: Item, **end: Any) -> Reply:
    """Build a whole answer; see :func:`events`."""
    return stream(*events(*items, **end))


def stream(
    *found: dict[str, Any], ends: bool = True, gate: asyncio.Event | None = None, after: int = 0
) -> Reply:
    """Stream these events; then end the answer, or break the connection.

    Args:
        gate: stops the stream after ``after`` events until it is set.
    """
    encoded = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in found]
    parts = [text.encode() for text in encoded]
    return lambda request: _Stream(parts, ends=ends, gate=gate, wait_at=after)


def _item_events(index: int, item: Item) -> Iterator[dict[str, Any]]:
    begun = item | {"status": "in_progress"}
    place = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "item": begun | {"arguments": ""}, **place}
        kind = "response.function_call_arguments"
        for start in range(0, len(item["arguments"]), 5):
            piece = item["arguments"][start : start + 5]
            yield {"type": f"{kind}.delta", "delta": piece, **place}
        yield {"type": f"{kind}.done", "arguments": item["arguments"], **place}
    elif item["type"] == "message":
        yield {"type": "response.output_item.added", "item": begun | {"content": []}, **place}
        for number, part in enumerate(item["content"]):
            yield from _part_events(part, {"content_index": number, **place})
    else:
        unfinished = {"encrypted_content": "gA"}
        yield {"type": "response.output_item.added", "item": begun | unfinished, **place}
    yield {"type": "response.output_item.done", "item": item, **place}


def _part_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    field = "refusal" if part["type"] == "refusal" else "text"
    kind = "response.refusal" if field == "refusal" else "response.output_text"
    yield {"type": "response.content_part.added", "part": part | {field: ""}, **place}
    for piece in re.findall(r"\s*\S+", part[field]):
        yield {"type": f"{kind}.delta", "delta": piece, "obfuscation": "x7", **place}
    yield {"type": f"{kind}.done", field: part[field], **place}
    yield {"type": "response.content_part.done", "part": part, **place}


class FakeResponses(FakeModel):
    """Model's Responses API on an ephemeral port, while the ``async with`` block lasts.

    Attributes:
        requests: bodies of all well-formed requests, in order of arrival.
    """

    path = "/v1/responses"

    def __init__(self) -> None:
        super().__init__(lambda request: answer(say("done")))

    async def _respond(self, request: Request) -> ASGIApp:
        body = await request.json()
        if wrong := _problem(body):
            return Response(error_body(wrong), 400, media_type="application/json")
        self._on_request(body)
        reply = self._answer(body)
        assert not isinstance(reply, Answer), "this reply is for Chat Completions"
        return Watched(reply, self._on_disconnect)


def _problem(body: dict[str, Any]) -> str | None:
    """Return the reason why the real API would refuse a request."""
    if body.get("store") is not False or body.get("stream") is not True:
        return "This server keeps nothing and streams."
    open_calls: set[str] = set()
    items = body["input"]
    for item, following in zip(items, [*items[1:], None], strict=True):
        kind = item["type"]
        if kind == "function_call":
            open_calls.add(item["call_id"])
        elif kind == "function_call_output":
            if item["call_id"] not in open_calls:
                return f"No tool call found for function call output {item['call_id']}."
            open_calls.discard(item["call_id"])
        elif kind == "reasoning":
            if "status" in item or "content" in item:
                return "Unknown parameter: 'status' or 'content'."
            if not item["encrypted_content"]:
                return f"Item {item['id']} not found. Items are not persisted."
            if following is None or following["type"] == "function_call_output":
                return "Reasoning was provided without its required following item."
    return f"No tool output found for {sorted(open_calls)}." if open_calls else None
