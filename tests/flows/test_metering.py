"""Accounts of tenants: judges, memory, own model servers, and all of that when things fail."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bottega.engine import budget
from bottega.leased_work import LeasedWork
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, chunk, gated, http_error, sse
from tests.service import Running, running
from tests.waiting import until

TOLD = {"prompt_tokens": 900, "completion_tokens": 100}
"""A thousand tokens for each call."""
JUDGES = [{"type": "judge", "criteria": f"It is good in the way number {n}."} for n in range(10)]
SPENT = "SELECT amount FROM daily_spending WHERE unit = 'tokens'"


def judging(request: dict[str, Any]) -> Reply:
    """Answer as an agent, and judge well."""
    usage = {"choices": [], "usage": TOLD}
    if not request["messages"][0]["content"].startswith("You judge"):
        return sse(chunk("blue", finish_reason="stop"), usage)
    verdict = json.dumps({"passed": True, "reason": "It is."})
    call = {"id": "1", "function": {"name": "answer", "arguments": verdict}}
    return sse(chunk(tool_calls=[call], finish_reason="tool_calls"), usage)


def configured(settings: Settings, model: FakeModel, **changes: Any) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url, **changes})


async def ask(bottega: Running, **more: Any) -> dict[str, Any]:
    body = {"agent": "a", "input": "Which colour?", "memory": "off", **more}
    answer = await bottega.client.post("/v1/runs?wait=30", json=body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def show(bottega: Running, run: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run['id']}")).json()
    return shown


async def define(bottega: Running, **more: Any) -> None:
    body = {"name": "a", "system_message": "x", **more}
    answer = await bottega.client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text


def metered(text: str = "blue", **usage: Any) -> Reply:
    return sse(chunk(text, finish_reason="stop"), {"choices": [], "usage": usage or TOLD})


@asynccontextmanager
async def broken(bottega: Running, function: str) -> AsyncIterator[None]:
    """Let a function of the database fail during the block."""
    await bottega.owner.execute(f"ALTER FUNCTION {function} RENAME TO away")
    try:
        yield
    finally:
        await bottega.owner.execute(f"ALTER FUNCTION away RENAME TO {function}")


async def ended(bottega: Running, run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = await until(lambda: show(bottega, run), lambda each: each["ended_at"])
    return found


async def used(bottega: Running) -> int:
    """Return the tokens of the day that the scheduler shows."""
    shown = (await bottega.client.get("/v1/scheduler")).json()
    (found,) = [each for each in shown["quotas"] if each["name"] == "tokens_per_day"]
    return int(found["used"])


async def test_runs_with_many_judges_stop_at_the_day_s_limit_and_one_call(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Twelve runs with ten judges each would take 132,000 tokens of a day of 20,000."""
    model.decide = judging
    limited = configured(settings, model, tokens_per_day=20_000)
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega, success_check=JUDGES)
        runs = await asyncio.gather(*(ask(bottega) for _ in range(12)))

        async def shown() -> list[dict[str, Any]]:
            return [await show(bottega, run) for run in runs]

        def is_settled(found: list[dict[str, Any]]) -> bool:
            checks = [each["success_check"] for each in found if each["status"] == "completed"]
            return all(each["status"] == "done" or each["reason"] for each in checks)

        found = await until(shown, is_settled)
        waiting = [
            each["success_check"]
            for each in found
            if each["success_check"] and each["success_check"]["status"] == "pending"
        ]
        assert waiting
        for check in waiting:
            assert "limit of tokens for today" in check["reason"]
            assert "budget" in check["reason"]
            assert check["tries"] <= 1
        calls = len(model.requests)
        assert calls <= 21
        await until(lambda: bottega.owner.fetchval(SPENT), lambda spent: spent == 1000 * calls)
        items = (await bottega.client.get("/v1/usage?by=agent")).json()["items"]
        assert sum(each["input"] + each["output"] for each in items) == 1000 * calls
        due = "SELECT min(next_at) >= (now() AT TIME ZONE 'UTC')::date + 1 FROM run_checks"
        assert await bottega.owner.fetchval(due + " WHERE status = 'pending'")


