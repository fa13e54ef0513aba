"""OpenAI's responses, whole and as events, made of runs. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.api.routes.openai.answers import arguments_of, created_at, output_text, usage_of
from bottega.api.routes.openai.requests import call_id
from bottega.api.routes.openai.response_requests import ResponsesRequest, response_id

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
        asked: what it answers; ``None``: not known any more.
    """

    run_id: UUID
    after: int
    model: str
    asked: ResponsesRequest | None = None

    def begun(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response without output."""
        asked = self.asked
        return {
            "id": response_id(self.run_id, self.after),
            "object": "response",
            "created_at": created_at(self.run_id),
            "status": status,
            "background": bool(asked and asked.background),
            "error": None,
            "incomplete_details": None,
            "instructions": asked and asked.instructions,
            "max_output_tokens": asked and asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": (asked and asked.metadata) or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": not asked or asked.parallel_tool_calls is not False,
            "previous_response_id": asked and asked.previous_response_id,
            "reasoning": {
                "effort": asked and asked.reasoning and asked.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": not asked or asked.store is not False,
            "temperature": asked and asked.temperature,
            "text": {"format": (asked and asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": (asked and asked.tool_choice) or "auto",
            "tools": (asked and asked.tools) or [],
            "top_logprobs": 0,
            "top_p": asked and asked.top_p,
            "truncation": (asked and asked.truncation) or "disabled",
            "usage": None,
            "user": asked and asked.user,
        }

    def whole(self, run: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the response of a run as it is.

        Args:
            run: as ``GET /v1/runs/{id}`` shows it.
            calls: interrupts of the client's tools that the run waits for, if it does.
        """
        made = self.begun("completed" if calls else _STATUSES.get(run["status"], "failed"))
        if calls:
            made["output"] = [self.call(each) for each in calls]
        elif run["status"] == "completed":
            made["output"] = [self.message(output_text(run))]
        if reason := _INCOMPLETE.get(run["stop_reason"] or ""):
            made |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        if made["status"] == "failed":
            error = run["error"] or {"message": f"the run is {run['status']}"}
            made["error"] = {"code": "server_error", "message": error["message"]}
        if (usage := usage_of(run)) is not None:
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
            "id": f"msg_{self.run_id.hex}_{self.after}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [part(text)],
        }

    def call(self, interrupt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the item of a call of a client's tool."""
        return {
            "id": f"fc_{interrupt['id'].hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(interrupt["id"]),
            "name": interrupt["tool"],
            "arguments": arguments_of(interrupt),
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
            yield self._event(kind, response=self._response.begun())

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of the answer."""
        if not self._is_open:
            self._is_open = True
            item = self._response.message("", "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._at_part("response.content_part.added", part=part(""))
        self._text += text
        yield self._at_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, run: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yield the events after all text; see :meth:`ResponseObject.whole`."""
        whole = self._response.whole(run, calls)
        output = []
        if self._is_open:
            output.append(self._response.message(self._text))
            yield self._at_part("response.output_text.done", text=self._text, logprobs=[])
            yield self._at_part("response.content_part.done", part=part(self._text))
            yield self._event("response.output_item.done", output_index=0, item=output[0])
        for interrupt in calls:
            item, at = self._response.call(interrupt), {"output_index": len(output)}
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", **at, item=begun)
            at_item = {**at, "item_id": item["id"]}
            arguments = item["arguments"]
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **at_item, delta=arguments)
            yield self._event(f"{kind}.done", **at_item, name=item["name"], arguments=arguments)
            yield self._event("response.output_item.done", **at, item=item)
            output.append(item)
        whole["output"] = output or whole["output"]
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, message: str) -> bytes:
        """Return the event of a response that failed."""
        error = {"code": "server_error", "message": message}
        whole = self._response.begun("failed") | {"error": error}
        return self._event("response.failed", response=whole)

    def _at_part(self, kind: str, **more: Any) -> bytes:
        item = self._response.message("", "in_progress")["id"]
        return self._event(kind, item_id=item, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json(body))
