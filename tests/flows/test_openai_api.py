"""OpenAI's official client talks to agents: whole, streamed, with tools of its own, and refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.fake_model import FakeModel, calls, gated, gated_within, http_error, text
from tests.flows.test_conversations import define
from tests.service import Running
from tests.waiting import until

LOCATE: Any = {
    "type": "function",
    "function": {
        "name": "locate",
        "description": "Says where a user is.",
        "parameters": {"type": "object", "properties": {"user": {"type": "string"}}},
    },
}
ASKED: Any = [{"role": "user", "content": "Where is Ada?"}]


class City(BaseModel):
    city: str


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


@pytest.fixture
async def client(bottega: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    key = bottega.headers["Authorization"].removeprefix("Bearer ")
    url = f"http://127.0.0.1:{bottega.port}/openai/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client


async def test_a_completion_is_a_run(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(text("In Rome."))
    history: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Where is Ada?"}]},
    ]
    made = await client.chat.completions.create(
        model="clerk", messages=history, temperature=0.5, max_tokens=50, user="ada", stop="END"
    )
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("In Rome.", "stop")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens > 0
    sent = model.requests[-1]
    told = [(each["role"], each["content"]) for each in sent["messages"]]
    assert told == [
        ("system", "You help.\n\nBe brief."),
        ("user", "Hello."),
        ("assistant", "Hello!"),
        ("user", "Where is Ada?"),
    ]
    assert (sent["temperature"], sent["stop"]) == (0.5, ["END"])
    (run,) = (await bottega.client.get("/v1/runs?agent=clerk&user=ada")).json()["items"]
    assert made.id == f"chatcmpl-{run['id'].replace('-', '')}"


async def test_a_stream_has_the_text_once_and_its_usage(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega, tools=[{"type": "builtin", "name": "calculator"}])
    go_on = asyncio.Event()
    model.script(
        calls(("calculator", {"expression": "6*7"})),
        gated_within(go_on, text("The answer is 42, and that is all."), events=2),
    )
    stream = await client.chat.completions.create(
        model="clerk", messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    said, finishes, usage = [], [], None
    async for chunk in stream:
        for choice in chunk.choices:
            said.append(choice.delta.content or "")
            finishes.append(choice.finish_reason)
        usage = chunk.usage or usage
        if any(said):
            go_on.set()
    assert "".join(said) == "The answer is 42, and that is all."
    assert len([each for each in said if each]) > 1
    assert [each for each in finishes if each] == ["stop"]
    assert usage is not None
    assert usage.completion_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_executes_tools_of_its_own(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel, streamed: bool
) -> None:
    await define(bottega)
    model.script(
        calls(("locate", {"user": "ada"}), ("locate", {"user": "bob"})), text("Rome and Oslo.")
    )
    answer, finish = await completion(client, streamed, ASKED)
    assert finish == "tool_calls"
    assert [json.loads(each["function"]["arguments"]) for each in answer["tool_calls"]] == [
        {"user": "ada"},
        {"user": "bob"},
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": place}
        for call, place in zip(answer["tool_calls"], ("Rome", "Oslo"), strict=True)
    ]
    history = [*ASKED, {"role": "assistant", **answer}, *reversed(results)]
    last, finish = await completion(client, streamed, history)
    assert (last["content"], finish) == ("Rome and Oslo.", "stop")
    runs = (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]
    assert [run["status"] for run in runs] == ["completed"]
    told = [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert told == ["Rome", "Oslo"]
    # Sent once more, the calls are over: a new run goes on from the history.
    model.script(text("As I said."))
    again, _ = await completion(client, streamed, history)
    assert again["content"] == "As I said."
    assert len((await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]) == 2


async def test_only_its_caller_answers_the_calls_of_a_run(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(calls(("locate", {"user": "ada"})), text("I do not know her."))
    answer, _ = await completion(client, False, ASKED, user="ada")
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "Rome"}
    history = [*ASKED, {"role": "assistant", **answer}, result]
    other, _ = await completion(client, False, history, user="bob")
    assert other["content"] == "I do not know her."
    runs = (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]
    assert {run["user"]: run["status"] for run in runs} == {"ada": "waiting", "bob": "completed"}


async def test_answers_fit_a_schema(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(text('{"city": "Rome"}'))
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    made = await client.chat.completions.create(
        model="clerk", messages=ASKED, response_format=wanted
    )
    assert json.loads(made.choices[0].message.content or "") == {"city": "Rome"}


async def test_errors_are_those_that_clients_know(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(http_error(400), http_error(400))
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        await create(model="nobody", messages=ASKED)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.message.count("/") == 0, "no field of another API"
    with pytest.raises(openai.NotFoundError):
        await create(model="graph:none", messages=ASKED)
    with pytest.raises(openai.BadRequestError) as several:
        await create(model="clerk", messages=ASKED, n=2)
    assert several.value.param == "n"
    lost: Any = [*ASKED, {"role": "tool", "tool_call_id": "x", "content": "?"}]
    with pytest.raises(openai.BadRequestError) as orphan:
        await create(model="clerk", messages=lost)
    assert orphan.value.param == "messages.1"
    with pytest.raises(openai.AuthenticationError) as stranger:
        await client.with_options(api_key="x" * 40).models.list()
    assert stranger.value.code == "invalid_api_key"
    with pytest.raises(openai.InternalServerError) as failed:
        await create(model="clerk", messages=ASKED)
    assert failed.value.status_code == 502
    with pytest.raises(openai.APIError):
        async for _ in await create(model="clerk", messages=ASKED, stream=True):
            pass


async def test_errors_name_the_field_that_was_sent(
    client: openai.AsyncOpenAI, bottega: Running
) -> None:
    await define(bottega)
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}}
    tool = {"type": "function", "function": LOCATE["function"] | {"name": "no name"}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"response_format": schema}, "response_format"),
        ({"tools": [LOCATE, tool]}, "tools.1.function.name"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": True}, "logprobs"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ]
    for more, param in wrong:
        asked: Any = {"model": "clerk", "messages": ASKED, **more}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**asked)
        assert refused.value.param == param
        said: Any = refused.value.body
        assert said["message"].startswith(f"{param}: "), "many clients show the text alone"
        assert said["message"].count(param) == 1


async def test_a_failed_run_is_not_repeated_by_the_client(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(*[http_error(400)] * 3)
    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=2).chat.completions.create(
            model="clerk", messages=ASKED
        )
    runs = (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]
    assert [run["status"] for run in runs] == ["failed"]


async def test_agents_and_graphs_are_models(client: openai.AsyncOpenAI, bottega: Running) -> None:
    await define(bottega)
    graph = {"name": "team", "nodes": [{"agent": "clerk"}], "edges": []}
    (await bottega.client.post("/v1/graphs", json=graph)).raise_for_status()
    assert [each.id async for each in client.models.list()] == ["clerk", "graph:team"]
    assert (await client.models.retrieve("graph:team")).owned_by == "bottega"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_cancels_its_run(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel, streamed: bool
) -> None:
    await define(bottega)
    never = asyncio.Event()
    model.script(gated(never, text("late")))
    asking = asyncio.ensure_future(completion(client, streamed, ASKED))

    async def runs() -> Any:
        return (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]

    await until(runs, lambda found: [each["status"] for each in found] == ["running"])
    asking.cancel()
    await until(runs, lambda found: [each["status"] for each in found] == ["cancelled"])
    never.set()


async def completion(
    client: openai.AsyncOpenAI, streamed: bool, messages: Any, **more: Any
) -> tuple[dict[str, Any], str | None]:
    """Return a completion's message and ``finish_reason``, put together if it was streamed."""
    asked: Any = {"model": "clerk", "messages": messages, "tools": [LOCATE], **more}
    if not streamed:
        made = await client.chat.completions.create(**asked)
        choice = made.choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    async with client.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        final = (await stream.get_final_completion()).choices[0]
    return final.message.model_dump(exclude_none=True, exclude={"parsed"}), final.finish_reason


