"""Servers that require opaque fields of their answers back in the next request.

- :class:`DeepSeek`: ``reasoning_content`` of turns with tool calls, of each message of such a turn;
  in turns without it is refused, as by ``deepseek-reasoner`` (api-docs.deepseek.com, guides
  "Thinking Mode" and "Reasoning Model").
- :class:`Gemini`: ``extra_content.google.thought_signature`` of the first of the tool calls of a
  message (ai.google.dev/gemini-api/docs/thought-signatures, "OpenAI compatibility").
- :class:`OpenRouter`: ``reasoning_details`` of messages with tool calls, unchanged and in order
  (openrouter.ai/docs, "Reasoning Tokens", "Preserving reasoning blocks").
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from bottega.llm.demo_model import server as demo_server
from bottega.llm.demo_model.rules import Answer
from tests.fake_model import chunk, http_error, response, sse
from tests.llm.vendors.strict import StrictModel

Message = dict[str, Any]


def mark(message: Message) -> str:
    """Return the opaque text of an assistant's message; only a client that kept it can send it."""
    said = [message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        said += [call["function"]["name"], json.dumps(arguments, sort_keys=True)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def answers_by_turn(messages: list[Message]) -> Iterator[list[Message]]:
    """Return the messages of the model and tools after each user's message."""
    turn: list[Message] = []
    for message in messages:
        if message["role"] == "user":
            yield turn
            turn = []
        elif message["role"] != "system":
            turn.append(message)
    yield turn


class StatefulModel(StrictModel):
    """Model that checks the fields a vendor wants back; its answers carry them, in pieces."""

    def missing(self, messages: list[Message]) -> str | None:
        raise NotImplementedError

    def pieces(self, message: Message, *, last: bool) -> list[dict[str, Any]]:
        """Return chunks that come with an answer; ``last``: no tool calls are in its turn."""
        raise NotImplementedError

    def signed(self, event: dict[str, Any], message: Message) -> dict[str, Any]:
        """Return the answer's own event."""
        return event

    def _answer(self, request: dict[str, Any]) -> Any:
        if wrong := self.missing(request["messages"]):
            self.refusals.append((wrong, request["messages"]))
            self.script(http_error(400, message=wrong))
        reply = super()._answer(request)
        if not isinstance(reply, Answer):
            return reply
        message = demo_server.completion(reply, request)["choices"][0]["message"]
        own = [part.removeprefix(b"data: ") for part in demo_server.chunks(reply, request)][:-1]
        last = not reply.calls and request["messages"][-1]["role"] != "tool"
        found = [*self.pieces(message, last=last)]
        found += [self.signed(json.loads(event), message) for event in own]
        return response(sse(*found), request)


class DeepSeek(StatefulModel):
    def missing(self, messages: list[Message]) -> str | None:
        for turn in answers_by_turn(messages):
            with_calls = any(message.get("tool_calls") for message in turn)
            for message in turn:
                if message["role"] != "assistant":
                    continue
                sent = message.get("reasoning_content")
                if with_calls and sent != f"I think {mark(message)}, so":
                    return "The reasoning_content in the thinking mode must be passed back."
                if sent is not None and not with_calls:
                    return "reasoning_content is not allowed in the input messages."
        return None

    def pieces(self, message: Message, *, last: bool) -> list[dict[str, Any]]:
        text = f"I think {mark(message)}, so"
        return [chunk(reasoning_content=text[at : at + 7]) for at in range(0, len(text), 7)]


class Gemini(StatefulModel):
    def missing(self, messages: list[Message]) -> str | None:
        for message in messages:
            for index, call in enumerate(message.get("tool_calls") or ()):
                wanted = {"google": {"thought_signature": mark(message)}} if index == 0 else None
                if call.get("extra_content") != wanted:
                    name = call["function"]["name"]
                    return f"Function call `{name}` is missing a thought_signature."
        return None

    def pieces(self, message: Message, *, last: bool) -> list[dict[str, Any]]:
        return []

    def signed(self, event: dict[str, Any], message: Message) -> dict[str, Any]:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == 0 and "id" in call:
                    call["extra_content"] = {"google": {"thought_signature": mark(message)}}
        return event


class OpenRouter(StatefulModel):
    def missing(self, messages: list[Message]) -> str | None:
        for message in messages:
            if message.get("tool_calls") and message.get("reasoning_details") != [
                {"type": "reasoning.summary", "summary": "Look it up.", "index": 0, "format": "v1"},
                {"type": "reasoning.encrypted", "data": mark(message), "id": "rs_1", "index": 0},
                {"type": "reasoning.text", "text": "ha ha", "index": 1, "signature": "s=="},
            ]:
                return "Invalid reasoning_details."
        return None

    def pieces(self, message: Message, *, last: bool) -> list[dict[str, Any]]:
        details = [
            {"type": "reasoning.summary", "summary": "Look it ", "index": 0, "format": "v1"},
            {"type": "reasoning.summary", "summary": "up.", "index": 0, "format": "v1"},
            {"type": "reasoning.encrypted", "data": mark(message), "id": "rs_1", "index": 0},
            {"type": "reasoning.text", "text": "ha ", "index": 1},
            {"type": "reasoning.text", "text": "ha", "index": 1},
            {"type": "reasoning.text", "index": 1, "signature": "s=="},
        ]
        return [chunk(reasoning="…", reasoning_details=[detail]) for detail in details]
