"""Images and schemas at the demo model."""

import json
import struct
from typing import Any

import jsonschema
import pytest

from bottega.agents.messages import HumanMessage, StandardMessage, SystemMessage
from bottega.agents.parts import Part
from bottega.agents.provider import ModelOptions
from bottega.llm.demo_model.decide import decide
from tests.llm.test_vendors import DIALECTS, serving
from tests.llm.vendors.openai import OpenAI

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "minLength": 3},
        "kind": {"enum": ["photo", "drawing"]},
        "colours": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "minItems": 1},
        "score": {"type": "number", "minimum": 1},
        "day": {"type": "string", "format": "date"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["subject", "colours"],
    "$defs": {"colour": {"type": "object", "properties": {"name": {"type": "string"}}}},
}


async def test_an_image_is_described() -> None:
    async with serving(OpenAI) as (_, provider):
        shown = HumanMessage.of(
            Part("text", text="What is this?"),
            Part("image", data=PNG, media_type="image/png"),
            Part("image", url="https://example.org/a.png"),
        )
        answer = await provider.invoke([shown])
        assert answer.content.startswith(
            "I see an image of 640 x 480 pixels (image/png) and the image at "
            "https://example.org/a.png."
        )
        later = await provider.invoke([shown, answer, HumanMessage(content="And now?")])
        assert "640" not in later.content


@pytest.mark.parametrize("way", ["native", "tool", "prompt"])
@pytest.mark.parametrize("vendor", DIALECTS)
async def test_a_schema_is_filled(vendor: type[Any], way: Any) -> None:
    """Fill a schema in each form in which it may come; stubs pass it on as an instruction."""
    async with serving(vendor, structured_output=way) as (model, provider):
        options = ModelOptions(output_schema=SCHEMA)
        messages: list[StandardMessage] = [SystemMessage(content="Be.")]
        messages.append(HumanMessage(content="Describe it."))
        answer = await provider.invoke(messages, options=options)
        jsonschema.validate(json.loads(answer.content), SCHEMA)
        assert not answer.tool_calls
        assert not model.refusals


@pytest.mark.parametrize("url", ["data:image/png;base64,%%%", "data:image/png;base64,AAAA"])
def test_an_image_that_is_none_is_survived(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = decide({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert answer.text.startswith("I see an image")


def test_a_schema_with_a_circle_ends() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": node}}
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert json.loads(decide(request | {"response_format": form}).text)
