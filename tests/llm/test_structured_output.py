"""Analysis of tasks and episodes by a model, with structured answers."""

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from bottega.errors import ModelError
from bottega.llm.structured_output import ModelAnalyst
from bottega.llm.vendors import OpenAIProvider
from tests.fake_model import FakeModel, calls, gated, http_error, text

RUN = UUID(int=1), UUID(int=2)


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
async def analyst(model: FakeModel) -> AsyncIterator[ModelAnalyst]:
    provider = OpenAIProvider("any", api_key="test-key", base_url=model.base_url, patience_s=0)
    yield ModelAnalyst(lambda run, name: provider, "thinker")
    await provider.aclose()


async def test_task_is_analysed(model: FakeModel, analyst: ModelAnalyst) -> None:
    said = {"goals": [" add "], "complexity": 0.5, "more": 1}
    model.script(calls(("answer", said)))
    assert await analyst.analyse(RUN, "Add 1 and 2") == {
        "goals": ["add"],
        "constraints": [],
        "criteria": [],
        "complexity": 0.5,
    }
    (asked,) = model.requests
    assert (asked["model"], asked["messages"][-1]["content"]) == ("thinker", "Add 1 and 2")
    assert asked["tools"][0]["function"]["parameters"]["required"] == ["complexity"]


async def test_answer_in_text_is_accepted_too(model: FakeModel, analyst: ModelAnalyst) -> None:
    model.script(text('```json\n{"insights": ["slow is better"]}\n```'))
    assert await analyst.reflect(RUN, {"outcome": "SUCCESS"}) == ["slow is better"]


@pytest.mark.parametrize(
    "reply",
    [
        text("I would rather not."),
        calls(("answer", {"insights": "one"})),
        calls(("answer", {"insights": ["x" * 5000]})),
        calls(("answer", {"insights": ["x"] * 51})),
        calls(("other", {"insights": []})),
    ],
)
async def test_answer_of_the_wrong_form_is_ignored(
    model: FakeModel, analyst: ModelAnalyst, reply: object
) -> None:
    model.script(reply)  # type: ignore[arg-type]
    with pytest.raises(ModelError) as caught:
        await analyst.reflect(RUN, {})
    assert caught.value.code == "model_bad_response"
    assert "x" * 100 not in caught.value.detail


async def test_model_that_is_down_is_reported(model: FakeModel, analyst: ModelAnalyst) -> None:
    model.script(http_error(503))
    with pytest.raises(ModelError) as caught:
        await analyst.reflect(RUN, {})
    assert caught.value.code == "model_unavailable"


async def test_analysis_has_a_time_limit(model: FakeModel) -> None:
    goes_on = asyncio.Event()
    model.script(gated(goes_on, text("{}")))
    provider = OpenAIProvider("any", api_key="test-key", base_url=model.base_url)
    with pytest.raises(ModelError) as caught:
        await ModelAnalyst(lambda run, name: provider, "thinker", timeout_s=0.1).reflect(RUN, {})
    assert (caught.value.code, caught.value.retryable) == ("model_timeout", True)
    goes_on.set()
    await provider.aclose()
