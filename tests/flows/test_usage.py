"""Sums of what runs spent, over HTTP."""

import asyncio
import json
from contextlib import aclosing
from decimal import Decimal
from typing import Any

import pytest

from bottega.settings import Settings
from bottega.settings.providers import OperatorProvider
from tests.fake_model import FakeModel, calls, chunk, http_error, sse, sse_until
from tests.flows.test_patience import events
from tests.service import Running, running
from tests.team import define, start
from tests.waiting import until

MODEL = "gpt-5-mini"
CALL = {"id": "1", "function": {"name": "requirements", "arguments": '{"query": "x"}'}}
REPORTED = {"prompt_tokens": 70, "completion_tokens": 30}


async def sums(bottega: Running, by: str, **query: Any) -> list[dict[str, Any]]:
    answer = await bottega.client.get("/v1/usage", params={"by": by, **query})
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def ended(bottega: Running, **changes: Any) -> dict[str, Any]:
    run_id = await start(bottega.client, **changes)
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


async def test_sums_by_each_property_agree_with_the_runs(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    answer = sse(chunk("R", finish_reason="stop"), {"choices": [], "usage": REPORTED})
    model.script(calls(("requirements", {"query": "x"})), answer, answer, answer, answer)
    runs = [
        await ended(bottega, session_id="s", user="u"),
        await ended(bottega, session_id="t"),
    ]
    names = {
        "agent": ["coordinator", "requirements"],
        "model": [MODEL],
        "session": ["s", "t"],
        "user": ["me", "u"],
        "key": ["local"],
        "day": [runs[0]["created_at"][:10]],
    }
    for by, expected in names.items():
        items = await sums(bottega, by)
        assert [item[by] for item in items] == expected
        assert {len(item) for item in items} == {8}, "one name in each item"
        for name in ("input", "output", "cached", "reasoning"):
            assert sum(item[name] for item in items) == sum(run["usage"][name] for run in runs)
        assert all(item["cost"]["complete"] is False for item in items)


async def test_filters_leave_out_the_others(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    answer = sse(chunk("R", finish_reason="stop"), {"choices": [], "usage": REPORTED})
    model.script(calls(("requirements", {"query": "x"})), answer, answer, answer, answer)
    await ended(bottega, session_id="s", user="u", metadata={"plan": "pro", "seats": 5})
    await ended(bottega, session_id="t", user="v", metadata={"plan": "free"})
    whole = (await sums(bottega, "user"))[0]
    assert (whole["user"], whole["runs"]) == ("u", 1)
    tokens = whole["input"], whole["output"]
    for query in (
        *({"user": "u"}, {"session_id": "s"}, {"metadata": "plan:pro"}),
        *({"metadata": ["plan:pro", "seats:5"]}, {"user": "u", "model": MODEL}),
    ):
        (item,) = await sums(bottega, "user", **query)
        assert (item["user"], item["runs"], item["input"], item["output"]) == ("u", 1, *tokens)
    agents = await sums(bottega, "agent", agent="requirements", user="u")
    assert [item["agent"] for item in agents] == ["requirements"]
    assert (await sums(bottega, "user", agent="requirements", user="u"))[0]["input"] == (
        agents[0]["input"]
    )
    for nothing in (
        *({"user": "w"}, {"session_id": "r"}, {"metadata": "plan:x"}, {"agent": "nobody"}),
        *({"model": "other"}, {"user": "u", "session_id": "t"}),
    ):
        assert await sums(bottega, "day", **nothing) == []
    plans = await sums(bottega, "metadata:plan")
    assert [(item["metadata"], item["runs"]) for item in plans] == [("free", 1), ("pro", 1)]
    seats = await sums(bottega, "metadata:seats")
    assert [item["metadata"] for item in seats] == [None, "5"]
    assert [item["batch"] for item in await sums(bottega, "batch")] == [None]
    for wrong in (
        "by=metadata",
        "by=metadata:",
        "by=metadata:a:b",
        "by=plan",
        "metadata=plan",
        "session_id=%20",
    ):
        assert (await bottega.client.get(f"/v1/usage?{wrong}")).status_code == 422, wrong
    told = (await bottega.client.get("/v1/usage?by=metadata")).json()["detail"]
    assert told.startswith("by: "), told
    assert "metadata:" in told


async def test_a_run_that_failed_before_it_spent_anything_counts_as_in_the_totals(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(*[http_error(400)] * 3)
    run = await ended(bottega, user="u")
    assert run["status"] == "failed"
    for by, key in (("agent", "coordinator"), ("user", "u"), ("day", run["created_at"][:10])):
        (item,) = await sums(bottega, by, user="u")
        assert (item[by], item["runs"], item["input"], item["output"]) == (key, 1, 0, 0)
        assert item["cost"] == {"amount": "0", "currency": "USD", "complete": True}
    assert await sums(bottega, "model") == []
    assert await sums(bottega, "agent", agent="requirements") == []

    async def total() -> Any:
        found = await bottega.client.get("/v1/metrics/totals", params={"by": "agent"})
        return found.json()["items"]

    (of_agent,) = await until(total, bool)
    assert (of_agent["key"], of_agent["runs"], of_agent["errors"]) == ("coordinator", 1, 1)


async def test_pages_and_times_bound_the_sums(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    model.script(*[sse(chunk("R", finish_reason="stop"))] * 3)
    for session in "abc":
        await ended(bottega, session_id=session)
    first = (await bottega.client.get("/v1/usage?by=session&limit=2")).json()
    assert [item["session"] for item in first["items"]] == ["a", "b"]
    rest = await sums(bottega, "session", cursor=first["next_cursor"], limit=2)
    assert [item["session"] for item in rest] == ["c"]
    assert await sums(bottega, "session", until="2026-01-01T00:00:00Z") == []
    for wrong in ("by=colour", "since=2020-01-01T00:00:00Z"):
        assert (await bottega.client.get(f"/v1/usage?{wrong}")).status_code == 422


async def test_a_cost_budget_refuses_a_model_without_a_price(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    budget = {"amount": "0.50"}
    new = {"agent": "coordinator", "input": "x", "cost_budget": budget}
    unpriced = await bottega.client.post("/v1/runs", json=new)
    assert (unpriced.status_code, unpriced.json()["code"]) == (422, "unpriced_model")
    assert unpriced.json()["errors"][0]["pointer"] == "/cost_budget"
    assert model.requests == []
    for wrong in ("0", "1e3", "-1", "0.1234567890"):
        refused = await bottega.client.post(
            "/v1/runs",
            json={"agent": "coordinator", "input": "x", "cost_budget": {"amount": wrong}},
        )
        assert refused.status_code == 422, wrong


async def test_a_cost_budget_ends_a_run_whose_models_have_prices(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    provider: dict[str, Any] = {
        "name": "default",
        "dialect": "chat",
        "base_url": model.base_url,
        "prices": {"gpt-5-mini": {"input": 1, "output": 1000}},
    }
    priced = settings.model_copy(update={"providers": [OperatorProvider.model_validate(provider)]})
    async with running(priced, database_url, worker=True) as bottega:
        await define(bottega.client)
        answer = sse(chunk("R", finish_reason="stop"), {"choices": [], "usage": REPORTED})
        asks = sse(
            chunk(tool_calls=[CALL], finish_reason="tool_calls"),
            {"choices": [], "usage": REPORTED},
        )
        model.script(asks, answer, answer)
        cheap = await ended(bottega)
        assert cheap["usage"]["cost"] == {"amount": "0.09021", "currency": "USD", "complete": True}
        memory = (await bottega.client.get(f"/v1/runs/{cheap['id']}/working-memory")).json()
        assert memory["variables"]["metadata"]["cost"] == 0.09021
        model.script(asks, answer, answer)
        dear = await ended(bottega, cost_budget={"amount": "0.05"})
        assert (dear["status"], dear["error"]["code"]) == ("failed", "budget_exhausted")
        (item,) = await sums(bottega, "day")
        assert Decimal(item["cost"]["amount"]) >= Decimal("0.12")


def partly(text: str) -> dict[str, Any]:
    """Build a piece of an answer with which the server reports usage."""
    return {**chunk(text), "usage": REPORTED}


async def heard(bottega: Running, run_id: str, text: str) -> None:
    """Wait until a subscriber of a run is shown a text."""
    async with aclosing(events(bottega, run_id)) as stream:
        async for event in stream:
            if event["type"] == "llm.delta" and text in event["data"]["text"]:
                return
    raise AssertionError("the run is over")


async def test_answers_that_break_off_or_are_cancelled_count(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    never = asyncio.Event()
    whole = sse(chunk("R", finish_reason="stop"), {"choices": [], "usage": REPORTED})
    broken = sse(partly("one"), done=False)
    model.script(broken, sse_until(never, partly("two")), whole, sse_until(never, partly("three")))
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        run_id = await start(bottega.client)
        await heard(bottega, run_id, "two")
    async with running(configured, database_url, worker=True) as bottega:
        frames = await bottega.watch(run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        assert (run["status"], run["output"]) == ("completed", "R")
        assert (run["usage"]["input"], run["usage"]["output"]) == (210, 90)
        told = [each["type"] for each in frames if "usage" in each["data"]]
        assert told[:3] == ["llm.failed", "llm.cancelled", "llm.completed"]

        other = await start(bottega.client)
        await heard(bottega, other, "three")
        await bottega.client.post(f"/v1/runs/{other}/cancel")
        frames = await bottega.watch(other)
        assert frames[-1]["type"] == "run.cancelled"
        assert frames[-1]["data"]["usage"]["input"] == 70
        (item,) = await sums(bottega, "agent")
        assert (item["agent"], item["input"], item["output"]) == ("coordinator", 280, 120)
        spent = "SELECT amount FROM daily_spending WHERE unit = 'tokens'"
        assert await bottega.owner.fetchval(spent) == 400
    never.set()


@pytest.mark.deep
async def test_the_model_of_memory_counts_for_its_run_and_for_the_day(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    def decide(request: dict[str, Any]) -> Any:
        said = {"goals": ["add"], "complexity": 0.1, "insights": ["Adding is easy."]}
        call = {"id": "1", "function": {"name": "answer", "arguments": json.dumps(said)}}
        by_tool = chunk(tool_calls=[call], finish_reason="tool_calls")
        first = by_tool if request["model"] == "thinker" else chunk("R", finish_reason="stop")
        return sse(first, {"choices": [], "usage": REPORTED})

    model.decide = decide
    limited = {"memory_model": "thinker", "tokens_per_day": 1_000_000}
    configured = settings.model_copy(update={"openai_base_url": model.base_url, **limited})
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        run = await ended(bottega)
        assert run["usage"]["input"] == 70
        items = await until(lambda: sums(bottega, "agent"), lambda found: len(found) == 3)
        names = ["coordinator", "memory:analysis", "memory:reflection"]
        assert [(each["agent"], each["input"], each["runs"]) for each in items] == [
            (name, 70, 1) for name in names
        ]
        spent = "SELECT amount FROM daily_spending WHERE unit = 'tokens'"
        await until(lambda: bottega.owner.fetchval(spent), lambda found: found == 300)
