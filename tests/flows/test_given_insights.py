"""Insights of reflections in later runs of the scope: given, withheld, counted, retired."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_episodes import judge
from tests.flows.test_learning import THINKER, define, done, learned
from tests.processes import command
from tests.service import Running, client_of, running, watch
from tests.tenants import holder
from tests.waiting import until

SENTENCE = "Ask the ledger of Fabriano before you add invoices."
TASK = "Add the invoices of the paper mill in Fabriano."


def insights(frames: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        each["data"]
        for each in frames
        if each["type"] == "context.recalled" and each["data"]["source"].startswith("insight:")
    ]


async def given(bottega: Running, run: dict[str, Any]) -> list[dict[str, Any]]:
    return insights(await bottega.frames(f"/v1/runs/{run['id']}/ws"))


def thinking(request: dict[str, Any]) -> Any:
    if request["model"] != THINKER:
        return text("It is done.")
    if "analyse" in request["messages"][0]["content"]:
        return calls(("answer", {"goals": ["add"], "complexity": 0.1}))
    return calls(("answer", {"insights": [SENTENCE]}))


@pytest.fixture
async def thinker(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    """A service with a scripted model that reflects, and no withheld memory."""
    model.decide = thinking
    configured = settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "memory_model": THINKER,
            "learning_withheld_share": 0.0,
        }
    )
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        yield bottega


async def test_the_next_run_of_the_scope_is_given_what_reflection_found(
    thinker: Running, model: FakeModel
) -> None:
    first = await done(thinker, input=TASK, user="alice")
    assert await given(thinker, first) == []
    found = await learned(thinker, first["id"], "done")
    assert found["insights"] == [SENTENCE]
    second = await done(thinker, input=TASK, user="alice")
    (one,) = await given(thinker, second)
    assert one["arm"] == "used"
    assert one["content"].splitlines()[1].strip() == SENTENCE
    assert one["episodes"] == [str(episode_id_of(UUID(first["id"])))]
    asked = [each for each in model.requests if each["model"] != THINKER]
    assert SENTENCE in str(asked[-1]["messages"])
    (shown,) = (await learned(thinker, second["id"], "done"))["applications"]
    assert (shown["source"], shown["arm"], shown["good"]) == (one["source"], "used", None)
    await judge(thinker.client, second["id"], outcome="SUCCESS")
    (shown,) = (await learned(thinker, second["id"], "done"))["applications"]
    assert shown["good"] is True
    # Not another user's, and nothing for another task.
    assert await given(thinker, await done(thinker, input=TASK, user="bob")) == []
    assert await given(thinker, await done(thinker, input=TASK)) == []
    other = await done(thinker, input="Paint a fence green.", user="alice")
    assert await given(thinker, other) == []
    # One that harms is retired, as soon as runs without it are significantly better.
    insight = one["source"].removeprefix("insight:")
    await plant(thinker, second["id"], insight, ("used", "FAILURE", 10))
    assert await given(thinker, await done(thinker, input=TASK, user="alice")) != []
    await plant(thinker, second["id"], insight, ("withheld", "SUCCESS", 10))
    assert await given(thinker, await done(thinker, input=TASK, user="alice")) == []


async def plant(bottega: Running, run_id: str, insight: str, of: tuple[str, str, int]) -> None:
    """Store judged episodes of many runs of the same user that have or lack an insight."""
    arm, outcome, times = of
    await bottega.owner.execute(
        "SELECT set_config('bottega.tenant', tenant_id::text, false),"
        " store_episode(tenant_id, jsonb_build_object('id', gen_random_uuid(), 'at', at,"
        " 'kind', kind, 'user_id', user_id, 'agent', agent, 'trust', 3, 'outcome', $2::text,"
        " 'origin', origin, 'task', task, 'execution', execution, 'result', result,"
        " 'summary', '{}'::jsonb, 'tags', '[]'::jsonb, 'metadata', jsonb_build_object('insights',"
        " jsonb_build_array(jsonb_build_object('id', $3::text, 'arm', $4::text)))))"
        " FROM episodes, generate_series(1, $5::integer) WHERE run_id = $1::uuid",
        run_id,
        outcome,
        insight,
        arm,
        times,
    )


async def test_a_withheld_insight_is_counted_and_in_no_prompt(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = thinking
    update = {"openai_base_url": model.base_url, "memory_model": THINKER}
    configured = settings.model_copy(update=update | {"learning_withheld_share": 1.0})
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        first = await done(bottega, input=TASK, session_id="s")
        await learned(bottega, first["id"], "done")
        second = await done(bottega, input=TASK, session_id="s", conversation="new")
        (one,) = await given(bottega, second)
        assert (one["arm"], one["content"]) == ("withheld", "")
        assert SENTENCE not in str([r for r in model.requests if r["model"] != THINKER])
        (shown,) = (await learned(bottega, second["id"], "done"))["applications"]
        assert shown["arm"] == "withheld"


async def test_no_other_tenant_is_given_an_insight(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = thinking
    update = {"openai_base_url": model.base_url, "memory_model": THINKER}
    configured = settings.model_copy(update=update | {"learning_withheld_share": 0.0})
    ours, theirs = [await holder(database_url, name) for name in ("ours", "theirs")]
    async with (
        running(configured, database_url, worker=True) as server,
        ours.client(server) as mine,
        theirs.client(server) as other,
    ):
        here, there = replace(server, client=mine), replace(server, client=other)
        for each in (here, there):
            await define(each.client)
            await learned(each, (await finished(each))["id"], "done")
            await learned(each, (await finished(each))["id"], "done")
        found = [insights(await events(each, await finished(each))) for each in (here, there)]
    (one,), (another,) = found
    assert one["source"] != another["source"], "equal sentences of two tenants are two insights"
    assert set(one["episodes"]).isdisjoint(another["episodes"])
    assert len(one["episodes"]) == len(another["episodes"]) == 2


@pytest.mark.deep
async def test_the_arm_drawn_for_a_run_stays_when_its_worker_is_killed(
    database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()

    def held(request: dict[str, Any]) -> Any:
        held_back = request["model"] != THINKER and SENTENCE in str(request["messages"])
        return gated(gate, text("Done.")) if held_back else thinking(request)

    model.decide = held
    env = {
        "DATABASE_URL": database_url,
        "OPENAI_API_KEY": "test",
        "OPENAI_BASE_URL": model.base_url,
        "BOTTEGA_MEMORY_MODEL": THINKER,
    }
    always = {**env, "BOTTEGA_LEARNING_WITHHELD_SHARE": "0"}
    never = {**env, "BOTTEGA_LEARNING_WITHHELD_SHARE": "1"}
    async with (
        command("serve", "--no-worker", "--port", "0", **env) as api,
        client_of(api.port) as client,
    ):
        here: Any = SimpleNamespace(client=client, port=api.port)
        await define(client)
        async with command("worker", **always) as victim:
            await learned(here, (await finished(here))["id"], "done")
            asked = {"agent": "a", "input": TASK, "user": "alice"}
            run_id = (await client.post("/v1/runs", json=asked)).json()["id"]
            await until(lambda: told(model))
            await until(lambda: events(here, {"id": run_id}), insights)
            victim.kill()
            await victim.process.wait()
        gate.set()
        async with command("worker", **never):
            frames = await watch(api.port, run_id)
            (shown,) = (await learned(here, run_id, "done"))["applications"]
    (one,) = insights(frames)
    assert (one["arm"], shown["arm"]) == ("used", "used")
    first, second = told(model)
    assert first == second


def told(model: FakeModel) -> list[Any]:
    """Return the prompts with the insight."""
    return [each["messages"] for each in model.requests if SENTENCE in str(each["messages"])]


async def finished(bottega: Running) -> dict[str, Any]:
    """Execute alice's run to its end, over HTTP alone."""
    body = {"agent": "a", "input": TASK, "user": "alice"}
    run: dict[str, Any] = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert run["status"] == "completed", run
    return run


async def events(bottega: Running, run: dict[str, Any]) -> list[dict[str, Any]]:
    found = await bottega.client.get(f"/v1/runs/{run['id']}/events?limit=100")
    items: list[dict[str, Any]] = found.json()["items"]
    return items