async def test_the_client_without_asyncio(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    model.script(text("In Rome."), text("In Rome."), text('{"city": "Rome"}'), text("In Rome."))
    key = bottega.headers["Authorization"].removeprefix("Bearer ")
    url = f"http://127.0.0.1:{bottega.port}/openai/v1"

    def talk() -> list[Any]:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            made = client.chat.completions.create(model="clerk", messages=ASKED)
            chunks = client.chat.completions.create(model="clerk", messages=ASKED, stream=True)
            said = "".join(each.choices[0].delta.content or "" for each in chunks)
            parsed = client.chat.completions.parse(
                model="clerk", messages=ASKED, response_format=City
            )
            response = client.responses.create(model="clerk", input="Where is Ada?")
            found = client.responses.retrieve(response.id)
            message = parsed.choices[0].message
            whole = made.choices[0].message.content
            return [whole, said, message.parsed, response.output_text, found.output_text]

    got = await asyncio.to_thread(talk)
    assert got == ["In Rome.", "In Rome.", City(city="Rome"), "In Rome.", "In Rome."]


async def test_a_model_may_be_a_version(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    changed = {"system_message": "You are brief."}
    (await bottega.client.put("/v1/agents/clerk", json=changed)).raise_for_status()
    graph = {"name": "chain", "nodes": [{"agent": "clerk"}]}
    (await bottega.client.post("/v1/graphs", json=graph)).raise_for_status()
    model.script(*[text("Hello.")] * 4)
    for name in ("clerk", "clerk@1", "clerk@2", "graph:chain@1"):
        made = await client.chat.completions.create(model=name, messages=ASKED)
        assert made.model == name
        assert (await client.models.retrieve(name)).id == name
    told = [each["messages"][0]["content"].split("\n")[0] for each in model.requests]
    assert told == ["You are brief.", "You help.", "You are brief.", "You are brief."]
    for name in ("clerk@3", "clerk@x", "clerk@", "nobody@1", "graph:chain@2", "graph:no@1"):
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model=name, messages=ASKED)
        assert refused.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve(name)


async def test_a_version_is_chosen_in_our_own_api(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    changed = {"system_message": "You are brief."}
    (await bottega.client.put("/v1/agents/clerk", json=changed)).raise_for_status()
    model.script(text("Hello."))
    asked = {"agent": "clerk", "version": 1, "input": "?"}
    run = await bottega.client.post("/v1/runs?wait=30", json=asked)
    assert run.json()["status"] == "completed"
    assert model.requests[-1]["messages"][0]["content"].startswith("You help.")
    wrong = {"agent": "clerk", "version": 3, "input": "?"}
    refused = await bottega.client.post("/v1/runs", json=wrong)
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_agent")
    assert refused.json()["errors"][0]["pointer"] == "/version"


async def test_an_agent_that_is_not_exposed_is_no_model(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    await define(bottega, name="hidden", expose=["mcp"])
    assert [each.id for each in (await client.models.list()).data] == ["clerk"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("hidden")
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="hidden", messages=ASKED)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="hidden", input="Where is Ada?")
    model.script(text("Hello."))
    run = await bottega.client.post("/v1/runs", json={"agent": "hidden", "input": "?"})
    assert run.status_code == 202
    wanted = {"name": "early", "system_message": "x", "expose": ["another"]}
    refused_by_us = await bottega.client.post("/v1/agents", json=wanted)
    assert refused_by_us.status_code == 422
    (error,) = refused_by_us.json()["errors"]
    assert error["pointer"] == "/expose/0"
