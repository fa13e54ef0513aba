"""Teams on every vendor's API: turns, tools, sub-agents and state, without a database."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from bottega.agents import AgentFactory, BaseAgent, SharedMemoryGraph
from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
)
from bottega.agents.params import ModelParams
from bottega.agents.parts import FileContent, Part
from bottega.agents.provider import DialectName, ModelOptions, ToolSchema
from bottega.agents.tools import tool
from bottega.errors import InvalidInputError
from bottega.llm.provider import ModelProvider, open_provider
from bottega.llm.server import SUPPORTED, ServerSpec
from bottega.runs.pins import takes
from tests.fake_model import FakeModel, calls, text
from tests.llm.conftest import KEY
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini
from tests.llm.vendors.openai import LlamaCpp, Mistral, Ollama, OpenAI, Qwen
from tests.llm.vendors.responses import Responses
from tests.llm.vendors.stateful import DeepSeek, OpenRouter

VENDORS: list[type[Any]] = [
    OpenAI, Responses, Anthropic, Gemini, DeepSeek, Mistral, OpenRouter, Qwen, LlamaCpp, Ollama,
]  # fmt: skip
DIALECTS: list[type[Any]] = [OpenAI, Responses, Anthropic, Gemini]

ADD = ToolSchema(
    "add",
    "Adds.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "exclusiveMinimum": 0}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
BARE = ToolSchema("now", "Tells the time.", {"type": "object", "properties": {}})
POINT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^a"}, "minItems": 2},
    },
    "required": ["x"],
}


def dialect_of(vendor: type[Any]) -> DialectName:
    dialect: DialectName = getattr(vendor, "dialect", "chat")
    return dialect


@asynccontextmanager
async def serving(vendor: type[Any], **spec: Any) -> AsyncIterator[tuple[Any, ModelProvider]]:
    async with vendor() as model:
        if vendor is Mistral:
            spec.setdefault("max_tokens_field", "max_tokens")
        provider = open_provider(
            ServerSpec(
                dialect=dialect_of(vendor),
                base_url=model.base_url,
                api_key=KEY,
                patience_s=0,
                **spec,
            ),
            "some-model",
        )
        try:
            yield model, provider
        finally:
            await provider.aclose()


def sent(model: FakeModel) -> dict[str, Any]:
    """Return the last request, in the vendor's form."""
    bodies: list[dict[str, Any]] = getattr(model, "bodies", model.requests)
    return bodies[-1]


@pytest.mark.parametrize("vendor", VENDORS)
async def test_a_team_asks_twice(vendor: type[Any]) -> None:
    """Check that each answer of a strict server goes back in the form that it wants."""
    async with serving(vendor) as (model, provider):
        graph = SharedMemoryGraph()
        graph.add_edge("requirements", "designer")
        factory = AgentFactory().with_memory_graph(graph)
        for name in ("requirements", "designer"):
            defaults: dict[str, Any] = {"system_message": f"You are {name}.", "provider": provider}
            defaults["description"] = f"Does {name}."
            factory.register(name, BaseAgent, stateless=True, defaults=defaults)
        factory.register("coordinator", BaseAgent)
        coordinator = factory.create(
            "coordinator",
            subagents=["requirements", "designer"],
            system_message="You coordinate.",
            provider=provider,
        )
        for asked in ("Build a todo app.", "Now with colours."):
            answer = await coordinator.execute_query_async(asked)
            assert answer.error is None, (answer.error, model.refusals)
            assert answer.content
            assert answer.usage.input
            assert answer.usage.output
        assert not model.refusals
        assert [item.source_id for item in graph.pull_for("designer")] == ["requirements"]


@tool("double", "Doubles.")
def double(a: int) -> int:
    return a * 2


@tool("broken", "Fails.")
def broken(a: int) -> int:
    raise ValueError("no")


@tool("nothing", "Returns nothing.")
def nothing() -> str:
    return " "


@pytest.mark.parametrize("vendor", VENDORS)
async def test_parallel_calls_and_failed_tools_go_back(vendor: type[Any]) -> None:
    async with serving(vendor) as (model, provider):
        model.script(
            calls(("double", {"a": 2}), ("broken", {"a": 1}), content="Let me see."),
            calls(("nothing", {})),
            text("Done."),
            text("Again."),
        )
        agent = BaseAgent("You are one.", provider=provider, tools=[double, broken, nothing])
        answer = await agent.execute_query_async("Try.")
        assert answer.content == "Done.", (answer.error, model.refusals)
        assert (await agent.execute_query_async("And now?")).content == "Again."
        assert not model.refusals
        results = [m["content"] for m in model.requests[1]["messages"] if m["role"] == "tool"]
        assert results[0] == "4"
        assert "no" in results[1]


