"""Rules of the vendors' APIs where two things meet: servers, models, limits, parts, fields."""

from typing import Any

import pytest

from bottega.agents import BaseAgent
from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
)
from bottega.agents.params import ModelParams
from bottega.agents.parts import FileContent, Part
from bottega.agents.provider import ModelOptions
from bottega.errors import InvalidInputError
from bottega.llm.provider import open_provider
from bottega.llm.server import ServerSpec, reserved_in
from tests.fake_model import FakeModel, calls, chunk, sse, text
from tests.llm.conftest import KEY
from tests.llm.test_vendors import ADD, DIALECTS, PIXEL, dialect_of, sent, serving
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini
from tests.llm.vendors.openai import OpenAI


def after_a_call(answer: AssistantMessage) -> list[StandardMessage]:
    (call,) = answer.tool_calls
    result = ToolResult(tool_call_id=call.id, tool_name=call.name, result=3)
    return [HumanMessage(content="Add."), answer, ToolMessage.answering(result)]


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_state_goes_to_no_other_server_or_model_and_its_loss_is_said_once(
    vendor: type[Any],
) -> None:
    warned: list[tuple[str, str]] = []

    async def ask(name: str, model: str, messages: list[StandardMessage]) -> AssistantMessage:
        spec = ServerSpec(
            name=name,
            dialect=dialect_of(vendor),
            base_url=server.base_url,
            api_key=KEY,
            patience_s=0,
        )
        provider = open_provider(spec, model)
        options = ModelOptions(on_warning=lambda code, said: warned.append((code, said)))
        try:
            answer = await provider.invoke(messages, [ADD], options=options)
        finally:
            await provider.aclose()
        return answer.model_copy(update={"metadata": {**answer.metadata, "provider": name}})

    async with vendor() as server:
        add = calls(("add", {"a": 1, "b": 2}))
        reasoned = chunk(tool_calls=wire_calls(), finish_reason="tool_calls", reasoning="deep")
        server.script(sse(reasoned) if vendor is OpenAI else add)
        first = await ask("one", "m", [HumanMessage(content="Add.")])
        assert first.state
        history = after_a_call(first)
        server.script(text("3"), text("4"), text("3"), text("4"))
        history.append(await ask("one", "m", history))
        assert warned == []
        history.append(HumanMessage(content="And?"))
        for name, model in (("two", "m"), ("one", "n")):
            warned.clear()
            answer = await ask(name, model, history)
            await ask(name, model, [*history, answer, HumanMessage(content="So?")])
            if vendor is OpenAI and name == "one":  # the state is any model's of the server
                assert warned == []
                continue
            ((code, said),) = warned
            assert code == "model_state_dropped"
            assert f"'{name}/{model}'" in said
            assert "'one/m'" in said
            assert "deep" not in str(sent(server))


def wire_calls() -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    return [{"index": 0, "id": "c00000001", "function": function}]


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_texts_and_links_of_tools_are_sent(vendor: type[Any]) -> None:
    call = ToolCall(id="call_00001", name="look")
    parts = [
        Part("file", data=b"a,b", media_type="text/csv", name="t.csv"),
        Part("image", url="https://example.org/a.png"),
        Part("image", data=PIXEL, media_type="image/png"),
    ]
    result = ToolResult(
        tool_call_id="call_00001", tool_name="look", result="Seen.", parts=tuple(parts)
    )
    history: list[StandardMessage] = [
        HumanMessage(content="Look."),
        AssistantMessage(tool_calls=(call,)),
        ToolMessage.answering(result),
    ]
    async with serving(vendor) as (model, provider):
        await provider.invoke(history, [ADD])
        assert not model.refusals
        wire = str(sent(model))
        assert "a,b" in wire
        assert "https://example.org/a.png" in wire


SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "native"),
    [
        ({"type": "object", "properties": {"x": {"allOf": [SMALL, OTHER]}}}, False),
        ({"type": "object", "properties": {"x": {**SMALL, "allOf": [OTHER]}}}, False),
        ({"type": "object", "properties": {"x": {"allOf": [SMALL]}}}, True),
    ],
)
async def test_objects_that_several_schemas_describe_are_not_closed(
    schema: dict[str, Any], native: bool
) -> None:
    async with serving(Anthropic) as (model, provider):
        options = ModelOptions(output_schema=schema)
        await provider.invoke([HumanMessage(content="hi")], options=options)
        assert not model.refusals
        assert ("output_config" in sent(model)) is native


