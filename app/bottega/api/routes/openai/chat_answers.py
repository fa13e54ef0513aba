"""Chat completions, whole and in chunks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from bottega.api.routes.openai.answers import ClientCall, RoundAnswer, created_at, event

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request, under way or complete.

    Attributes:
        after: ``seq`` after which the run's events are the answer.
        model: as the client named it.
    """

    run_id: UUID
    after: int
    model: str

    def whole(self, answer: RoundAnswer) -> dict[str, Any]:
        """Return a ``chat.completion``."""
        content = (answer.text or None) if answer.calls else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [_call(each) for each in answer.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
        return self._head("chat.completion") | {"choices": [choice], "usage": usage_of(answer)}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        """Return a ``chat.completion.chunk`` as a server-sent event."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def last_chunks(self, answer: RoundAnswer, *, with_usage: bool) -> list[bytes]:
        """Return what follows the text."""
        made = []
        if answer.calls:
            numbered = [{"index": n, **_call(each)} for n, each in enumerate(answer.calls)]
            made.append(self.chunk({"tool_calls": numbered}))
        made.append(self.chunk({}, answer.finish))
        if with_usage:
            usage: dict[str, Any] = {"choices": [], "usage": usage_of(answer)}
            made.append(event(self._head("chat.completion.chunk") | usage))
        return [*made, DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.run_id.hex}" + (f"-{self.after}" if self.after else ""),
            "object": kind,
            "created": created_at(self.run_id),
            "model": self.model,
        }


def usage_of(answer: RoundAnswer) -> dict[str, Any] | None:
    """Return the tokens of an answer; ``None``: not known yet."""
    used = answer.usage
    if used is None:
        return None
    return {
        "prompt_tokens": used["input"],
        "completion_tokens": used["output"],
        "total_tokens": used["input"] + used["output"],
        "prompt_tokens_details": {"cached_tokens": used.get("cached", 0)},
        "completion_tokens_details": {"reasoning_tokens": used.get("reasoning", 0)},
    }


def _call(call: ClientCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