@pytest.mark.parametrize("vendor", [v for v in VENDORS if v not in (DeepSeek, OpenRouter)])
async def test_context_after_results_and_foreign_answers_are_taken(vendor: type[Any]) -> None:
    """Send a history of another vendor's answers: unknown ids, calls without a signature.

    The stubs of DeepSeek and OpenRouter refuse every call without its reasoning.
    """
    call = ToolCall(id="call_0123456789", name="add", arguments={"a": 1, "b": 2})
    odd = ToolCall(id="x/y z", name="what is this?", malformed="{oops")
    results = [
        ToolResult(tool_call_id="call_0123456789", tool_name="add", result=3),
        ToolResult(
            tool_call_id="x/y z", tool_name="what is this?", status=ToolStatus.ERROR, error="no"
        ),
    ]
    state = {"origin": "elsewhere", "message": {"order": [], "output": []}, "calls": {}}
    history: list[StandardMessage] = [
        SystemMessage(content="You are one."),
        SystemMessage(content="Known: 42.", metadata={"working_memory": True}),
        HumanMessage(content="Add."),
        AssistantMessage(content="Well.", tool_calls=(call, odd), state=state),
        ToolMessage(content="3", tool_results=(results[0],)),
        ToolMessage(content="Error: no", tool_results=(results[1],)),
        HumanMessage(content="And?"),
        HumanMessage(content="Well?"),
    ]
    async with serving(vendor) as (model, provider):
        answer = await provider.invoke(history, [ADD, BARE])
        assert answer.content or answer.tool_calls
        assert answer.metadata["model"] == "some-model"
        assert not model.refusals


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_all_parameters_of_a_dialect_are_sent(vendor: type[Any]) -> None:
    every = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 500,
        "reasoning_effort": "low",
        "verbosity": "low",
        "seed": 7,
        "stop": ["END"],
        "parallel_tool_calls": False,
        "tool_choice": {"name": "add"},
        "service_tier": "auto",
    }
    dialect = dialect_of(vendor)
    params = ModelParams.from_dict({k: v for k, v in every.items() if k in SUPPORTED[dialect]})
    async with serving(vendor) as (model, provider):
        options = ModelOptions(params=params, max_output_tokens=600)
        await provider.invoke([HumanMessage(content="hi")], [ADD], options=options)
        assert not model.refusals
        body = sent(model)
        assert {name: body.get(name) for name in WRITTEN[dialect]} == WRITTEN[dialect]
        # A budget's limit counts if it is lower; without tools there is no choice of one.
        options = ModelOptions(params=params, max_output_tokens=50)
        await provider.invoke([HumanMessage(content="hi")], options=options)
        assert not model.refusals
        assert "50" in str(sent(model).get(MOST[dialect]) or sent(model)["generationConfig"])
        assert not {"tool_choice", "toolConfig", "tools"} & sent(model).keys()


MOST = {
    "chat": "max_completion_tokens",
    "responses": "max_output_tokens",
    "anthropic": "max_tokens",
    "gemini": "",
}
WRITTEN: dict[str, dict[str, Any]] = {
    "chat": {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 500,
        "reasoning_effort": "low",
        "verbosity": "low",
        "seed": 7,
        "stop": ["END"],
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "service_tier": "auto",
    },
    "responses": {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 500,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "add"},
        "service_tier": "auto",
    },
    "anthropic": {
        "max_tokens": 500,
        "output_config": {"effort": "low"},
        "stop_sequences": ["END"],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "service_tier": "auto",
    },
    "gemini": {
        "generationConfig": {
            "temperature": 0.5,
            "topP": 0.9,
            "maxOutputTokens": 500,
            "seed": 7,
            "stopSequences": ["END"],
            "thinkingConfig": {"thinkingLevel": "LOW"},
        },
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
        "serviceTier": "auto",
    },
}


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_extra_fields_of_a_call_join_those_of_the_server(vendor: type[Any]) -> None:
    extras: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "chat": ({"user": "a"}, {"top_logprobs": 2}),
        "responses": ({"user": "a"}, {"truncation": "auto"}),
        "anthropic": ({"metadata": {"user_id": "a"}}, {"thinking": {"type": "adaptive"}}),
        "gemini": ({"generationConfig": {"topK": 4}}, {"generationConfig": {"logprobs": 2}}),
    }
    own, more = extras[dialect_of(vendor)]
    async with serving(vendor, extra_body=own) as (model, provider):
        params = ModelParams(extra_body=more)
        await provider.invoke([HumanMessage(content="hi")], options=ModelOptions(params=params))
        body = sent(model)
        assert not model.refusals
        for fields in (own, more):
            for name, value in fields.items():
                if isinstance(value, dict):
                    assert body[name] | value == body[name]
                else:
                    assert body[name] == value
        taken = ModelParams(extra_body={"model": "x"})
        with pytest.raises(InvalidInputError):
            await provider.invoke([HumanMessage(content="hi")], options=ModelOptions(params=taken))


