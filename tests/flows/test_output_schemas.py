"""Runs whose answer has a schema: validated, corrected, stored, delivered."""

import asyncio
import json
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, WithJsonSchema

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, chunk, gated, sse, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.team import define_graph


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


PRICE = {
    "type": "object",
    "properties": {"price": {"type": "number"}},
    "required": ["price"],
    "additionalProperties": False,
}
GOOD = '{"price": 3}'


async def start(bottega: Running, **body: Any) -> str:
    answer = await bottega.client.post("/v1/runs", json={"input": "go", **body})
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def ask(bottega: Running, **body: Any) -> dict[str, Any]:
    answer = await bottega.client.post("/v1/runs?wait=30", json={"input": "go", **body})
    run: dict[str, Any] = answer.json()
    return run


async def test_an_answer_is_corrected_and_stored_parsed(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "one", output_schema=PRICE)
    model.script(text('{"price": "3"}'), text(GOOD))
    run_id = await start(bottega, agent="one")
    frames = await bottega.watch(run_id)
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert (run["status"], run["output"], run["output_json"]) == ("completed", GOOD, {"price": 3})
    assert "/price: '3' is not of type 'number'" in model.requests[1]["messages"][-1]["content"]
    kinds = [frame["type"] for frame in frames]
    assert kinds.count("answer.rejected") == 1
    assert kinds.index("answer.rejected") == kinds.index("llm.completed") + 1
    rejected = next(frame["data"] for frame in frames if frame["type"] == "answer.rejected")
    assert (rejected["call"], rejected["code"]) == (1, "output_invalid")
    assert frames[-1]["data"]["output_json"] == {"price": 3}
    (listed,) = (await bottega.client.get("/v1/runs?view=full")).json()["items"]
    assert listed["output_json"] == {"price": 3}
    (short,) = (await bottega.client.get("/v1/runs")).json()["items"]
    assert "output_json" not in short


@pytest.mark.deep
async def test_a_run_s_schema_replaces_the_agent_s(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "one", output_schema={"type": "string"})
    schema = {"type": "array", "items": {"type": "integer"}}
    model.script(text('"text"'), text("[1, 2]"))
    run = await ask(bottega, agent="one", output_schema=schema)
    assert (run["output_json"], run["output_schema"]) == ([1, 2], schema)


async def test_the_third_violation_fails_and_a_repetition_asks_again(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "one")
    model.script(text("a"), text("b"), text("last"))
    run = await ask(bottega, agent="one", output_schema=PRICE)
    assert (run["status"], run["error"]["code"]) == ("failed", "output_invalid")
    assert (run["output"], run["output_json"]) == ("last", None)
    model.script(text(GOOD))
    body = {"from": "last_step"}
    second = (await bottega.client.post(f"/v1/runs/{run['id']}/retry", json=body)).json()
    await bottega.watch(second["id"])
    again = (await bottega.client.get(f"/v1/runs/{second['id']}")).json()
    assert (again["status"], again["output_json"]) == ("completed", {"price": 3})
    assert model.requests[3] == model.requests[2]


