"""The demo model as a provider, without a server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, StandardMessage, ToolCall, ToolMessage, Usage
from bottega.agents.provider import ModelOptions, OnDelta, ToolSchema
from bottega.llm.demo_model import wire
from bottega.llm.demo_model.conversation import Answer
from bottega.llm.demo_model.decide import decide
from bottega.llm.dialects.chat import chat
from bottega.llm.server import ServerSpec

PROMPT = "prompt"
"""Key of the sent messages in an answer's metadata."""

_DEFAULTS = ModelOptions()


class DemoProvider:
    """Sends each request to the demo model as Chat Completions, and keeps its messages."""

    def __init__(self) -> None:
        self._dialect = chat(ServerSpec(), "demo", "")
        self._calls = 0

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = _DEFAULTS,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage:
        """Answer a request. Parameters of models have no effect on the demo model."""
        output = self._dialect.output(options)
        plain = replace(options, params=None)
        request: dict[str, Any] = from_json(self._dialect.body(messages, tools, plain, output))
        message = self._message(decide(request), request)
        if output is not None:
            message = output.read(message, isinstance(messages[-1], ToolMessage))
        message.metadata[PROMPT] = request["messages"]
        return message

    def _message(self, answer: Answer, request: dict[str, Any]) -> AssistantMessage:
        calls = []
        for call in answer.calls:
            self._calls += 1
            calls.append(
                ToolCall(id=f"call_{self._calls}", name=call.name, arguments=call.arguments)
            )
        used = wire.usage(answer, request)
        return AssistantMessage(
            content=answer.text,
            tool_calls=tuple(calls),
            usage=Usage(used["prompt_tokens"], used["completion_tokens"]),
            metadata={"finish_reason": "tool_calls" if calls else "stop"},
        )