async def checked(bottega: Running, run: dict[str, Any], status: str) -> dict[str, Any]:
    def is_so(found: dict[str, Any]) -> bool:
        check = found["success_check"]
        return check and check["status"] == status and bool(check["results"] or check["reason"])

    found: dict[str, Any] = await until(lambda: show(bottega, run), is_so, within=60)
    return found


@pytest.mark.deep
async def test_a_judge_waits_for_a_day_that_pays_it_but_not_for_ever(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LeasedWork.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(LeasedWork.__init__.__kwdefaults__, "poll_s", 0.5)
    monkeypatch.setattr(budget, "_WAIT_S", 0.5)
    model.decide = judging
    limited = configured(settings, model, tokens_per_day=1_100)
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega, success_check=JUDGES[:1])
        one = await ask(bottega)
        await checked(bottega, one, "pending")
        # Looked at too early, it goes on waiting; on the next day it is asked.
        early = await bottega.owner.fetchval("SELECT clock_timestamp()")
        await look_again(bottega)
        again = "SELECT bool_and(updated_at > $1 AND next_at > now()) FROM run_checks"
        await until(lambda: bottega.owner.fetchval(again, early))
        assert len(model.requests) == 1
        await bottega.owner.execute("UPDATE daily_spending SET day = day - 1")
        await look_again(bottega)
        found = await checked(bottega, one, "done")
        assert found["success_check"]["passed"] is True
        assert found["success_check"]["reason"] is None
        # Its judge has taken 1,000 of this day. The next run is a week old when it is looked at.
        await bottega.owner.execute("UPDATE daily_spending SET day = day - 2")
        other = await ask(bottega)
        await checked(bottega, other, "pending")
        await bottega.owner.execute("UPDATE runs SET ended_at = ended_at - interval '7 days'")
        await look_again(bottega)
        found = await checked(bottega, other, "unknown")
        assert found["success_check"]["reason"] == "budget"
        assert found["outcome"] == {"value": "UNKNOWN", "source": None, "reason": None}
        assert len(model.requests) == 3


async def look_again(bottega: Running) -> None:
    await bottega.owner.execute("UPDATE run_checks SET next_at = now()")
    await bottega.owner.execute("SELECT pg_notify('run_checks', '')")


@pytest.mark.deep
async def test_an_account_that_cannot_be_read_is_no_try_of_a_judge(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_WAIT_S", 0.5)
    gate = asyncio.Event()
    model.decide = judging
    model.script(gated(gate, metered(prompt_tokens=90_000, completion_tokens=500)))
    limited = configured(settings, model, tokens_per_day=1_000_000)
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega, success_check=JUDGES[:1])
        body = {"agent": "a", "input": "x", "memory": "off"}
        run = (await bottega.client.post("/v1/runs", json=body)).json()
        await model.received(1)
        async with broken(bottega, "draw_budget"):
            gate.set()
            found = (await checked(bottega, run, "pending"))["success_check"]
            assert "daily budget had too little left" in found["reason"]
            assert (found["tries"], len(model.requests)) == (0, 1)
            soon = "SELECT next_at < now() + interval '1 minute' FROM run_checks"
            assert await bottega.owner.fetchval(soon)
        await look_again(bottega)
        found = await checked(bottega, run, "done")
        assert found["success_check"]["passed"] is True


