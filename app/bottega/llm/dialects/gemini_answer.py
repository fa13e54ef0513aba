"""An answer of Gemini's API, from the chunks of its stream.

Source: ai.google.dev/api/generate-content, ``GenerateContentResponse``, and
…/gemini-api/docs/thought-signatures.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from bottega.agents.messages import ToolCall
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall
from bottega.llm.dialects.opaque import state_of
from bottega.llm.dialects.wire import encode_json
from bottega.llm.errors import ErrorMapper
from bottega.llm.usage import Counts, Reported
from bottega.llm.vendor_words import FILTERED, finish_reason

_KNOWN = frozenset(("text", "thought", "functionCall"))


class GeminiAnswer(AnswerBuilder):
    """Collects the chunks of one answer, or a complete answer of a server that does not stream.

    Its state's ``message`` is ``{"order": …}``; see :mod:`.order`. A part with a signature stays a
    part by itself, and is kept even if its text is empty. Thoughts are not sent back, their
    signatures are on other parts. Each answer with calls has a state, so the dialect knows calls of
    other models, which have no signature.

    Args:
        origin: the server and model that answer, from :func:`.opaque.origin_of`.
    """

    def __init__(self, report: ErrorMapper, after_results: bool, *, origin: str) -> None:
        super().__init__(report)
        self._origin = origin
        self._order: list[dict[str, Any]] = []
        self._calls: list[PartialCall] = []
        self._thoughts = 0
        self._ended = False

    def _add(self, event: dict[str, Any]) -> str:
        if used := event.get("usageMetadata"):
            self._usage = used
        blocked = (event.get("promptFeedback") or {}).get("blockReason")
        if blocked:
            self._finish_reason = f"content_filter:{blocked}"
        candidates = event.get("candidates")
        if not candidates:
            return ""
        candidate = candidates[0]  # the only one, unless the caller's fields ask for more
        if candidate.get("index"):
            return ""
        parts = (candidate.get("content") or {}).get("parts") or ()
        text = "".join([self._part(part) for part in parts])
        if reason := candidate.get("finishReason"):
            self._take_end(str(reason))
        return text

    def _take_end(self, reason: str) -> None:
        if reason == "FINISH_REASON_UNSPECIFIED":
            return
        if reason == "MISSING_THOUGHT_SIGNATURE":
            raise self._report.failed_in_stream({"code": 400, "message": reason})
        if finish_reason(reason) == FILTERED:
            self._finish_reason = f"{FILTERED}:{reason}"
        else:
            self._end("tool_calls" if reason == "STOP" and self._calls else reason)

    def _part(self, part: dict[str, Any]) -> str:
        if part.get("thought"):
            self._thoughts += len((part.get("text") or "").encode("utf-8", "replace"))
            return ""
        more = {name: value for name, value in part.items() if name not in _KNOWN}
        if call := part.get("functionCall"):
            arguments = encode_json(call.get("args") or {}).decode()
            found = PartialCall(str(call.get("id") or ""), str(call["name"]), [arguments], more)
            self._calls.append(found)
            self._order.append({"type": "call"})
            return ""
        if "text" not in part:
            self._order.append({"type": "opaque", "block": part})
            return ""
        text = self._whole(part["text"])
        self._text.append(text)
        last = self._order[-1] if self._order else {}
        if last.get("type") == "text" and not (more or "more" in last):
            last["length"] += len(text)
        elif text or more:
            entry = {"type": "text", "length": len(text)}
            self._order.append(entry | {"more": more} if more else entry)
        return text

    def hidden_size(self) -> int:
        return self._thoughts

    def _reported(self) -> Reported:
        counts = Counts(self._usage)
        thought = counts.part("thoughtsTokenCount")
        return Reported(
            counts.total("promptTokenCount", counts.part("toolUsePromptTokenCount")),
            counts.total("candidatesTokenCount", thought),
            counts.part("cachedContentTokenCount"),
            thought,
            is_odd=counts.is_odd,
        )

    def _partial_calls(self) -> Iterable[PartialCall]:
        return self._calls

    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        made = iter(zip(calls, self._calls, strict=True))
        order: list[dict[str, Any]] = []
        for entry in self._order:
            if entry["type"] == "call":
                call, found = next(made)
                entry = {"type": "call", "id": call.id}
                if found.more:
                    entry["more"] = found.more
            order.append(entry)
        if calls or any("more" in entry or entry["type"] == "opaque" for entry in order):
            return state_of(self._origin, {"order": order}, {})
        return {}
