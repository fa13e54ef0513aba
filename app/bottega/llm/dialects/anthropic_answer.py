"""An answer of Anthropic's Messages API, from the events of its stream.

Source: platform.claude.com/docs/en/build-with-claude/streaming and …/api/handling-stop-reasons.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bottega.agents.messages import ToolCall
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall
from bottega.llm.dialects.opaque import state_of
from bottega.llm.dialects.text_chunks import TextChunks
from bottega.llm.dialects.wire import encode_json
from bottega.llm.errors import ErrorMapper
from bottega.llm.usage import Counts, Reported

_KNOWN_OF_CALL = frozenset(("type", "id", "name", "input"))


@dataclass(slots=True)
class _Block:
    """A block of the answer whose pieces are still arriving.

    Attributes:
        body: the block as it began.
        text: pieces of its text, thinking or signature, by field.
    """

    body: dict[str, Any]
    call: PartialCall = field(default_factory=PartialCall)
    text: dict[str, list[str]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.body["type"])

    def whole(self) -> dict[str, Any]:
        return self.body | {name: "".join(pieces) for name, pieces in self.text.items()}


class AnthropicAnswer(AnswerBuilder):
    """Collects the events of one answer, or a complete message of a server that does not stream.

    Its state's ``message`` is ``{"order": …}``; see :mod:`.order`. Thinking is kept with its
    signature, and any other block that is neither text nor a call. An answer of one text, or of
    calls alone, has no state.

    Args:
        origin: the server and model that answer, from :func:`.opaque.origin_of`.
    """

    def __init__(self, report: ErrorMapper, after_results: bool, *, origin: str) -> None:
        super().__init__(report, TextChunks(_only_text, (b'"text":', b'"text": ')))
        self._origin = origin
        self._blocks: dict[int, _Block] = {}
        self._spoken: _Block | None = None

    def _take_text(self, text: str) -> None:
        # The form of a chunk holds the number of its block, so all are of the first one that spoke.
        assert self._spoken is not None
        self._spoken.text["text"].append(text)
        self._text.append(text)

    def _add(self, event: dict[str, Any]) -> str:
        match event["type"]:
            case "content_block_delta":
                return self._delta(self._blocks[event["index"]], event["delta"])
            case "content_block_start":
                return self._begin(event["index"], event["content_block"])
            case "message_start":
                self._usage = event["message"].get("usage")
            case "message_delta":
                self._take_end(event)
            case "message_stop":
                self.complete = self.finished
            case "message":  # whole
                return self._whole_message(event)
        return ""

    def _begin(self, index: int, body: dict[str, Any]) -> str:
        block = self._blocks[index] = _Block(body)
        if block.kind == "tool_use":
            block.call.id, block.call.name = str(body["id"]), str(body["name"])
            if body.get("input"):
                block.call.arguments.append(encode_json(body["input"]).decode())
            block.call.more = {k: v for k, v in body.items() if k not in _KNOWN_OF_CALL and v}
        elif block.kind == "text" and body.get("text"):
            return self._say(block, body["text"])
        return ""

    def _delta(self, block: _Block, delta: dict[str, Any]) -> str:
        match delta["type"]:
            case "text_delta":
                return self._say(block, delta["text"])
            case "input_json_delta":
                if block.kind == "tool_use":
                    block.call.arguments.append(delta["partial_json"])
            case "thinking_delta":
                block.text.setdefault("thinking", []).append(delta["thinking"])
            case "signature_delta":
                block.text.setdefault("signature", []).append(delta["signature"])
        return ""

    def _say(self, block: _Block, piece: str) -> str:
        self._spoken = self._spoken or block
        text = self._whole(piece)
        block.text.setdefault("text", []).append(text)
        self._text.append(text)
        return text

    def _take_end(self, event: dict[str, Any]) -> None:
        used, before = event.get("usage"), self._usage
        if isinstance(used, dict) and isinstance(before, dict):
            # The counts are cumulative, or null (its SDK's type MessageDeltaUsage).
            self._usage = {**before, **{k: v for k, v in used.items() if v is not None}}
        elif used is not None:
            self._usage = used
        if reason := event["delta"].get("stop_reason"):
            self._end(str(reason))

    def _whole_message(self, message: dict[str, Any]) -> str:
        text = "".join([self._begin(i, body) for i, body in enumerate(message["content"])])
        self._take_end({"usage": message.get("usage"), "delta": message})
        return text

    def hidden_size(self) -> int:
        return sum(
            len(encode_json(block.whole()))
            for block in self._blocks.values()
            if block.kind not in ("text", "tool_use")
        )

    def _reported(self) -> Reported:
        counts = Counts(self._usage)
        cached = counts.part("cache_read_input_tokens")
        written = counts.part("cache_creation_input_tokens")
        return Reported(
            counts.total("input_tokens", cached, written),
            counts.total("output_tokens"),
            cached,
            counts.part("thinking_tokens", "output_tokens_details"),
            written,
            counts.is_odd,
        )

    def _partial_calls(self) -> Iterable[PartialCall]:
        return [block.call for block in self._blocks.values() if block.kind == "tool_use"]

    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        order: list[dict[str, Any]] = []
        ids = iter(calls)
        for block in self._blocks.values():
            if block.kind == "text":
                order.append({"type": "text", "length": len("".join(block.text.get("text", ())))})
            elif block.kind == "tool_use":
                order.append({"type": "call", "id": next(ids).id})
                if block.call.more:
                    order[-1]["more"] = block.call.more
            else:
                order.append({"type": "opaque", "block": block.whole()})
        if any("more" in entry or entry["type"] == "opaque" for entry in order):
            return state_of(self._origin, {"order": order}, {})
        return {}


def _only_text(event: Any) -> str | None:
    """Return the text of an event that holds nothing else; ``None``: it does."""
    if event["type"] != "content_block_delta" or event["delta"]["type"] != "text_delta":
        return None
    text: str = event["delta"]["text"]
    return text
