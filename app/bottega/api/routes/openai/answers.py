"""Chat completions, whole and in chunks, made of runs. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.api.routes.openai.requests import call_id

_FINISHES = {"length": "length", "content_filter": "content_filter"}
"""``finish_reason`` by a run's ``stop_reason``; of all others: ``stop``."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request, under way or complete.

    Attributes:
        model: as the client named it.
    """

    run_id: UUID
    model: str

    def whole(self, run: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a ``chat.completion``.

        Args:
            run: as ``GET /v1/runs/{id}`` shows it.
            calls: interrupts of the client's tools that the run waits for, if it does.
        """
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(each) for each in calls]
        else:
            message["content"] = output_text(run)
        finish = "tool_calls" if calls else _finish(run)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._head("chat.completion") | {"choices": [choice], "usage": usage_of(run)}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        """Return a ``chat.completion.chunk`` as a server-sent event."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def last_chunks(
        self, run: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], *, with_usage: bool
    ) -> list[bytes]:
        """Return what follows the text; see :meth:`whole`."""
        made = []
        if calls:
            numbered = [{"index": n, **_call(each)} for n, each in enumerate(calls)]
            made.append(self.chunk({"tool_calls": numbered}))
        made.append(self.chunk({}, "tool_calls" if calls else _finish(run)))
        if with_usage:
            usage: dict[str, Any] = {"choices": [], "usage": usage_of(run)}
            made.append(event(self._head("chat.completion.chunk") | usage))
        return [*made, DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.run_id.hex}",
            "object": kind,
            "created": created_at(self.run_id),
            "model": self.model,
        }


class SentText:
    """The text of an answer that a client has got in pieces; what was sent stays."""

    def __init__(self) -> None:
        self._call = 0
        self._sent = ""
        self._now = ""
        self._before = ""

    def piece(self, call: int, attempt: int, offset: int, text: str) -> str:
        """Return what to send of a piece of live text of a model call.

        Another call begins a paragraph. So does another try of the same call, unless its text is
        the text already sent.
        """
        if call != self._call:
            self._before = "\n\n" if self._sent or self._before else ""
            self._call, self._sent, self._now = call, "", ""
        self._now = self._now[:offset] + text
        if self._sent.startswith(self._now):
            return ""
        if self._now.startswith(self._sent):
            new = self._now[len(self._sent) :]
            before = "" if self._sent else self._before
        else:
            new, before = self._now, "\n\n"
        self._sent = self._now
        return before + new

    def rest(self, output: str) -> str:
        """Return what to send so that the client has the whole answer."""
        if output.startswith(self._sent):
            return output[len(self._sent) :]
        return "" if self._sent.strip() == output.strip() else f"\n\n{output}"


DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %s\n\n" % to_json(body)


def created_at(run_id: UUID) -> int:
    """Return the time at which a run was made, in seconds since 1970: its id begins with it."""
    return int(run_id.hex[:12], 16) // 1000


def output_text(run: Mapping[str, Any]) -> str:
    """Return a run's output as a text; a DAG's with several answers as JSON by agent."""
    output = run["output"]
    if output is None or isinstance(output, str):
        return output or ""
    return json.dumps(output, ensure_ascii=False)


def arguments_of(interrupt: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(interrupt["arguments"], ensure_ascii=False)


def usage_of(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tokens of a run so far; ``None``: not known yet."""
    used = run["usage"]
    if used is None:
        return None
    return {
        "prompt_tokens": used["input"],
        "completion_tokens": used["output"],
        "total_tokens": used["input"] + used["output"],
        "prompt_tokens_details": {"cached_tokens": used.get("cached", 0)},
        "completion_tokens_details": {"reasoning_tokens": used.get("reasoning", 0)},
    }


def _finish(run: Mapping[str, Any]) -> str:
    return _FINISHES.get(run["stop_reason"] or "", "stop")


def _call(interrupt: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": interrupt["tool"], "arguments": arguments_of(interrupt)}
    return {"id": call_id(interrupt["id"]), "type": "function", "function": function}