@pytest.mark.parametrize(
    ("most", "thinking"),
    [
        (4096, {"type": "enabled", "budget_tokens": 2048}),
        (2048, {"type": "enabled", "budget_tokens": 1024}),
        (1100, {"type": "enabled", "budget_tokens": 1024}),
        (1024, {"type": "disabled"}),
        (50, {"type": "disabled"}),
    ],
)
async def test_thinking_fits_the_limit_of_output(most: int, thinking: dict[str, Any]) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    async with serving(Anthropic) as (model, provider):
        params = ModelParams(extra_body=asked)
        options = ModelOptions(params=params, max_output_tokens=most)
        await provider.invoke([HumanMessage(content="hi")], options=options)
        assert not model.refusals
        assert sent(model)["thinking"] == thinking


async def test_thinking_of_the_server_can_be_turned_off() -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    async with serving(Anthropic, extra_body=asked) as (model, provider):
        options = ModelOptions(params=ModelParams(reasoning_effort="none"))
        await provider.invoke([HumanMessage(content="hi")], options=options)
        assert not model.refusals
        assert sent(model)["thinking"] == {"type": "disabled"}


async def test_fields_are_merged_at_every_depth() -> None:
    own = {"generationConfig": {"thinkingConfig": {"thinkingBudget": 512}}}
    extra = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    async with serving(Gemini, extra_body=own) as (model, provider):
        params = ModelParams(reasoning_effort="low", extra_body=extra)
        await provider.invoke([HumanMessage(content="hi")], options=ModelOptions(params=params))
        assert not model.refusals
        config = sent(model)["generationConfig"]["thinkingConfig"]
        assert config == {"thinkingLevel": "LOW", "includeThoughts": True}


def test_both_spellings_of_a_reserved_field_are_reserved() -> None:
    given = {"system_instruction": "", "cached_content": "", "labels": {}}
    assert reserved_in("gemini", given) == [
        "cached_content",
        "system_instruction",
    ]
    assert reserved_in("chat", {"n": 2, "user": "u"}) == ["n"]


@pytest.mark.parametrize(
    ("dialect", "extra", "field"),
    [
        ("chat", {"max_tokens": 9}, "max_tokens"),
        ("chat", {"max_completion_tokens": 9}, "max_completion_tokens"),
        ("responses", {"max_output_tokens": 9}, "max_output_tokens"),
        ("anthropic", {"max_tokens": 9}, "max_tokens"),
        (
            "gemini",
            {"generationConfig": {"maxOutputTokens": 9, "topK": 3}},
            "generationConfig.maxOutputTokens",
        ),
        (
            "gemini",
            {"generation_config": {"max_output_tokens": 9}},
            "generation_config.max_output_tokens",
        ),
    ],
)
def test_a_request_cannot_replace_the_limit_of_a_budget(
    dialect: Any, extra: dict[str, Any], field: str
) -> None:
    assert reserved_in(dialect, extra) == [field]


@pytest.mark.parametrize("form", ["native", "tool", "prompt"])
async def test_a_cut_off_answer_with_a_schema_says_that_it_is_cut_off(form: Any) -> None:
    half = '{"x": '
    call = {"index": 0, "id": "c1", "function": {"name": "final_answer", "arguments": half}}
    said = chunk(tool_calls=[call], finish_reason="length")
    if form != "tool":
        said = chunk(half, finish_reason="length")
    async with FakeModel() as model:
        spec = ServerSpec(base_url=model.base_url, patience_s=0, structured_output=form)
        provider = open_provider(spec, "m")
        model.script(sse(said))
        agent = BaseAgent("You are one.", provider=provider, output_schema=SMALL)
        answer = await agent.execute_query_async("Go.")
        await provider.aclose()
        assert answer.error_code == "model_length"
        assert answer.content == half
        assert len(model.requests) == 1


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_files_beyond_the_limit_of_a_vendor_are_not_sent(vendor: type[Any]) -> None:
    size = 24_000_000 if vendor is Anthropic else 33_000_000

    async def load(name: str) -> FileContent:
        return FileContent(bytes(size), "application/pdf", "a.pdf")

    async with serving(vendor) as (model, provider):
        shown = HumanMessage.of(Part("document", file="file_1"))
        with pytest.raises(InvalidInputError) as caught:
            await provider.invoke([shown], options=ModelOptions(files=load))
        assert caught.value.code == "files_too_large"
        assert dialect_of(vendor) in caught.value.detail
        assert not model.requests