@pytest.mark.parametrize("way", ["native", "tool", "prompt"])
@pytest.mark.parametrize("vendor", VENDORS)
async def test_an_answer_that_fits_a_schema_is_text(vendor: type[Any], way: Any) -> None:
    async with serving(vendor, structured_output=way) as (model, provider):
        said = {"x": 1, "tags": ["a", "b"]}
        replies = {
            "native": text(json.dumps(said)),
            "tool": calls(("final_answer", said), content="Here:"),
            "prompt": text(f"Sure:\n```json\n{json.dumps(said)}\n```"),
        }
        model.script(replies[way], text("{}"))
        options = ModelOptions(output_schema=POINT)
        messages: list[StandardMessage] = [SystemMessage(content="Be."), HumanMessage(content="hi")]
        answer = await provider.invoke(messages, [ADD], options=options)
        assert json.loads(answer.content) == said
        assert not answer.tool_calls
        assert answer.metadata["finish_reason"] in ("stop", "tool_calls")
        assert not model.refusals
        again = [*messages, answer, HumanMessage(content="Once more.")]
        await provider.invoke(again, [ADD], options=options)
        assert not model.refusals


async def test_a_schema_that_no_server_takes_is_an_instruction() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    async with serving(Anthropic) as (model, provider):
        model.script(text('{"a": 1}'))
        options = ModelOptions(output_schema=schema)
        answer = await provider.invoke([HumanMessage(content="hi")], options=options)
        assert answer.content == '{"a": 1}'
        assert "output_config" not in sent(model)
        assert "additionalProperties" in sent(model)["system"][0]["text"]


PIXEL = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_images_files_and_texts_are_sent(vendor: type[Any]) -> None:
    async def load(name: str) -> FileContent:
        loaded.append(name)
        return FileContent(b"%PDF-1.7", "application/pdf", "a.pdf")

    loaded: list[str] = []
    parts = (
        Part("text", text="Look:"),
        Part("image", data=PIXEL, media_type="image/png"),
        Part("image", url="https://example.org/a.png"),
        Part("document", file="file_1"),
        Part("file", data=b"a,b", media_type="text/csv", name="t.csv"),
    )
    shown = HumanMessage.of(*parts)
    kinds = [None, None, None, "application/pdf", None]
    assert all(map(partial(takes, dialect_of(vendor)), parts, kinds))
    async with serving(vendor) as (model, provider):
        call = ToolCall(id="call_00001", name="look")
        result = ToolResult(
            tool_call_id="call_00001",
            tool_name="look",
            result="Seen.",
            parts=(Part("image", data=PIXEL, media_type="image/png"),),
        )
        history: list[StandardMessage] = [
            shown,
            AssistantMessage(tool_calls=(call,)),
            ToolMessage.answering(result),
        ]
        options = ModelOptions(files=load)
        await provider.invoke(history, [ADD], options=options)
        await provider.invoke(history, [ADD], options=options)
        assert not model.refusals
        assert loaded == ["file_1"]
        wire = json.dumps(sent(model))
        encoded = b64encode(PIXEL).decode()
        assert wire.count(encoded) == 2
        assert "https://example.org/a.png" in wire
        assert b64encode(b"%PDF-1.7").decode() in wire
        assert "a,b" in wire


@pytest.mark.parametrize(
    ("vendor", "part"),
    [
        (OpenAI, Part("document", url="https://example.org/a.pdf")),
        (OpenAI, Part("audio", data=b"x", media_type="audio/ogg")),
        (Responses, Part("audio", data=b"x", media_type="audio/wav")),
        (Anthropic, Part("audio", data=b"x", media_type="audio/wav")),
        (Anthropic, Part("image", data=b"x", media_type="image/tiff")),
    ],
)
async def test_a_part_that_a_dialect_lacks_is_an_error(vendor: type[Any], part: Part) -> None:
    async with serving(vendor) as (model, provider):
        with pytest.raises(InvalidInputError) as caught:
            await provider.invoke([HumanMessage.of(part)])
        assert caught.value.code == "unsupported_part"
        assert not takes(dialect_of(vendor), part)
        assert dialect_of(vendor) in caught.value.detail
        assert not model.requests


@pytest.mark.parametrize("vendor", DIALECTS)
async def test_usage_counts_cached_and_reasoning_tokens(vendor: type[Any]) -> None:
    async with serving(vendor) as (_, provider):
        usage = (await provider.invoke([HumanMessage(content="hi")])).usage
    if vendor is not OpenAI:
        found = (usage.input, usage.output, usage.cached, usage.reasoning, usage.estimated)
        assert found == (22, 23 if vendor is Gemini else 20, 7, 3, False)
