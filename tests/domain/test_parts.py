"""Parts of messages: their sources, their texts and the estimates of their tokens."""

import pytest

from bottega.agents import HumanMessage, Part, ToolCall, ToolMessage, ToolResult, tool
from bottega.agents.parts import content_tokens, estimated_tokens, parts_tokens
from bottega.errors import InvalidInputError
from bottega.memory.prompts import PromptMessage, tokens_of

PNG = b"\x89PNG\r\n\x1a\n\xff"


def test_a_message_of_parts_has_their_texts_as_content() -> None:
    image = Part("image", data=PNG, media_type="image/png")

    message = HumanMessage.of(Part("text", text="what"), image, Part("text", text="is it?"))

    assert message.content == "what\nis it?"
    assert message.parts[1] is image


def test_a_message_with_bytes_survives_json() -> None:
    message = HumanMessage.of(Part("image", data=PNG, media_type="image/png", name="a.png"))

    again = HumanMessage.model_validate_json(message.model_dump_json())

    assert again.parts == message.parts


def test_the_parts_of_a_tools_result_follow_its_text() -> None:
    image = Part("image", file="f1", media_type="image/png", size_tokens=258)
    result = ToolResult(tool_call_id="1", tool_name="draw", result="here", parts=(image,))

    message = ToolMessage.answering(result)

    assert message.content == "here"
    assert message.parts == (Part("text", text="here"), image)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"type": "image"}, None),
        ({"type": "image", "url": "https://a.example", "file": "f1"}, None),
        ({"type": "image", "text": "a"}, "/text"),
        ({"type": "text", "url": "https://a.example"}, "/url"),
        ({"type": "image", "data": PNG}, "/media_type"),
        ({"type": "video", "file": "f1"}, "/type"),
    ],
)
def test_a_part_has_exactly_one_source(fields: dict[str, object], pointer: str | None) -> None:
    with pytest.raises(InvalidInputError) as refused:
        Part.from_dict(fields)

    assert refused.value.pointer == pointer


def test_a_stored_part_is_itself_again() -> None:
    part = Part("document", file="f1", media_type="application/pdf", size_tokens=4000)

    assert Part.from_dict(part.to_dict()) == part


@pytest.mark.parametrize(
    ("media_type", "size", "about", "tokens"),
    [
        ("image/png", 10, {"pixels": 750_000}, 1000),
        ("image/png", 10, {"pixels": 1}, 85),
        ("image/png", 10, {"pixels": 10**9}, 1600),
        ("image/png", 10, {}, 1600),
        ("application/pdf", 10, {"pages": 3}, 6000),
        ("application/pdf", 120_000, {}, 6000),
        ("audio/wav", 16_000, {}, 32),
        ("text/csv", 400, {}, 100),
    ],
)
def test_tokens_are_estimated_by_kind(
    media_type: str, size: int, about: dict[str, int], tokens: int
) -> None:
    assert content_tokens(media_type, size, **about) == tokens


def test_the_texts_of_parts_count_with_the_content() -> None:
    parts = [Part("text", text="four"), Part("image", url="https://a.example/b.png")]

    assert parts_tokens(parts) == 1600


async def test_a_function_returns_parts() -> None:
    image = Part("image", data=PNG, media_type="image/png")

    @tool("draw", "Draws.")
    def draw(words: bool) -> object:
        return [{"drawn": 1}, image] if words else image

    async def drawn(words: bool) -> ToolResult:
        answer: ToolResult = await draw.execute(
            ToolCall(id="1", name="draw", arguments={"words": words})
        )
        return answer

    assert (await drawn(True)).result == {"drawn": 1}
    assert (await drawn(True)).parts == (image,)
    assert (await drawn(False)).result == ""
    assert (await drawn(False)).parts == (image,)


def test_prompts_count_images_and_a_shortened_result_has_none() -> None:
    image = Part("image", file="f", media_type="image/png", size_tokens=1000)
    result = ToolResult(tool_call_id="1", tool_name="t", result="word " * 400, parts=(image,))
    message = ToolMessage.answering(result)
    shown = PromptMessage(message, message, tokens_of(message, estimated_tokens), "r1")

    saved = shown.shrink(estimated_tokens)

    assert shown.tokens + saved > 1000 + 400
    assert saved > 1300
    assert isinstance(shown.sent, ToolMessage)
    assert shown.sent.parts == shown.sent.tool_results[0].parts == ()
