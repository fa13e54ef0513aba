"""Runs whose model's answer is cut off, empty, refused or filtered."""

import asyncio
from typing import Any

import pytest

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, chunk, gated, sse, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.llm.vendors.strict import StrictModel
from tests.service import Running, running
from tests.team import define_graph


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def cut(content: str, reason: str = "length") -> Reply:
    return sse(chunk(content), chunk(finish_reason=reason))


async def ask(bottega: Running, **body: Any) -> dict[str, Any]:
    run: dict[str, Any] = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    return run


@pytest.mark.parametrize(
    ("reply", "code", "reason", "output"),
    [
        (cut("half of it"), "model_length", "length", "half of it"),
        (cut("", "stop"), "model_empty", "empty", None),
        (cut("the begin", "content_filter"), "model_filtered", "content_filter", "the begin"),
        (
            sse(chunk(refusal="I cannot."), chunk(finish_reason="stop")),
            *("model_refused", "refusal", "I cannot."),
        ),
    ],
    ids=["cut off", "empty", "filtered", "refused"],
)
async def test_an_unusable_answer_fails_the_run(
    bottega: Running, model: FakeModel, reply: Reply, code: str, reason: str, output: str | None
) -> None:
    await create(bottega, "one", on_length="fail")
    model.decide = lambda request: reply
    run = await ask(bottega, agent="one", input="go")
    assert (run["status"], run["error"]["code"]) == ("failed", code)
    assert (run["stop_reason"], run["output"]) == (reason, output)


async def test_a_cut_off_text_may_be_accepted(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "one", on_length="accept")
    agent = (await bottega.client.get("/v1/agents/one")).json()
    assert agent["on_length"] == "accept"
    model.script(cut("half"))
    run = await ask(bottega, agent="one", input="go")
    assert (run["status"], run["output"], run["stop_reason"]) == ("completed", "half", "length")


async def test_an_unknown_policy_is_refused(bottega: Running) -> None:
    body = {"name": "x", "system_message": "You.", "on_length": "retry"}
    answer = await bottega.client.post("/v1/agents", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/on_length"


async def test_a_run_that_is_cut_off_between_the_parts_joins_them(
    settings: Settings, database_url: str
) -> None:
    gate = asyncio.Event()
    async with StrictModel() as model:
        model.script(
            calls(("calculator", {"expression": "1+1"})), cut("The begin"), gated(gate, text("X"))
        )
        update = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
        configured = settings.model_copy(update=update)
        async with running(configured, database_url, worker=True) as bottega:
            tools = [{"type": "builtin", "name": "calculator"}]
            await create(bottega, "one", tools=tools)
            body = {"agent": "one", "input": "go"}
            run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
            await model.received(3)
        gate.set()
        model.script(text("ning."))
        async with running(configured, database_url, worker=True) as bottega:
            await bottega.watch(run_id)
            run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        assert not model.refusals
        assert model.requests[3] == model.requests[2]
    assert (run["status"], run["output"]) == ("completed", "The beginning.")
    assert run["usage"]["model_calls"] == 3


async def test_half_an_answer_reaches_no_other_agent(bottega: Running, model: FakeModel) -> None:
    """Check that a sub-agent's cut-off answer is an error for its caller, and is not published."""

    def decide(request: dict[str, Any]) -> Reply:
        answered = sum(message["role"] == "tool" for message in request["messages"])
        match named(request), answered:
            case "lead", 0:
                return calls(("a", {"query": "go"}))
            case "lead", 1:
                return calls(("b", {"query": "go"}))
            case "a", _:
                return cut(f"SECRET HALF {len(model.requests)} ")
            case _:
                return text("done")

    model.decide = decide
    await define_graph(bottega.client, "g", ("a", "b"))
    await create(bottega, "lead", subagents={"names": ["a", "b"]})
    body = {"agent": "lead", "graph": "g", "input": "go"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    frames = await bottega.watch(run_id)
    assert frames[-1]["type"] == "run.completed"
    (failed,) = [frame for frame in frames if frame["type"] == "agent.failed"]
    assert (failed["agent"], failed["data"]["error"]["code"]) == ("a", "model_length")
    assert not [f for f in frames if f["type"] == "memory.published" and f["agent"] == "a"]
    for request in model.requests:
        assert named(request) == "a" or "SECRET HALF" not in str(request)
    lead = [r for r in model.requests if named(r) == "lead"][1]
    assert "Error: the model's answer was cut off" in lead["messages"][-1]["content"]


async def test_a_node_s_half_answer_fails_its_descendants(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"), ("c", "d"))
    halves = iter(["half ", "of it"])
    model.decide = lambda request: cut(next(halves)) if named(request) == "a" else text("whole")
    run = await ask(bottega, mode="dag", graph="g", input="go")
    assert (run["status"], run["stop_reason"]) == ("failed", "length")
    assert run["output"] == {"a": "half of it", "c": "whole", "d": "whole"}
    assert "a (the model's answer was cut off" in run["error"]["message"]
    assert "b" not in map(named, model.requests)


async def test_an_asynchronous_task_with_an_unusable_answer_fails(
    bottega: Running, model: FakeModel
) -> None:
    model.decide = swarm.plays(
        {
            "root": [swarm.dispatches("a", "b", "c"), swarm.awaits(), text("done")],
            "a": [lambda request: cut("half "), lambda request: cut("of it")],
            "b": [lambda request: cut("", "stop")],
            "c": [lambda request: sse(chunk(refusal="No."), chunk(finish_reason="stop"))],
        }
    )
    await swarm.coordinator(bottega.client)
    run_id = await swarm.start(bottega.client)
    frames = await bottega.watch(run_id)
    assert frames[-1]["type"] == "run.completed"
    codes = {f["data"]["error"]["code"] for f in frames if f["type"] == "subagent.failed"}
    assert codes == {"model_length", "model_empty", "model_refused"}


async def test_a_repeated_run_asks_again_for_an_unusable_answer(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "one", tools=[{"type": "builtin", "name": "current_time"}])
    model.script(calls(("current_time", {})), cut("half "), cut("an answer, "))
    run = await ask(bottega, agent="one", input="go")
    assert (run["status"], run["output"]) == ("failed", "half an answer, ")
    model.script(text("a whole one"))
    second = await bottega.client.post(f"/v1/runs/{run['id']}/retry", json={"from": "last_step"})
    await bottega.watch(second.json()["id"])
    run = (await bottega.client.get(f"/v1/runs/{second.json()['id']}")).json()
    assert (run["status"], run["output"]) == ("completed", "half a whole one")
    assert len(model.requests) == 4
    assert model.requests[3] == model.requests[2]


async def test_a_repeated_dag_asks_a_node_again_for_an_unusable_answer(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    refusal = sse(chunk(refusal="No."), chunk(finish_reason="stop"))
    model.decide = lambda request: refusal if named(request) == "b" else text("fine")
    run = await ask(bottega, mode="dag", graph="g", input="go")
    assert (run["status"], run["stop_reason"]) == ("failed", "refusal")
    model.decide = lambda request: text("fine now")
    second = await bottega.client.post(f"/v1/runs/{run['id']}/retry", json={"from": "last_step"})
    await bottega.watch(second.json()["id"])
    run = (await bottega.client.get(f"/v1/runs/{second.json()['id']}")).json()
    assert (run["status"], run["output"]) == ("completed", "fine now")
    assert [named(request) for request in model.requests] == ["a", "b", "b"]
