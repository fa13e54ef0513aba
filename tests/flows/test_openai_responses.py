"""OpenAI's official client talks to agents by responses: chained, streamed, in the background."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.fake_model import FakeModel, calls, gated, gated_within, text
from tests.flows.test_conversations import define, said
from tests.flows.test_openai_api import bottega, client, model
from tests.service import Running
from tests.waiting import until

__all__ = ["bottega", "client", "model"]

LOCATE: Any = {
    "type": "function",
    "name": "locate",
    "description": "Says where a user is.",
    "parameters": {"type": "object", "properties": {"user": {"type": "string"}}},
    "strict": False,
}


SCHEMA: Any = {"type": "json_schema", "name": "s", "schema": {"type": "nothing"}}


class Place(BaseModel):
    city: str


async def test_responses_follow_each_other_and_branch(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(*map(text, ("a", "b", "c", "d")))
    create = client.responses.create
    first = await create(model="clerk", input="one", instructions="Be brief.", temperature=0.5)
    assert (first.output_text, first.status) == ("a", "completed")
    assert first.usage is not None
    assert first.usage.total_tokens > 0
    assert "Be brief." in model.requests[-1]["messages"][0]["content"]
    second = await create(model="clerk", input="two", previous_response_id=first.id)
    third = await create(model="clerk", input="three", previous_response_id=second.id)
    begun = [("user", "one"), ("assistant", "a")]
    assert said(model.requests[-1]) == [
        *begun,
        ("user", "two"),
        ("assistant", "b"),
        ("user", "three"),
    ]
    other = await create(model="clerk", input="else", previous_response_id=first.id)
    assert (third.output_text, other.output_text) == ("c", "d")
    assert said(model.requests[-1]) == [*begun, ("user", "else")]
    found = await client.responses.retrieve(second.id)
    assert (found.output_text, found.model) == ("b", "clerk")
    with pytest.raises(openai.NotFoundError):
        await create(model="clerk", input="?", previous_response_id="resp_none")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(f"resp_{'0' * 32}")


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_executes_functions_of_its_own(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel, streamed: bool
) -> None:
    await define(bottega)
    model.script(calls(("locate", {"user": "ada"})), text("In Rome."), text("As I said."))
    first = await response(client, streamed, input="Where is Ada?")
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "locate",
        {"user": "ada"},
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rome"}
    last = await response(client, streamed, input=[output], previous_response_id=first.id)
    assert (last.output_text, last.status) == ("In Rome.", "completed")
    assert last.id != first.id
    more = await response(client, streamed, input="Sure?", previous_response_id=last.id)
    assert more.output_text == "As I said."
    roles = [each["role"] for each in model.requests[-1]["messages"]][1:]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    runs = (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]
    assert [run["status"] for run in runs] == ["completed"] * 2


async def test_a_whole_history_is_one_run(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(text("In Oslo."))
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where is Ada?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "locate", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "locate", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "Oslo"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rome"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "In Rome."}]},
        {"role": "user", "content": "And Bob?"},
    ]
    made = await client.responses.create(model="clerk", input=history, store=False)
    assert made.output_text == "In Oslo."
    told = said(model.requests[-1])
    assert [role for role, _ in told] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert [text for role, text in told if role == "tool"] == ["Rome", "Oslo"]
    (run,) = (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]
    assert run["session_id"] is None
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="clerk", input="?", previous_response_id=made.id)


async def test_a_stream_has_the_text_once_and_answers_are_parsed(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    go_on = asyncio.Event()
    model.script(
        gated_within(go_on, text("The answer is 42, and that is all."), events=2),
        text('{"city": "Rome"}'),
    )
    pieces, kinds, numbers = [], [], []
    async for event in await client.responses.create(model="clerk", input="?", stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
            go_on.set()
        elif event.type == "response.completed":
            assert event.response.output_text == "The answer is 42, and that is all."
    assert "".join(pieces) == "The answer is 42, and that is all."
    assert numbers == list(range(len(numbers)))
    assert (kinds[:2], kinds[-1]) == (
        ["response.created", "response.in_progress"],
        "response.completed",
    )
    parsed = await client.responses.parse(model="clerk", input="Where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Rome")


async def test_a_response_in_the_background_is_polled_and_cancelled(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    go_on, never = asyncio.Event(), asyncio.Event()
    model.script(gated(go_on, text("done")), gated(never, text("late")))
    made = await client.responses.create(model="clerk", input="?", background=True)
    assert made.status == "queued"
    go_on.set()
    found = await until(
        lambda: client.responses.retrieve(made.id), lambda each: each.status == "completed"
    )
    assert found.output_text == "done"
    other = await client.responses.create(model="clerk", input="?", background=True)
    await client.responses.cancel(other.id)
    await until(
        lambda: client.responses.retrieve(other.id), lambda each: each.status == "cancelled"
    )
    never.set()


async def test_what_a_run_cannot_honour_is_refused(
    client: openai.AsyncOpenAI, bottega: Running
) -> None:
    await define(bottega)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": SCHEMA}}, "text.format"),
        ({"tools": [LOCATE | {"name": "no name"}]}, "tools.0.name"),
        ({"reasoning": {"effort": "x" * 200}}, "reasoning.effort"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
    ]
    for more, param in wrong:
        asked: Any = {"model": "clerk", "input": "?", **more}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**asked)
        assert refused.value.param == param


async def response(client: openai.AsyncOpenAI, streamed: bool, **asked: Any) -> Any:
    """Return a response of the agent ``clerk``, put together if it was streamed."""
    asked |= {"model": "clerk", "tools": [LOCATE]}
    if not streamed:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()
