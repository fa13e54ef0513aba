"""Ends of runs after failures, and waiting for the end."""

import asyncio

import pytest

from bottega.llm.dialects.wire import GO_ON
from bottega.settings import Settings
from tests.claims import sweep
from tests.fake_model import FakeModel, calls, chunk, gated, http_error, sse, text
from tests.service import Running, running
from tests.team import define, start


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def test_a_model_that_refuses_fails_the_run_with_its_reason(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(http_error(401))
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    assert [frame["type"] for frame in frames[-4:]] == [
        "llm.failed",
        "agent.failed",
        "episode.stored",
        "run.failed",
    ]
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert run["status"] == "failed"
    assert run["error"]["code"] == "model_unauthorized"
    assert "test-key" not in str(frames)


async def test_a_failed_attempt_is_an_event_and_is_repeated(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(http_error(500, {"retry-after": "0"}))
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    failed = [frame["data"] for frame in frames if frame["type"] == "llm.failed"]
    assert [data["try"] for data in failed] == [1]
    answered = [frame["data"] for frame in frames if frame["type"] == "llm.completed"]
    assert [data["try"] for data in answered] == [2, 1, 1, 1, 1, 1, 1]
    assert frames[-1]["type"] == "run.completed"


async def test_a_sub_agent_that_fails_is_an_error_the_coordinator_reads(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(
        calls(("requirements", {"query": "x"})), http_error(400), text("Sorry, that went wrong.")
    )
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    assert frames[-1]["type"] == "run.completed"
    (task,) = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert task["status"] == "failed"
    assert task["error"]["code"] == "model_bad_request"
    assert "tool.failed" in [frame["type"] for frame in frames]
    seen = model.requests[-1]["messages"][-1]
    assert seen["role"] == "tool"


async def test_a_run_over_its_time_times_out_and_cuts_its_model_call(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(gated(asyncio.Event(), text("never")))
    run_id, timeout_s = "", 0.2
    while not model.requests:  # a busy machine may end the run before it asks its model
        run_id = await start(bottega.client, timeout_s=timeout_s)
        frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
        assert frames[-1]["type"] == "run.timeout"
        timeout_s *= 5
    await model.disconnected()
    assert len(model.requests) == 1
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert run["status"] == "timeout"
    assert run["error"]["code"] == "timeout"


async def test_wait_answers_when_the_run_ends_or_the_wait_is_over(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    body = {"agent": "requirements", "input": "x"}
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    early = await bottega.client.post("/v1/runs?wait=0.1", json=body)
    assert early.status_code == 202
    assert early.json()["status"] in ("queued", "running")
    gate.set()
    model.script(text("at once"))
    late = await bottega.client.post("/v1/runs?wait=30", json=body)
    assert late.status_code == 202
    assert (late.json()["status"], late.json()["output"]) == ("completed", "at once")
    assert late.headers["location"] == f"/v1/runs/{late.json()['id']}"
    for bad in ("61", "-1", "x"):
        assert (await bottega.client.post(f"/v1/runs?wait={bad}", json=body)).status_code == 422


async def test_a_repeated_key_waits_for_the_existing_run(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    body, key = {"agent": "requirements", "input": "x"}, {"idempotency-key": "k"}
    first = await bottega.client.post("/v1/runs", json=body, headers=key)
    waiting = asyncio.ensure_future(bottega.client.post("/v1/runs?wait=30", json=body, headers=key))
    await model.received(1)
    gate.set()
    ended = (await waiting).json()
    assert (ended["id"], ended["status"]) == (first.json()["id"], "completed")
    assert (await bottega.client.post("/v1/runs", json=body, headers=key)).json() == first.json()
    assert len(model.requests) == 1


async def test_text_the_database_cannot_hold_does_not_fail_the_run(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(text("null \x00 and literal \\u0000 end"))
    answer = await bottega.client.post(
        "/v1/runs?wait=30", json={"agent": "requirements", "input": "x"}
    )
    assert answer.json()["status"] == "completed"
    assert answer.json()["output"] == "null \ufffd and literal \\u0000 end"


async def test_messages_as_input_reach_the_model_in_order(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    messages = [
        {"role": "assistant", "content": "Earlier I said this."},
        {"role": "user", "content": "Go on."},
    ]
    answer = await bottega.client.post(
        "/v1/runs?wait=30", json={"agent": "requirements", "input": messages}
    )
    assert answer.json()["status"] == "completed"
    assert answer.json()["input"] == messages
    begun = {"role": "user", "content": GO_ON}  # every chat template needs a user message first
    assert model.requests[0]["messages"][1:] == [begun, *messages]


async def test_a_run_keeps_the_versions_it_pinned(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, text("first")))
    blocking = await start(bottega.client, agent="requirements", graph=None)
    await model.received(1)
    changed = await bottega.client.put("/v1/agents/requirements", json={"system_message": "New."})
    assert changed.status_code == 200
    gate.set()
    await bottega.frames(f"/v1/runs/{blocking}/ws")
    old, *_ = model.requests
    await bottega.client.post("/v1/runs?wait=30", json={"agent": "requirements", "input": "x"})
    new = model.requests[-1]
    assert old["messages"][0]["content"] != "New."
    assert new["messages"][0]["content"] == "New."


async def test_a_model_call_over_the_token_budget_is_not_made(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client, token_budget=600)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert (run["status"], run["error"]["code"]) == ("failed", "budget_exhausted")
    assert len(model.requests) == 2
    assert run["usage"]["model_calls"] == 2
    assert frames[-1]["data"]["usage"] == run["usage"]
    generous = await start(bottega.client, token_budget=1_000_000)
    assert (await bottega.frames(f"/v1/runs/{generous}/ws"))[-1]["type"] == "run.completed"


async def test_a_run_that_waits_too_long_ends_without_having_started(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url) as bottega:
        await define(bottega.client)
        late = await start(bottega.client, queue_timeout_s=0.001)
        patient = await start(bottega.client)
        watching = asyncio.ensure_future(bottega.frames(f"/v1/runs/{late}/ws"))
        await sweep(bottega.owner)
        frames = await watching
        async with running(configured, database_url, worker=True) as other:
            assert (await other.frames(f"/v1/runs/{patient}/ws"))[-1]["type"] == "run.completed"
        run = (await bottega.client.get(f"/v1/runs/{late}")).json()
    assert [frame["type"] for frame in frames] == ["run.queued", "run.timeout"]
    assert frames[-1]["data"]["error"]["code"] == run["error"]["code"] == "queue_timeout"
    assert (run["status"], run["attempts"]) == ("timeout", [])
    assert len(model.requests) == 7


async def test_unreported_usage_is_estimated_and_counts(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    unreported = sse(chunk("x" * 400, finish_reason="stop"))
    call = {"id": "1", "function": {"name": "requirements", "arguments": '{"query": "x"}'}}
    asks = sse(chunk(tool_calls=[call], finish_reason="tool_calls"))
    model.script(asks, unreported, unreported)
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    (task,) = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    usages = [frame["data"]["usage"] for frame in frames if frame["type"] == "llm.completed"]
    assert [usage["estimated"] for usage in usages] == [True] * 3
    assert [usage["output"] for usage in usages[1:]] == [100, 100]
    sums = {name: sum(usage[name] for usage in usages) for name in ("input", "output")}
    assert run["usage"] == {
        **sums, "cached": 0, "reasoning": 0, "estimated": True, "model_calls": 3, "tool_calls": 1,
        "cost": {"amount": "0", "currency": "USD", "complete": False},
    }  # fmt: skip
    assert task["usage"] == usages[1] | {"model_calls": 1, "tool_calls": 0}

    model.script(asks)
    budget = sum(usage["input"] + usage["output"] for usage in usages[:2])
    run_id = await start(bottega.client, token_budget=budget)
    model.decide = lambda request: unreported
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert (run["status"], run["error"]["code"]) == ("failed", "budget_exhausted")


async def test_a_sum_is_estimated_as_soon_as_one_part_is(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(calls(("requirements", {"query": "x"})), sse(chunk("R", finish_reason="stop")))
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    usages = [frame["data"]["usage"] for frame in frames if frame["type"] == "llm.completed"]
    assert [usage["estimated"] for usage in usages[:3]] == [False, True, False]
    assert frames[-1]["data"]["usage"]["estimated"] is True
