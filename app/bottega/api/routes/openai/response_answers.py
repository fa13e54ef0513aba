"""OpenAI's responses, whole and as events, made of runs. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.api.routes.openai.answers import ClientCall, RoundAnswer, created_at
from bottega.api.routes.openai.chat_answers import usage_of
from bottega.api.routes.openai.model_request import id_of
from bottega.api.routes.openai.response_requests import ResponsesRequest

_STATUSES = {
    "queued": "queued",
    "running": "in_progress",
    "waiting": "in_progress",
    "completed": "completed",
    "cancelled": "cancelled",
}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """A response, under way or complete.

    Attributes:
        after: ``seq`` after which the run's events are the response.
        request: what it answers; ``None``: not known any more.
    """

    run_id: UUID
    after: int
    model: str
    request: ResponsesRequest | None = None

    def body(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response without output."""
        request = self.request
        return {
            "id": id_of("resp", self.run_id, self.after),
            "object": "response",
            "created_at": created_at(self.run_id),
            "status": status,
            "background": bool(request and request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request and request.instructions,
            "max_output_tokens": request and request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": (request and request.metadata) or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": not request or request.parallel_tool_calls is not False,
            "previous_response_id": request and request.previous_response_id,
            "reasoning": {
                "effort": request and request.reasoning and request.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": not request or request.store is not False,
            "temperature": request and request.temperature,
            "text": {
                "format": (request and request.text and request.text.format) or {"type": "text"}
            },
            "tool_choice": (request and request.tool_choice) or "auto",
            "tools": (request and request.tools) or [],
            "top_logprobs": 0,
            "top_p": request and request.top_p,
            "truncation": (request and request.truncation) or "disabled",
            "usage": None,
            "user": request and request.user,
        }

    def whole(self, answer: RoundAnswer) -> dict[str, Any]:
        """Return the response with an answer, which may still be under way."""
        run = answer.run
        made = self.body("completed" if answer.calls else _STATUSES.get(run["status"], "failed"))
        said = made["status"] == "completed" and (answer.text or not answer.calls)
        made["output"] = [self.message(answer.text)] if said else []
        made["output"] += map(item_of, answer.calls)
        if not answer.calls and (reason := _INCOMPLETE.get(run["stop_reason"] or "")):
            made |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        if made["status"] == "failed":
            error = run["error"] or {"message": f"the run is {run['status']}"}
            made["error"] = {"code": "server_error", "message": error["message"]}
        if (usage := usage_of(answer)) is not None:
            made["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
        return made

    def message(self, text: str, status: str = "completed") -> dict[str, Any]:
        """Return the item with the answer; ``status``: ``in_progress``: it has no text yet."""
        return {
            "id": id_of("msg", self.run_id, self.after),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [part(text)],
        }


def item_of(call: ClientCall) -> dict[str, Any]:
    """Return the item of a call of a client's tool."""
    return {
        "id": id_of("fc", call.interrupt),
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def part(text: str) -> dict[str, Any]:
    """Return a part of a message with a text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """The events of a streamed response, numbered in their order."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0
        self._text = ""
        self._is_open = False

    def begin(self) -> Iterator[bytes]:
        """Yield the events before any output."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response.body())

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of the answer."""
        if not self._is_open:
            self._is_open = True
            item = self._response.message("", "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._at_part("response.content_part.added", part=part(""))
        self._text += text
        yield self._at_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, answer: RoundAnswer) -> Iterator[bytes]:
        """Yield the events after all text."""
        if not (self._is_open or answer.calls):
            yield from self.delta("")
        if self._is_open:
            item = self._response.message(self._text)
            yield self._at_part("response.output_text.done", text=self._text, logprobs=[])
            yield self._at_part("response.content_part.done", part=part(self._text))
            yield self._event("response.output_item.done", output_index=0, item=item)
        for number, call in enumerate(answer.calls):
            item, at = item_of(call), {"output_index": number + self._is_open}
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", **at, item=begun)
            at_item = {**at, "item_id": item["id"]}
            arguments = item["arguments"]
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **at_item, delta=arguments)
            yield self._event(f"{kind}.done", **at_item, name=item["name"], arguments=arguments)
            yield self._event("response.output_item.done", **at, item=item)
        whole = self._response.whole(answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, message: str) -> bytes:
        """Return the event of a response that failed."""
        error = {"code": "server_error", "message": message}
        whole = self._response.body("failed") | {"error": error}
        return self._event("response.failed", response=whole)

    def _at_part(self, kind: str, **more: Any) -> bytes:
        item = self._response.message("", "in_progress")["id"]
        return self._event(kind, item_id=item, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json(body))