@pytest.mark.deep
async def test_an_unpaid_judge_does_not_put_off_other_checks(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Ask the other judge, which the tenant pays, again after the usual pause."""
    is_down = True

    def decide(request: dict[str, Any]) -> Reply:
        return http_error(500) if is_down and request["model"] == "own" else judging(request)

    model.decide = decide
    limited = configured(settings, model, tokens_per_day=1_100, egress_allow=["127.0.0.1"])
    async with running(limited, database_url, worker=True) as bottega:
        mine = {"name": "mine", "dialect": "chat", "base_url": model.base_url}
        assert (await bottega.client.post("/v1/providers", json=mine)).status_code == 201
        await define(bottega, success_check=[JUDGES[0], {**JUDGES[1], "model": "mine/own"}])
        run = await ask(bottega)
        found = (await checked(bottega, run, "pending"))["success_check"]
        assert "limit of tokens for today" in found["reason"]
        soon = "SELECT next_at < now() + interval '1 minute' FROM run_checks"
        assert await bottega.owner.fetchval(soon)
        assert found["tries"] == 1
        is_down = False
        await look_again(bottega)
        day = "SELECT next_at >= (now() AT TIME ZONE 'UTC')::date + 1 FROM run_checks"
        await until(lambda: bottega.owner.fetchval(day))
        found = (await show(bottega, run))["success_check"]
        assert [each["passed"] for each in found["results"]] == [None, True]
        assert "limit of tokens for today" in found["reason"]


async def test_a_spent_day_leaves_memory_to_rules(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = lambda request: metered()
    limited = configured(settings, model, tokens_per_day=1_100, memory_model="thinker")
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega)
        await ask(bottega, memory="full")
        by_rules = "SELECT result ->> 'by' = 'rules' FROM run_learning WHERE status = 'done'"
        await until(lambda: bottega.owner.fetchval(by_rules))
        asked = [each["model"] for each in model.requests]
        assert asked.count("thinker") == 1  # the analysis; the reflection is not paid
        await until(lambda: used(bottega), lambda amount: amount == 1_000 * len(asked))


@pytest.mark.parametrize(
    "odd", [10**30, -(10**30), 10_000_001, -1, 1.5, "many", True, None], ids=str
)
async def test_numbers_of_a_server_never_lower_the_day(
    settings: Settings, database_url: str, model: FakeModel, odd: Any
) -> None:
    limited = configured(settings, model, tokens_per_day=1_000_000)
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega)
        model.script(metered(prompt_tokens=5_000, completion_tokens=500))
        await ask(bottega)
        assert await used(bottega) == 5_500
        model.script(metered(prompt_tokens=odd, completion_tokens=odd))
        run = await ask(bottega)
        assert run["status"] == "completed"
        assert run["usage"]["estimated"] is True
        assert 0 < run["usage"]["input"] < 1_000
        total = 5_500 + run["usage"]["input"] + run["usage"]["output"]
        assert await used(bottega) == total
        (item,) = (await bottega.client.get("/v1/usage?by=agent")).json()["items"]
        assert item["estimated"] is True
        assert item["input"] + item["output"] == total


@pytest.mark.deep
async def test_a_report_that_fails_is_made_later(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    limited = configured(settings, model, tokens_per_day=1_000_000)
    gate = asyncio.Event()
    model.script(gated(gate, metered(prompt_tokens=5_000, completion_tokens=500)))
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega)
        body = {"agent": "a", "input": "x", "memory": "off"}
        run = (await bottega.client.post("/v1/runs", json=body)).json()
        await model.received(1)
        async with broken(bottega, "draw_budget"):
            gate.set()
            assert (await ended(bottega, run))["status"] == "completed"
            assert await used(bottega) == 0
        await until(lambda: used(bottega), lambda amount: amount == 5_500)


@pytest.mark.deep
async def test_no_model_is_called_while_the_account_cannot_be_read(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = lambda request: metered()
    limited = configured(settings, model, tokens_per_day=1_000_000)
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega)
        async with broken(bottega, "draw_budget"):
            body = {"agent": "a", "input": "x", "memory": "off"}
            run = (await bottega.client.post("/v1/runs", json=body)).json()
            started = "SELECT attempt = 1 AND ended_at IS NULL FROM runs"
            await until(lambda: bottega.owner.fetchval(started))
            with pytest.raises(AssertionError):
                await until(lambda: bool(model.requests), within=3)
        found = await ended(bottega, run)
        assert (found["status"], len(model.requests)) == ("completed", 1)
        await until(lambda: used(bottega), lambda amount: amount == 1_000)


@pytest.mark.deep
async def test_what_a_judge_took_is_shown_once_the_database_takes_it(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = judging
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await define(bottega, success_check=JUDGES[:1])
        async with broken(bottega, "count_call"):
            run = await ask(bottega)
            await checked(bottega, run, "done")
            assert await used(bottega) == 1_000
        await until(lambda: used(bottega), lambda amount: amount == 2_000)
        items = (await bottega.client.get("/v1/usage?by=agent")).json()["items"]
        assert [each["agent"] for each in items] == ["a", "success_check:judge"]


@pytest.mark.parametrize("per_day", [None, 10_000])
async def test_a_tenant_s_own_server_is_not_the_operator_s_to_pay(
    settings: Settings, database_url: str, model: FakeModel, per_day: int | None
) -> None:
    model.decide = judging
    limited = configured(
        settings, model, tokens_per_day=per_day, egress_allow=["127.0.0.1"], drain_grace_s=0.0
    )
    async with running(limited, database_url, worker=True) as bottega:
        mine = {"name": "mine", "dialect": "chat", "base_url": model.base_url}
        assert (await bottega.client.post("/v1/providers", json=mine)).status_code == 201
        await define(bottega, model="mine/m", success_check=JUDGES[:1])
        run = await ask(bottega)
        assert (run["usage"]["input"], run["usage"]["output"]) == (900, 100)
        await checked(bottega, run, "done")
        items = (await bottega.client.get("/v1/usage?by=model")).json()["items"]
        assert [(each["model"], each["input"]) for each in items] == [("m", 1_800)]
        assert await used(bottega) == 0
        # Its own budget counts it.
        poor = await ask(bottega, input="x" * 3_000, token_budget=500)
        assert (poor["status"], poor["error"]["code"]) == ("failed", "budget_exhausted")
        # A spent day stops only runs that the operator pays.
        await bottega.owner.execute(
            "INSERT INTO daily_spending (tenant_id, day, unit, amount) "
            "SELECT id, (now() AT TIME ZONE 'UTC')::date, 'tokens', 10000 FROM tenants"
        )
        assert (await ask(bottega))["status"] == "completed"


async def test_a_call_reserves_what_it_may_take(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Start eight runs with answers of up to 8,000 tokens, of which two fit a day of 20,000."""

    def decide(request: dict[str, Any]) -> Reply:
        return metered(prompt_tokens=20, completion_tokens=request["max_completion_tokens"])

    model.decide = decide
    limited = configured(settings, model, tokens_per_day=20_000)
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega, params={"max_output_tokens": 8_000})
        runs = await asyncio.gather(*(ask(bottega) for _ in range(8)))
        assert {run["status"] for run in runs} == {"completed", "failed"}
        spent = sum(run["usage"]["input"] + run["usage"]["output"] for run in runs)
        assert 16_000 <= spent <= 20_100
        asked = [request["max_completion_tokens"] for request in model.requests]
        assert max(asked) == 8_000


@pytest.mark.deep
async def test_embeddings_are_the_tenant_s(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = lambda request: metered(prompt_tokens=50, completion_tokens=50)
    limited = configured(
        settings,
        model,
        tokens_per_day=1_000_000,
        embedding_model="vectors-1",
        embedding_base_url=model.base_url,
    )
    async with running(limited, database_url, worker=True) as bottega:
        await define(bottega)
        await ask(bottega, memory="full")
        stored = "SELECT count(*) = 1 FROM episode_vectors"
        await until(lambda: bottega.owner.fetchval(stored))
        sent = sum(len(request["input"]) for request in model.embedded)  # a token for each text
        await until(lambda: used(bottega), lambda amount: amount >= 100 + sent)
        # A spent day makes no more vectors, and searches by words.
        calls = len(model.embedded)
        await bottega.owner.execute("UPDATE daily_spending SET amount = 1000000")
        await until(lambda: bottega.owner.fetchval("SELECT count(*) = 0 FROM budget_slices"))
        found = await bottega.client.post("/v1/episodes/search", json={"query": "a new question"})
        assert found.status_code == 200, found.text
        assert len(model.embedded) == calls
