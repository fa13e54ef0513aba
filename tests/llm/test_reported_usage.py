"""Numbers of tokens that a model server reports: bounded in every dialect."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from bottega.agents.messages import HumanMessage, Usage
from bottega.agents.provider import DialectName, ModelOptions
from bottega.errors import ModelError
from bottega.llm.provider import open_provider
from bottega.llm.server import ServerSpec
from bottega.llm.usage import MOST_TOKENS, Reported
from tests.fake_model import (
    FakeModel,
    Reply,
    chunk,
    free_port,
    gated,
    hang_up,
    http_error,
    http_reply,
    sse,
)
from tests.fake_responses import answer, say
from tests.llm.test_vendor_answers import anthropic, gemini, spoken
from tests.llm.test_vendors import serving
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini
from tests.llm.vendors.openai import OpenAI
from tests.llm.vendors.responses import Responses

TEXT = "a" * 40
"""Ten tokens by our estimate."""


def of_chat(**usage: Any) -> Reply:
    told = {
        "prompt_tokens": usage["input"],
        "completion_tokens": usage["output"],
        "prompt_tokens_details": {"cached_tokens": usage.get("cached")},
        "completion_tokens_details": {"reasoning_tokens": usage.get("reasoning")},
    }
    return sse(chunk(TEXT, finish_reason="stop"), {"choices": [], "usage": told})


def of_responses(**usage: Any) -> Reply:
    told = {
        "input_tokens": usage["input"],
        "output_tokens": usage["output"],
        "input_tokens_details": {"cached_tokens": usage.get("cached")},
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning")},
    }
    return answer(say(TEXT), usage=told)


def of_anthropic(**usage: Any) -> Reply:
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": usage["input"]}}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": TEXT},
        },
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {
                "output_tokens": usage["output"],
                "cache_read_input_tokens": usage.get("cached"),
                "output_tokens_details": {"thinking_tokens": usage.get("reasoning")},
            },
        },
        {"type": "message_stop"},
    ]
    return sse(*events, done=False)


def of_gemini(**usage: Any) -> Reply:
    told = {
        "promptTokenCount": usage["input"],
        "candidatesTokenCount": usage["output"],
        "cachedContentTokenCount": usage.get("cached"),
        "thoughtsTokenCount": usage.get("reasoning"),
    }
    return gemini({"text": TEXT}, reason="STOP", usageMetadata=told)


FORMS: dict[DialectName, Callable[..., Reply]] = {
    "chat": of_chat,
    "responses": of_responses,
    "anthropic": of_anthropic,
    "gemini": of_gemini,
}
ODD: list[Any] = [
    None,
    -1,
    -(10**30),
    MOST_TOKENS + 1,
    10**30,
    2**63,
    1.5,
    7.0,
    float("nan"),
    float("inf"),
    True,
    "12",
    [],
    {"tokens": 12},
]


STUBS: dict[DialectName, type[Any]] = {
    "chat": OpenAI,
    "responses": Responses,
    "anthropic": Anthropic,
    "gemini": Gemini,
}


async def usage_of(dialect: DialectName, reply: Reply) -> Usage:
    async with serving(STUBS[dialect]) as (model, provider):
        model.script(reply)
        found: Usage = (await provider.invoke([HumanMessage(content="x" * 1000)])).usage
        return found


@pytest.mark.parametrize("dialect", FORMS)
@pytest.mark.parametrize(("read", "made"), [(0, 0), (7, 3), (MOST_TOKENS, MOST_TOKENS)])
async def test_numbers_within_bounds_are_taken_as_they_are(
    dialect: DialectName, read: int, made: int
) -> None:
    found = await usage_of(dialect, FORMS[dialect](input=read, output=made))
    assert found == Usage(read, made)


@pytest.mark.parametrize("dialect", FORMS)
@pytest.mark.parametrize("odd", ODD, ids=str)
async def test_other_numbers_are_replaced_by_estimates(dialect: DialectName, odd: Any) -> None:
    found = await usage_of(dialect, FORMS[dialect](input=odd, output=3))
    assert found.estimated
    assert 250 < found.input < 1000
    assert found.output == 3
    found = await usage_of(dialect, FORMS[dialect](input=7, output=odd))
    assert (found.input, found.output, found.estimated) == (7, 10, True)


@pytest.mark.parametrize("dialect", FORMS)
@pytest.mark.parametrize("odd", ODD, ids=str)
async def test_parts_are_bounded_by_what_they_are_parts_of(dialect: DialectName, odd: Any) -> None:
    found = await usage_of(dialect, FORMS[dialect](input=100, output=50, cached=odd, reasoning=odd))
    assert found.estimated is (odd is not None)
    assert 0 <= found.cached <= found.input <= MOST_TOKENS
    assert 0 <= found.reasoning <= found.output <= MOST_TOKENS


@pytest.mark.parametrize("dialect", ["chat", "responses", "gemini"])
async def test_too_large_parts_do_not_lower_the_price(dialect: DialectName) -> None:
    found = await usage_of(dialect, FORMS[dialect](input=5, output=3, cached=6, reasoning=4))
    assert (found.input, found.cached, found.estimated) == (5, 0, True)
    assert found.reasoning <= found.output


@pytest.mark.parametrize("dialect", FORMS)
@pytest.mark.parametrize("odd", ODD, ids=str)
async def test_an_estimated_input_has_no_cached_part(dialect: DialectName, odd: Any) -> None:
    found = await usage_of(dialect, FORMS[dialect](input=odd, output=3, cached=58))
    assert (found.cached, found.written, found.estimated) == (0, 0, True)


def test_parts_that_are_together_larger_than_the_input_count_as_nothing() -> None:
    whole = Reported(10, 3, cached=6, written=4).usage(lambda: 0, 0, 0)
    assert (whole.cached, whole.written, whole.estimated) == (6, 4, False)
    odd = Reported(10, 3, cached=6, written=5).usage(lambda: 0, 0, 0)
    assert (odd.input, odd.cached, odd.written, odd.estimated) == (10, 0, 0, True)


@pytest.mark.parametrize("report", ["many", 12, [1], True])
@pytest.mark.parametrize("dialect", FORMS)
async def test_a_report_that_is_no_object_is_replaced(dialect: DialectName, report: Any) -> None:
    replies = {
        "chat": lambda: sse(chunk(TEXT, finish_reason="stop"), {"choices": [], "usage": report}),
        "responses": lambda: answer(say(TEXT), usage=report),
        "anthropic": lambda: http_reply(
            json.dumps(
                {
                    "type": "message",
                    "content": [{"type": "text", "text": TEXT}],
                    "stop_reason": "end_turn",
                    "usage": report,
                }
            ).encode(),
            media_type="application/json",
        ),
        "gemini": lambda: gemini({"text": TEXT}, reason="STOP", usageMetadata=report),
    }
    found = await usage_of(dialect, replies[dialect]())
    assert (found.output, found.estimated) == (10, True)
    assert found.input > 250


async def test_an_answer_that_breaks_off_counts_by_estimates_too() -> None:
    async with FakeModel() as model:
        model.script(sse({**chunk(TEXT), "usage": {"prompt_tokens": 10**30}}, done=False))
        (usage,) = await lost_by(model.base_url)
    assert (250 < usage.input < 1000, usage.output, usage.estimated) == (True, 10, True)


@pytest.mark.parametrize(
    ("reply", "output"),
    [
        (sse(chunk(TEXT), done=False), 10),
        (sse({"error": {"message": "overloaded"}}), 0),
        (http_reply(b"<html>hello</html>", media_type="text/html"), 0),
        (hang_up(), 0),
        (gated(asyncio.Event(), sse()), 0),
    ],
    ids=["cut", "error", "unreadable", "hung up", "timeout"],
)
async def test_a_request_without_a_whole_answer_counts_by_estimates(
    reply: Reply, output: int
) -> None:
    async with FakeModel() as model:
        model.script(reply)
        (usage,) = await lost_by(model.base_url)
    assert (250 < usage.input < 1000, usage.output, usage.estimated) == (True, output, True)


async def test_a_request_that_was_refused_or_not_sent_costs_nothing() -> None:
    async with FakeModel() as model:
        model.script(http_error(500))
        assert await lost_by(model.base_url) == []
    assert await lost_by(f"http://127.0.0.1:{free_port()}/v1") == []


async def lost_by(base_url: str) -> list[Usage]:
    """Return what a call took that fails."""
    lost: list[Usage] = []
    provider = open_provider(ServerSpec(base_url=base_url, patience_s=0.0, timeout_s=0.5), "m")
    with pytest.raises(ModelError):
        await provider.invoke(
            [HumanMessage(content="x" * 1000)], options=ModelOptions(on_lost=lost.append)
        )
    await provider.aclose()
    return lost


async def test_the_whole_answer_of_anthropic_counts_its_cache() -> None:
    reply = anthropic(
        spoken("hi"), reason="end_turn", input_tokens=5, cache_creation_input_tokens=2
    )
    found = await usage_of("anthropic", reply)
    assert (found.input, found.written, found.estimated) == (7, 2, False)
