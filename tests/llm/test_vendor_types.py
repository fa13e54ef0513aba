"""Requests and answers beside the types of the vendors' own SDKs.

The SDKs are imported by the tests that need them: that takes seconds of each test process.
"""

from importlib import import_module
from typing import Any

import pytest
from pydantic import TypeAdapter

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
)
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.parts import Part
from bottega.agents.provider import ModelOptions
from bottega.llm.demo_model.rules import Answer, DemoCall
from tests.fake_model import calls
from tests.llm.test_vendors import ADD, PIXEL, POINT, serving
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini

IMAGE = Part("image", data=PIXEL, media_type="image/png")
BLOCKS = {
    "text": "TextBlockParam",
    "image": "ImageBlockParam",
    "thinking": "ThinkingBlockParam",
    "tool_use": "ToolUseBlockParam",
    "tool_result": "ToolResultBlockParam",
}
"""Names of Anthropic's types of blocks."""
SPOKEN = Answer("One two.", (DemoCall("add", {"a": 1, "b": 2}), DemoCall("now", {})))


@pytest.fixture
def anthropic() -> Any:
    """Return the types of Anthropic's SDK."""
    return import_module("anthropic.types")


@pytest.fixture
def google() -> Any:
    """Return the types of Google's SDK."""
    return import_module("google.genai.types")


async def bodies(vendor: type[Any]) -> list[dict[str, Any]]:
    """Return requests with everything that a dialect can send."""
    async with serving(vendor) as (model, provider):
        model.script(calls(("add", {"a": 1, "b": 2}), content="Well."))
        asked: list[StandardMessage] = [
            SystemMessage(content="Be."),
            HumanMessage.of(Part("text", text="Look."), IMAGE),
        ]
        own = await provider.invoke(asked, [ADD])
        result = ToolResult(
            tool_call_id=own.tool_calls[0].id, tool_name="add", result=3, parts=(IMAGE,)
        )
        foreign = ToolCall(id="x/y", name="add", arguments={"a": 1})
        history = [
            *asked,
            own,
            ToolMessage.answering(result),
            AssistantMessage(content="So.", tool_calls=(foreign,)),
            ToolMessage(tool_results=(ToolResult(tool_call_id="x/y", tool_name="add", result=1),)),
            HumanMessage(content="Go on."),
        ]
        params = ModelParams(
            max_output_tokens=9,
            reasoning_effort="low",
            stop=("END",),
            tool_choice=NamedTool("add"),
            service_tier="auto" if vendor is Anthropic else "flex",
        )
        options = ModelOptions(params=params, output_schema=POINT)
        await provider.invoke(history, [ADD], options=options)
        assert not model.refusals
        found: list[dict[str, Any]] = model.bodies
        return found


@pytest.mark.deep
async def test_requests_to_anthropic_have_the_types_of_its_sdk(anthropic: Any) -> None:
    known = TypeAdapter[Any](anthropic.message_create_params.MessageCreateParamsStreaming)
    for body in await bodies(Anthropic):
        known.validate_python(body, extra="forbid")
        # An adapter looks into an iterable only when it is read.
        blocks = [*body["system"]]
        for message in body["messages"]:
            blocks += message["content"]
        for block in blocks:
            content = block.get("content")
            for inner in [block, *(content if isinstance(content, list) else ())]:
                adapter = TypeAdapter[Any](getattr(anthropic, BLOCKS[inner["type"]]))
                adapter.validate_python(inner, extra="forbid")
        for each in body["tools"]:
            TypeAdapter[Any](anthropic.ToolParam).validate_python(each, extra="forbid")


async def test_requests_to_gemini_have_the_types_of_its_sdk(google: Any) -> None:
    for body in await bodies(Gemini):
        for content in body["contents"]:
            google.Content.model_validate(content)
        google.Content.model_validate(body["systemInstruction"])
        for each in body["tools"]:
            google.Tool.model_validate(each)
        config = dict(body["generationConfig"])
        google.GenerateContentConfig.model_validate(config)
        if "toolConfig" in body:
            google.ToolConfig.model_validate(body["toolConfig"])


def test_events_of_the_stub_of_anthropic_have_the_types_of_its_sdk(anthropic: Any) -> None:
    known = TypeAdapter[Any](anthropic.RawMessageStreamEvent)
    for event in Anthropic().events(SPOKEN, {"model": "m", "messages": []}):
        if event["type"] != "ping":  # the SDK drops it
            known.validate_python(event)


def test_chunks_of_the_stub_of_gemini_have_the_types_of_its_sdk(google: Any) -> None:
    for chunk in Gemini().events(SPOKEN, {}):
        google.GenerateContentResponse.model_validate(chunk)
