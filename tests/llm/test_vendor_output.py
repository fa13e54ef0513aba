"""Answers with a schema from every vendor's API: used as they are, corrected, after tools."""

import json
from typing import Any

import pytest

from bottega.agents import BaseAgent, ModelParams, tool
from tests.fake_model import calls, text
from tests.llm.test_vendors import DIALECTS, serving

PRICE = {
    "type": "object",
    "properties": {"price": {"type": "integer", "minimum": 1}},
    "required": ["price"],
    "additionalProperties": False,
}


@tool("look", "Looks up a price.")
def look() -> int:
    return 3


@pytest.mark.parametrize("form", ["native", "tool", "prompt"])
@pytest.mark.parametrize("vendor", DIALECTS)
async def test_an_answer_is_corrected_and_parsed(vendor: type[Any], form: Any) -> None:
    good = json.dumps({"price": 3})
    bad = json.dumps({"price": 0})
    answers = [text(bad), text(good)]
    if form == "tool":
        answers = [
            calls(("final_answer", {"price": 0})),
            calls(("final_answer", {"price": 3})),
        ]
    async with serving(vendor, structured_output=form) as (model, provider):
        model.script(calls(("look", {})), *answers)
        agent = BaseAgent(
            "You sell.",
            provider=provider,
            tools=[look],
            params=ModelParams(max_output_tokens=100),
            output_schema=PRICE,
        )
        response = await agent.execute_query_async("What is it?")
        assert not model.refusals
    assert response.error is None
    assert response.output_json == {"price": 3}
    assert json.loads(response.content) == {"price": 3}
    assert response.usage.model_calls == 3
