"""Limits of a tenant's runs, and fairness between tenants."""

import asyncio
import contextlib
from typing import Any
from uuid import UUID

import httpx2
import pytest

from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.recorder import FairQueue
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, chunk, gated, sse, text
from tests.service import Running, frames, running
from tests.tenants import holder

AGENT = {"name": "a", "description": "a", "system_message": "You are a."}


def configured(settings: Settings, model: FakeModel, **changes: Any) -> Settings:
    return settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0, **changes}
    )


def costs(read: int, written: int) -> Reply:
    """Return an answer for which the server reports so many tokens."""
    usage = {"prompt_tokens": read, "completion_tokens": written}
    return sse(chunk("done", finish_reason="stop"), {"choices": [], "usage": usage})


async def begin(client: httpx2.AsyncClient, count: int = 1, **fields: Any) -> list[str]:
    """Start runs; return their ids."""
    ids = []
    for _ in range(count):
        answer = await client.post("/v1/runs", json={"agent": "a", "input": "x", **fields})
        assert answer.status_code == 202, answer.text
        ids.append(answer.json()["id"])
    return ids


async def test_model_calls_begin_and_go_on_at_their_tenant_s_turn(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[UUID] = []

    async def enter(fair: FairQueue, tenant_id: UUID) -> None:
        turns.append(tenant_id)

    monkeypatch.setattr(FairQueue, "enter", enter)
    model.decide = lambda request: text("done")
    model.script(calls(("calculator", {"expression": "1"})))
    tools = [{"type": "builtin", "name": "calculator"}]
    async with running(configured(settings, model), database_url, worker=True) as server:
        await server.client.post("/v1/agents", json=AGENT | {"tools": tools})
        (run_id,) = await begin(server.client)
        await server.frames(f"/v1/runs/{run_id}/ws")
    assert turns == [DEFAULT_TENANT] * 4


@pytest.mark.deep
async def test_the_last_fifth_of_a_worker_is_for_tenants_without_a_run_in_it(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = lambda request: text("done")
    model.script(*[gated(gate, text("done"))] * 4)
    limited = configured(settings, model, worker_concurrency=5)
    one, other, third = [await holder(database_url, name) for name in ("one", "other", "third")]
    async with (
        running(limited, database_url, worker=True) as server,
        one.client(server) as full,
        other.client(server) as free,
        third.client(server) as late,
    ):
        for client in (full, free, late):
            await client.post("/v1/agents", json=AGENT)
        ids = await begin(full, 7)
        await model.received(4)
        for client in (free, late, free):
            run = {"agent": "a", "input": "x"}
            assert (await client.post("/v1/runs?wait=30", json=run)).json()["status"] == "completed"
        states = [(await full.get(f"/v1/runs/{each}")).json()["status"] for each in ids]
        assert states == ["running"] * 4 + ["queued"] * 3
        gate.set()
        for each in ids:
            events = await frames(server.port, f"/v1/runs/{each}/ws", one.headers)
            assert events[-1]["type"] == "run.completed"


async def test_runs_over_the_concurrency_limit_wait(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(*[gated(gate, text("done"))] * 2)
    limited = configured(settings, model, concurrent_runs=2)
    async with running(limited, database_url, worker=True) as bottega:
        await bottega.client.post("/v1/agents", json=AGENT)
        ids = await begin(bottega.client, 5)
        await model.received(2)
        listed = (await bottega.client.get("/v1/runs?order=asc")).json()["items"]
        assert [run["status"] for run in listed] == ["running"] * 2 + ["queued"] * 3
        gate.set()
        for run_id in ids:
            frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
            assert frames[-1]["type"] == "run.completed"
    assert len(model.requests) == 5


async def test_runs_over_the_queue_limit_are_refused_until_some_end(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    limited = configured(settings, model, concurrent_runs=1, queued_runs=2)
    async with running(limited, database_url) as bottega:
        await bottega.client.post("/v1/agents", json=AGENT)
        first, *_ = await begin(bottega.client, 3)
        refused = await bottega.client.post("/v1/runs", json={"agent": "a", "input": "x"})
        assert (refused.status_code, refused.json()["code"]) == (429, "queued_runs")
        assert int(refused.headers["retry-after"]) >= 1
        assert len((await bottega.client.get("/v1/runs")).json()["items"]) == 3
        await bottega.client.post(f"/v1/runs/{first}/cancel")
        await begin(bottega.client)


async def test_another_tenant_s_queue_is_not_full(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    limited = configured(settings, model, concurrent_runs=1, queued_runs=1)
    one, other = [await holder(database_url, name) for name in ("one", "other")]
    async with (
        running(limited, database_url) as bottega,
        one.client(bottega) as full,
        other.client(bottega) as free,
    ):
        for client in (full, free):
            await client.post("/v1/agents", json=AGENT)
        await begin(full, 2)
        refused = await full.post("/v1/runs", json={"agent": "a", "input": "x"})
        assert refused.status_code == 429
        await begin(free, 2)


async def test_no_runs_are_accepted_once_the_day_s_tokens_are_spent(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.script(costs(4000, 500))
    limited = configured(settings, model, tokens_per_day=4000)
    async with running(limited, database_url, worker=True) as bottega:
        await bottega.client.post("/v1/agents", json=AGENT)
        (run_id,) = await begin(bottega.client)
        frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
        assert frames[-1]["type"] == "run.completed"
        refused = await bottega.client.post("/v1/runs", json={"agent": "a", "input": "x"})
        assert (refused.status_code, refused.json()["code"]) == (429, "tokens_per_day")
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        spent = frames[-1]["data"]["usage"]
        total = spent["input"] + spent["output"]
        counted = await bottega.owner.fetchval("SELECT amount FROM daily_spending")
        assert counted == total > 0
        # Yesterday's tokens do not count.
        await bottega.owner.execute("UPDATE daily_spending SET day = day - 1")
        await begin(bottega.client)


@pytest.mark.parametrize(("per_day", "slice_"), [(1_000_000, 10_000), (400_000, None)])
async def test_a_worker_holds_a_hundredth_of_the_day_or_one_call(
    settings: Settings, database_url: str, model: FakeModel, per_day: int, slice_: int | None
) -> None:
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    limited = configured(settings, model, tokens_per_day=per_day)
    async with running(limited, database_url, worker=True) as bottega:
        await bottega.client.post("/v1/agents", json=AGENT)
        (run_id,) = await begin(bottega.client)
        await model.received(1)
        held = await bottega.owner.fetchval("SELECT sum(amount) FROM budget_slices")
        assert held == slice_ if slice_ else 4096 < held < 4200  # one call: 4,096 and its input
        gate.set()
        await bottega.watch(run_id)


async def test_a_maximum_is_sent_only_if_it_is_set_or_little_is_left(
    guest: Running, guest_model: FakeModel
) -> None:
    await guest.client.post("/v1/agents", json=AGENT)
    own = {"overrides": {"a": {"params": {"max_output_tokens": 50}}}}
    given: list[dict[str, Any]] = [{}, {"token_budget": 100_000}, {"token_budget": 2000}, own]
    for fields in given:
        answer = await guest.client.post(
            "/v1/runs?wait=30", json={"agent": "a", "input": "x"} | fields
        )
        assert answer.json()["status"] == "completed", answer.text
    sent = [request.get("max_completion_tokens", 0) for request in guest_model.requests]
    plain, rich, poor, small = sent
    assert (plain, rich, small) == (0, 0, 50)
    assert 1900 < poor < 2000


@pytest.mark.parametrize("workers", [1, 2])
async def test_concurrent_runs_share_the_remaining_tokens(
    settings: Settings, database_url: str, model: FakeModel, workers: int
) -> None:
    """Start eight runs of 3,000 tokens each on a day that has 10,000."""

    def decide(request: dict[str, Any]) -> Reply:
        return costs(20, min(3000, request.get("max_completion_tokens", 3000)))

    model.decide = decide
    limited = configured(settings, model, tokens_per_day=10_000)
    async with running(limited, database_url) as api:
        await api.client.post("/v1/agents", json=AGENT)
        ids = await begin(api.client, 8)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(workers):
                few = limited.model_copy(update={"worker_concurrency": 8 // workers})
                await stack.enter_async_context(running(few, database_url, worker=True))
            for run_id in ids:
                await api.frames(f"/v1/runs/{run_id}/ws")
        ends = [(await api.client.get(f"/v1/runs/{run_id}")).json() for run_id in ids]
        spent = sum(run["usage"]["input"] + run["usage"]["output"] for run in ends)
        used = await api.owner.fetchval("SELECT amount FROM daily_spending WHERE unit = 'tokens'")
        assert await api.owner.fetchval("SELECT count(*) FROM budget_slices") == 0
    assert {run["status"] for run in ends} == {"completed", "failed"}
    codes = {run["error"]["code"] for run in ends if run["error"]}
    assert codes == {"budget_exhausted"}
    assert 6000 <= spent == used <= 10_000 + 100  # the underestimate of the inputs


async def test_a_flood_delays_no_other_tenant_s_first_run(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = lambda request: (
        gated(gate, text("late")) if request["messages"][-1]["content"] == "flood" else text("now")
    )
    one, other = [await holder(database_url, name) for name in ("one", "other")]
    limited = configured(settings, model, worker_concurrency=5, concurrent_runs=20)
    async with (
        running(limited, database_url, worker=True) as bottega,
        one.client(bottega) as flooding,
        other.client(bottega) as waiting,
    ):
        for client in (flooding, waiting):
            await client.post("/v1/agents", json=AGENT)
        await begin(flooding, 50, input="flood")
        await model.received(4)
        for _ in range(3):
            body = {"agent": "a", "input": "mine"}
            assert (await waiting.post("/v1/runs?wait=30", json=body)).json()["output"] == "now"
        assert len(model.requests) == 4 + 3
        gate.set()