async def test_a_dag_s_answer_is_that_of_its_sinks(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = lambda request: text(GOOD if named(request) == "b" else "free text")
    run = await ask(bottega, mode="dag", graph="g", output_schema=PRICE)
    assert (run["output"], run["output_json"]) == (GOOD, {"price": 3})

    await define_graph(bottega.client, "h", ("d", "e"), ("d", "f"))
    model.decide = lambda request: text("free text" if named(request) == "d" else GOOD)
    run = await ask(bottega, mode="dag", graph="h", output_schema=PRICE)
    assert run["output"] == {"e": GOOD, "f": GOOD}
    assert run["output_json"] == {"e": {"price": 3}, "f": {"price": 3}}


async def test_a_sub_agent_s_answer_is_checked_before_others_see_it(
    bottega: Running, model: FakeModel
) -> None:
    replies: dict[str, list[Reply]] = {
        "lead": [calls(("a", {"query": "go"})), calls(("b", {"query": "go"})), text("done")],
        "a": [text("SECRET"), text(GOOD)],
        "b": [text("SECRET"), text("SECRET"), text("SECRET")],
    }
    model.decide = lambda request: replies[named(request)].pop(0)
    await define_graph(bottega.client, "g", ("a", "b"))
    for name in ("a", "b"):
        body = {"description": name, "system_message": f"You are {name}.", "output_schema": PRICE}
        assert (await bottega.client.put(f"/v1/agents/{name}", json=body)).status_code == 200
    await create(bottega, "lead", subagents={"names": ["a", "b"]})
    run_id = await start(bottega, agent="lead", graph="g")
    frames = await bottega.watch(run_id)
    assert frames[-1]["type"] == "run.completed"
    (failed,) = [frame for frame in frames if frame["type"] == "agent.failed"]
    assert (failed["agent"], failed["data"]["error"]["code"]) == ("b", "output_invalid")
    published = [f for f in frames if f["type"] == "memory.published"]
    assert [f["agent"] for f in published] == ["a"]
    for request in model.requests:
        if named(request) == "lead":
            assert "SECRET" not in str(request)
    assert GOOD in str(next(r for r in model.requests if named(r) == "b"))  # as shared memory


@pytest.mark.deep
async def test_an_asynchronous_task_s_answer_is_checked(bottega: Running, model: FakeModel) -> None:
    dispatch = calls(("dispatch_subagent", {"agent": "worker", "prompt": "a"}))
    model.decide = swarm.plays(
        {
            "root": [dispatch, swarm.awaits(), text("done")],
            "a": [text("x"), text("y"), text("z")],
        }
    )
    await swarm.agent(bottega.client, "worker", output_schema=PRICE)
    await swarm.coordinator(bottega.client, subagents={"mode": "async", "names": ["worker"]})
    frames = await bottega.watch(await swarm.start(bottega.client))
    assert frames[-1]["type"] == "run.completed"
    (failed,) = [f for f in frames if f["type"] == "subagent.failed"]
    assert failed["data"]["error"]["code"] == "output_invalid"
    assert [f["type"] for f in frames].count("answer.rejected") == 3


async def test_a_run_that_is_killed_within_a_correction_goes_on_with_the_same_history(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(text("one"), text("two"), gated(gate, text("never read")))
    update = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    configured = settings.model_copy(update=update)
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "one", output_schema=PRICE)
        run_id = await start(bottega, agent="one")
        await model.received(3)
    gate.set()
    model.script(text(GOOD))
    async with running(configured, database_url, worker=True) as bottega:
        frames = await bottega.watch(run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert (run["status"], run["output_json"]) == ("completed", {"price": 3})
    assert model.requests[3] == model.requests[2]
    rejected = [f["data"]["call"] for f in frames if f["type"] == "answer.rejected"]
    assert rejected == [1, 2]


@pytest.mark.deep
async def test_half_an_answer_with_a_schema_is_not_continued(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "one", output_schema=PRICE)
    model.script(sse(chunk("The price"), chunk(finish_reason="length")))
    run = await ask(bottega, agent="one")
    assert (run["error"]["code"], run["stop_reason"]) == ("model_length", "length")
    assert len(model.requests) == 1


async def test_a_schema_of_32_levels_and_one_in_a_schedule_are_accepted(bottega: Running) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(15):
        schema = {"properties": {"a": schema}}
    await create(bottega, "one", output_schema=schema)
    run = {"agent": "one", "input": "x", "output_schema": schema}
    schedule = {"name": "s", "cron": "0 0 * * *", "run": run}
    stored = await bottega.client.post("/v1/schedules", json=schedule)
    assert stored.json()["run"]["output_schema"] == schema


DECIMAL = {
    "anyOf": [
        {"type": "number"},
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    ]
}
"""As Pydantic 2.12 and its like write it."""


class Line(BaseModel):
    """A line of a bill, as a client's own model."""

    text: str
    price: Annotated[Decimal, WithJsonSchema(DECIMAL)]
    parts: list["Line"] = []


async def test_models_with_decimals_and_parts_of_their_own_kind_are_schemas(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "one")
    part = {"text": "lid", "price": "x", "parts": []}
    bill = {"text": "kettle", "price": "12.50", "parts": [part]}
    wrong = {**bill, "parts": [{"text": "lid"}]}
    model.script(text(json.dumps(wrong)), text(json.dumps(bill)))
    run = await ask(bottega, agent="one", output_schema=Line.model_json_schema())
    assert (run["status"], run["output_json"]) == ("completed", bill)
    said = model.requests[1]["messages"][-1]["content"]
    assert "/parts/0: 'price' is a required property" in said
    events = await bottega.watch(run["id"])
    (told,) = [each["data"] for each in events if each["type"] == "warning"]
    assert told["code"] == "pattern_unchecked"
    assert "output_schema/$defs/Line/properties/price/anyOf/1/pattern" in told["message"]
