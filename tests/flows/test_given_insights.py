"""Insights of reflections in later runs of the scope: given, withheld, counted, retired."""

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import pytest

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_episodes import judge
from tests.flows.test_learning import THINKER, define, done, learned
from tests.service import Running, running

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
        second = await done(bottega, input=TASK, session_id="s")
        (one,) = await given(bottega, second)
        assert (one["arm"], one["content"]) == ("withheld", "")
        assert SENTENCE not in str([r for r in model.requests if r["model"] != THINKER])
        (shown,) = (await learned(bottega, second["id"], "done"))["applications"]
        assert shown["arm"] == "withheld"
