"""Gemini's API as a dialect.

Sources: ai.google.dev/api/generate-content (v1beta), …/gemini-api/docs/function-calling and
…/thought-signatures, and the types of Google's SDK 3.4. Bottega does not use Google's SDK: a call
through the SDK costs at least twice as much CPU, and the import costs each process 20 MB
(docs/guides/models.md).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from bottega.agents.messages import AssistantMessage, ToolCall, ToolMessage
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall, in_order
from bottega.llm.dialects.dialect import Block, Dialect, Form, Item, Media, WriteParts
from bottega.llm.dialects.opaque import origin_of, state_for, state_of
from bottega.llm.dialects.schemas import fitted
from bottega.llm.dialects.wire import (
    UNDERSTOOD,
    encode_json,
    name_of,
    present,
    tool_outputs,
)
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec
from bottega.llm.usage import Counts, Reported
from bottega.llm.vendor_words import FILTERED, finish_reason

_KNOWN = frozenset(("text", "thought", "functionCall"))


class GeminiAnswer(AnswerBuilder):
    """Builder of a message from the chunks of one answer, or from a complete answer.

    ``{"order": …}`` in the message's state is the order of the answer's blocks; see :mod:`.answer`.
    A part with a signature stays a separate part, even if its text is empty. The state omits the
    model's thoughts, because the signatures of thoughts are on other parts. If an answer of this
    model has calls, it also has a state. So a message that has calls but no state comes from a
    different model, and the message's calls have no signature.

    Args:
        origin: id of the server and model that answer; see :func:`.opaque.origin_of`.
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
        candidate = candidates[0]  # there is only one candidate, unless extra_body requests more
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


KEY = "gemini"

_NOT_SIGNED = {"thoughtSignature": "skip_thought_signature_validator"}
"""The documented signature for calls that another model made (…/thought-signatures, FAQ)."""

_FIRST = re.compile(r"[a-zA-Z_]")


def gemini(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` of a server with Gemini's API at ``address``.

    Raises:
        InvalidInputError: ``extra_body`` has a reserved field, or a value that is not JSON.
    """
    origin = origin_of(KEY, spec.name, address, model)
    folder, slash, rest = model.partition("/")
    if not slash or folder not in ("models", "tunedModels"):
        folder, rest = "models", model
    name = f"{folder}/{quote(rest, safe='')}"
    return Dialect(
        spec=spec,
        path=f"/{name}:streamGenerateContent?alt=sse",
        fields={"generationConfig": {}, **spec.extra_body},
        origin=origin,
        form=_FORM,
        write_answer=partial(write_answer, origin=origin),
        write_results=write_results,
        write_media=write_media,
        write_tool=write_tool,
        write=write,
        write_schema=write_schema,
        new_answer=partial(GeminiAnswer, origin=origin),
        list_tools=_declarations,
    )


def write(params: ModelParams, most: int | None, has_tools: bool) -> dict[str, Any]:
    effort = params.reasoning_effort
    thinking: dict[str, Any] | None = None
    if effort is not None:
        thinking = {"thinkingBudget": 0} if effort == "none" else {"thinkingLevel": effort.upper()}
    config = present(
        temperature=params.temperature,
        topP=params.top_p,
        maxOutputTokens=most,
        seed=params.seed,
        stopSequences=params.stop,
        thinkingConfig=thinking,
    )
    return present(
        generationConfig=config or None,
        serviceTier=params.service_tier,
        toolConfig=_tool_config(params) if has_tools else None,
    )


def write_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    form = {"responseMimeType": "application/json", "responseJsonSchema": schema}
    return {"generationConfig": form}


def write_media(media: Media) -> dict[str, Any]:
    """Return the block for a part. The API accepts all parts."""
    if media.url:
        kind = {"mimeType": media.media_type} if media.media_type else {}
        return {"fileData": {"fileUri": media.url, **kind}}
    return {"inlineData": {"mimeType": media.media_type, "data": media.data}}


def _declarations(tools: list[Item]) -> list[Item]:
    return [{"functionDeclarations": tools}]


def write_tool(tool: ToolSchema) -> Item:
    """Write a tool. Omit a schema without parameters, because the API refuses empty schemas."""
    found: Item = {"name": _name(tool.name), "description": tool.description}
    if tool.parameters.get("properties"):
        found["parametersJsonSchema"] = fitted(tool.parameters, "gemini")
    return found


def _tool_config(params: ModelParams) -> dict[str, Any] | None:
    choice = params.tool_choice
    if choice is None:
        return None
    config: dict[str, Any] = {"mode": "NONE" if choice == "none" else "ANY"}
    if isinstance(choice, NamedTool):
        config["allowedFunctionNames"] = [_name(choice.name)]
    return {"functionCallingConfig": config}


def _opening(system: str, conversation: list[Item]) -> dict[str, Any]:
    instruction = {"parts": [_text(system)]} if system else None
    return present(systemInstruction=instruction, contents=conversation)


def _user(content: str | Sequence[Block]) -> Item:
    return {"role": "user", "parts": [_text(content)] if isinstance(content, str) else content}


def _text(text: str) -> Block:
    return {"text": text}


_FORM = Form(
    opening=_opening,
    user=_user,
    text=_text,
    bridge={"role": "model", "parts": [_text(UNDERSTOOD)]},
    results_are_blocks=True,
)


def _name(name: str) -> str:
    name = name_of(name)
    return name if _FIRST.match(name) else f"_{name}"[:64]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": _name(call.name), "args": call.arguments}}


def write_answer(message: AssistantMessage, *, origin: str) -> list[Item]:
    state = state_for(origin, message)
    parts = in_order(message, state["message"].get("order", ()), _text, _call)
    if "origin" not in state:
        first = next((part for part in parts if "functionCall" in part), {})
        first |= _NOT_SIGNED
    return [{"role": "model", "parts": parts}]


def write_results(message: ToolMessage, blocks: WriteParts) -> tuple[list[Item], list[Block]]:
    """Write results. URLs go into a user's turn, because parts of a result can only have data."""
    items: list[Item] = []
    shown: list[Block] = []
    for each in tool_outputs(message):
        found = blocks(each.parts)
        said = "\n\n".join([each.text, *(block["text"] for block in found if "text" in block)])
        result: dict[str, Any] = {"id": each.call_id, "name": _name(each.name)}
        result["response"] = {"error" if each.is_error else "output": said}
        if data := [block for block in found if "inlineData" in block]:
            result["parts"] = data
        items.append({"functionResponse": result})
        if links := [block for block in found if "fileData" in block]:
            shown += [_text(f"From the tool {each.name}:"), *links]
    return items, shown
