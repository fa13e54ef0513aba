"""Insights of reflections in later runs of the scope: given, withheld, counted, retired."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_learning import THINKER, define, done, learned
from tests.service import Running, running
from tests.tenants import holder

SENTENCE = "Ask the ledger of Fabriano before you add invoices."
TASK = "Add the invoices of the paper mill in Fabriano."


def insights(frames: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        each["data"]
        for each in frames
        if each["type"] == "context.recalled" and each["data"]["source"].startswith("insight:")
    ]


async def insights_of(bottega: Running, run: dict[str, Any]) -> list[dict[str, Any]]:
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
    """A service with a scripted model that reflects."""
    model.decide = thinking
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "memory_model": THINKER}
    )
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        yield bottega


async def test_the_next_run_of_the_scope_is_given_what_reflection_found(
    thinker: Running, model: FakeModel
) -> None:
    first = await done(thinker, input=TASK, user="alice")
    assert await insights_of(thinker, first) == []
    found = await learned(thinker, first["id"], "done")
    assert found["insights"] == [SENTENCE]
    second = await done(thinker, input=TASK, user="alice")
    (one,) = await insights_of(thinker, second)
    assert one["content"].splitlines()[1].strip() == SENTENCE
    assert one["episodes"] == [str(episode_id_of(UUID(first["id"])))]
    asked = [each for each in model.requests if each["model"] != THINKER]
    assert SENTENCE in str(asked[-1]["messages"])
    # Not another user's, and nothing for another task.
    assert await insights_of(thinker, await done(thinker, input=TASK, user="bob")) == []
    assert await insights_of(thinker, await done(thinker, input=TASK)) == []
    other = await done(thinker, input="Paint a fence green.", user="alice")
    assert await insights_of(thinker, other) == []


@pytest.mark.deep
async def test_no_other_tenant_is_given_an_insight(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = thinking
    update = {"openai_base_url": model.base_url, "memory_model": THINKER}
    configured = settings.model_copy(update=update)
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
