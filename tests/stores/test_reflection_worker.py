"""Learning after a run: claiming, single execution, retries, failure and repetition."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.clock import utcnow
from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import NotifyListener
from bottega.llm.structured_output import ModelAnalyst
from bottega.llm.vendors import OpenAIProvider
from bottega.memory.episodes.episode import Episode, Outcome, State, StorageState, episode_id_of
from bottega.memory.learning import maintenance as jobs
from bottega.memory.learning.reflection_worker import MOST_TRIES, ReflectionWorker
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Category, Content, ContentKind, Evidence, Pattern
from bottega.runs.read import give_feedback, learnt
from tests.claims import leased
from tests.fake_model import FakeModel, calls, gated, http_error
from tests.memories import make_episode, store_episodes
from tests.pattern_changes import add, merge

PATTERN = UUID(int=7)


class Cache(PatternCache):
    """The real cache, with a pattern whose applications a test can read."""

    async def outcomes(self, owner: asyncpg.Pool) -> list[tuple[Any, ...]]:
        rows = await owner.fetch("SELECT arm, followed, good, features FROM pattern_applications")
        return [(row["arm"], row["followed"], row["good"], row["features"]) for row in rows]


@pytest.fixture
async def cache(database: Database) -> Cache:
    listener = NotifyListener(database.connect)
    cache = Cache(database.pool, listener, clock=utcnow)
    content = Content(ContentKind.HEURISTIC, {"condition": "always", "action": "look"})
    pattern = Pattern(id=PATTERN, name="look", category=Category.STRATEGIC, content=content)
    await add(cache, DEFAULT_TENANT, pattern)
    return cache


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
async def thinking(
    database: Database, cache: Cache, model: FakeModel
) -> AsyncIterator[ReflectionWorker]:
    """Learning by a model."""
    provider = OpenAIProvider("any", api_key="test-key", base_url=model.base_url, patience_s=0)
    analyst = ModelAnalyst(lambda run, name: provider, "thinker")
    yield ReflectionWorker(database.pool, cache, analyst=analyst)
    await provider.aclose()


async def ended(owner: asyncpg.Pool, count: int = 1, **changes: Any) -> list[Episode]:
    """Store finished runs with their episodes."""
    made = []
    for number in range(count):
        run_id = uuid4()
        await owner.execute(
            "INSERT INTO runs (tenant_id, id, mode, agent, input, priority, timeout_s,"
            " queue_timeout_s, pinned, status, memory)"
            " VALUES ($1, $2, 'orchestrated', 'a', '\"x\"', 5, 9, 9, '{}', 'completed', 'full')",
            DEFAULT_TENANT,
            run_id,
        )
        episode = make_episode(f"task {number}", id=episode_id_of(run_id), trace=None)
        made.append(replace(episode, run_id=run_id, **changes))
    await store_episodes(owner, *made, embedded=False)
    return made


async def state(owner: asyncpg.Pool) -> list[tuple[Any, ...]]:
    rows = await owner.fetch("SELECT status, tries, error FROM run_learning ORDER BY run_id")
    return [tuple(row) for row in rows]


async def reflections(owner: asyncpg.Pool) -> dict[UUID, Any]:
    rows = await owner.fetch("SELECT episode_id, reflection FROM episode_reflections")
    return {row["episode_id"]: json.loads(row["reflection"]) for row in rows}


async def make_due(owner: asyncpg.Pool) -> None:
    await owner.execute("UPDATE run_learning SET next_at = now()")


def insight(text: str) -> Any:
    return calls(("answer", {"insights": [text]}))


def episode_metadata(**changes: Any) -> dict[str, Any]:
    baseline = {"name": "unknown", "rate": 0.5, "n": 0}
    pattern = {"id": str(PATTERN), "version": 1, "arm": "trial", "category": "strategic"}
    said = pattern | {"baseline": baseline, "followed": True, "good": None} | changes
    return {"tools_used": [], "agents": [], "patterns": [said], "features": {"domain": "d"}}


async def test_a_run_that_rules_reflect_on_has_learnt_at_its_end(
    owner: asyncpg.Pool, thinking: ReflectionWorker, model: FakeModel
) -> None:
    rules = {"by": "rules", "insights": [], "patterns": [], "failures": [], "performance": {}}
    await ended(owner, reflection=rules)
    assert await state(owner) == [("done", 0, None)]
    assert await thinking.work.do_due() == float("inf")
    await ended(owner, reflection=rules, metadata=episode_metadata())
    await thinking.work.do_due()  # results of its pattern are still to be stored
    assert sorted(await state(owner)) == [("done", 0, None), ("done", 1, None)]
    assert [*(await reflections(owner)).values()] == [rules, rules]
    assert not model.requests


async def test_rules_learn_from_runs_once(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    made = await ended(owner, 3, metadata=episode_metadata())
    learning = ReflectionWorker(database.pool, cache)
    assert await learning.work.do_due() <= 1.0
    assert await state(owner) == [("done", 1, None)] * 3
    written = await reflections(owner)
    assert {each.id for each in made} == written.keys()
    assert {each["by"] for each in written.values()} == {"rules"}
    assert await cache.outcomes(owner) == [("trial", True, True, '{"domain": "d"}')] * 3
    assert await learning.work.do_due() == float("inf")


async def test_a_model_says_what_a_run_teaches(
    thinking: ReflectionWorker, owner: asyncpg.Pool, model: FakeModel, cache: Cache
) -> None:
    (one,) = await ended(owner, metadata=episode_metadata())
    model.script(insight("Look before you leap."))
    await thinking.work.do_due()
    assert await state(owner) == [("done", 1, None)]
    (written,) = (await reflections(owner)).values()
    assert (written["by"], written["insights"]) == ("thinker", ["Look before you leap."])
    asked = json.loads(model.requests[0]["messages"][-1]["content"])
    assert (asked["task"], asked["outcome"]) == ("task 0", "SUCCESS")
    assert await owner.fetchval("SELECT episode_id FROM pattern_applications") == one.id


async def test_a_model_that_is_down_is_retried_a_bounded_number_of_times(
    thinking: ReflectionWorker, owner: asyncpg.Pool, model: FakeModel, cache: Cache
) -> None:
    await ended(owner, metadata=episode_metadata())
    model.script(*[http_error(503)] * MOST_TRIES)
    pauses = []
    for number in range(1, MOST_TRIES + 1):
        await thinking.work.do_due()
        (row,) = await owner.fetch(
            "SELECT *, extract(epoch FROM next_at - now()) AS s FROM run_learning"
        )
        assert row["status"] == ("pending" if number < MOST_TRIES else "failed")
        assert row["tries"] == number
        assert "is down" in row["error"] or "503" in row["error"]
        pauses.append(row["s"])
        assert await reflections(owner) == {}
        await make_due(owner)
    assert pauses[0] < pauses[1] < pauses[2]
    assert len(await cache.outcomes(owner)) == 1  # outcomes of patterns need no model
    assert await thinking.work.do_due() == float("inf")
    async with acting_as(thinking._pool, DEFAULT_TENANT) as connection:
        await jobs.order(connection, DEFAULT_TENANT, "nightly")
        assert (await state(owner))[0][:2] == ("failed", MOST_TRIES)
        await jobs.order(connection, DEFAULT_TENANT)
    model.script(insight("at last"))
    await thinking.work.do_due()
    assert await state(owner) == [("done", 1, None)]


async def test_an_episode_that_fails_the_model_delays_no_other(
    thinking: ReflectionWorker, owner: asyncpg.Pool, model: FakeModel
) -> None:
    await ended(owner, 3)

    def decide(request: dict[str, Any]) -> Any:
        bad = "task 1" in request["messages"][-1]["content"]
        return http_error(400) if bad else insight("fine")

    model.decide = decide
    await thinking.work.do_due()
    assert sorted(status for status, *_ in await state(owner)) == ["done", "done", "pending"]
    assert len(await reflections(owner)) == 2


async def test_an_unreadable_episode_delays_no_other(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    await ended(owner, 2)
    await ended(owner, metadata=episode_metadata(category="unheard of"))
    await ReflectionWorker(database.pool, cache).work.do_due()
    assert sorted(status for status, *_ in await state(owner)) == ["done", "done", "pending"]
    (error,) = [error for *_, error in await state(owner) if error]
    assert error.startswith("an internal error (ValueError)")


async def test_feedback_causes_learning_from_the_run_again(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    (one,) = await ended(owner, metadata=episode_metadata())
    learning = ReflectionWorker(database.pool, cache)
    await learning.work.do_due()
    before = await reflections(owner)
    assert await cache.outcomes(owner) == [("trial", True, True, '{"domain": "d"}')]
    assert one.run_id is not None
    async with database.begin(DEFAULT_TENANT) as connection:
        await give_feedback(connection, DEFAULT_TENANT, one.run_id, "me", outcome="FAILURE")
    assert await state(owner) == [("pending", 0, None)]
    await learning.work.do_due()
    assert await state(owner) == [("done", 1, None)]
    assert await cache.outcomes(owner) == [("trial", True, False, '{"domain": "d"}')]
    assert await reflections(owner) == before  # it is written once


async def test_runs_without_evidence_change_no_pattern(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    await ended(owner, metadata=episode_metadata(), outcome=Outcome.CANCELLED)
    await ended(owner, metadata=episode_metadata(), state=State(state=StorageState.QUARANTINED))
    await ReflectionWorker(database.pool, cache).work.do_due()
    assert await state(owner) == [("done", 1, None)] * 2
    assert await cache.outcomes(owner) == []


async def test_withdrawn_evidence_is_removed(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    await ended(owner, metadata=episode_metadata())
    learning = ReflectionWorker(database.pool, cache)
    await learning.work.do_due()
    await owner.execute("UPDATE episode_state SET state = 'quarantined'")
    await owner.execute("UPDATE run_learning SET status = 'pending', tries = 0, next_at = now()")
    await learning.work.do_due()
    assert [good for _, _, good, _ in await cache.outcomes(owner)] == [None]


async def test_feedback_reaches_the_merged_pattern(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    (one,) = await ended(owner, metadata=episode_metadata())
    learning = ReflectionWorker(database.pool, cache)
    await learning.work.do_due()
    was = await cache.get(DEFAULT_TENANT, PATTERN)

    def content(approach: str) -> Content:
        return replace(was.content, fields={"approach": approach})

    other = await add(cache, DEFAULT_TENANT, was.with_changes(id=None, content=content("too")))
    merged = await merge(cache, DEFAULT_TENANT, [PATTERN, other.key])
    third = await add(cache, DEFAULT_TENANT, was.with_changes(id=None, content=content("as well")))
    merged = await merge(cache, DEFAULT_TENANT, [merged.key, third.key])
    assert one.run_id is not None
    async with database.begin(DEFAULT_TENANT) as connection:
        await give_feedback(connection, DEFAULT_TENANT, one.run_id, "me", outcome="FAILURE")
    await learning.work.do_due()
    assert (await cache.get(DEFAULT_TENANT, merged.key)).evidence.contrary == (one.id,)
    assert [good for _, _, good, _ in await cache.outcomes(owner)] == [False] * 3


@pytest.mark.parametrize("later", ["archived", "consolidated"])
async def test_aged_episodes_remain_evidence(
    database: Database, owner: asyncpg.Pool, cache: Cache, later: str
) -> None:
    (one,) = await ended(owner, metadata=episode_metadata())
    learning = ReflectionWorker(database.pool, cache)
    await learning.work.do_due()
    await owner.execute("UPDATE episode_state SET state = $1", later)
    assert one.run_id is not None
    for outcome, good in ((None, True), ("FAILURE", False)):
        async with database.begin(DEFAULT_TENANT) as connection:
            await give_feedback(
                connection, DEFAULT_TENANT, one.run_id, "me", outcome=outcome, comment="thank you"
            )
        await learning.work.do_due()
        assert [each for _, _, each, _ in await cache.outcomes(owner)] == [good]


async def test_a_run_shows_its_lessons(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    one, other = await ended(owner, 2, metadata=episode_metadata())
    await ReflectionWorker(database.pool, cache).work.do_due()
    content = Content(ContentKind.HEURISTIC, {"condition": "c", "action": "a"})
    mined = Pattern(
        name="mined",
        category=Category.SEQUENCE,
        content=content,
        evidence=Evidence(mined_from=(one.id or PATTERN,)),
    )
    found = await add(cache, DEFAULT_TENANT, mined)
    async with database.begin(DEFAULT_TENANT) as connection:
        first, second, nothing = [
            await learnt(connection, DEFAULT_TENANT, run_id)
            for run_id in (one.run_id or PATTERN, other.run_id or PATTERN, PATTERN)
        ]
    assert (first["status"], first["by"]) == ("done", "rules")
    assert [(each["id"], each["state"]) for each in first["candidates"]] == [
        (found.id, "CANDIDATE")
    ]
    (application,) = first["applications"]
    assert (application["pattern_id"], application["arm"]) == (PATTERN, "trial")
    assert second["candidates"] == []
    assert (nothing["status"], nothing["insights"], nothing["applications"]) == (None, [], [])


async def test_another_worker_continues_after_one_died(
    database: Database, owner: asyncpg.Pool, cache: Cache
) -> None:
    await ended(owner)
    assert len(await leased(owner, "learn", lease_s=300)) == 1  # by a worker that dies
    learning = ReflectionWorker(database.pool, cache)
    assert 0 < await learning.work.do_due() <= 300
    assert await state(owner) == [("pending", 1, None)]
    await make_due(owner)
    await learning.work.do_due()
    assert await state(owner) == [("done", 2, None)]


async def test_learning_that_was_requested_again_meanwhile_is_not_ended_by_the_earlier_one(
    thinking: ReflectionWorker, database: Database, owner: asyncpg.Pool, model: FakeModel
) -> None:
    (one,) = await ended(owner, metadata=episode_metadata())
    assert one.run_id is not None
    gate = asyncio.Event()
    model.script(gated(gate, insight("first")))
    learning = asyncio.ensure_future(thinking.work.do_due())
    await model.received()
    async with database.begin(DEFAULT_TENANT) as connection:
        await give_feedback(connection, DEFAULT_TENANT, one.run_id, "me", outcome="FAILURE")
    gate.set()
    await learning
    assert await state(owner) == [("pending", 0, None)]
