"""The pattern cache on its database rows."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import to_json

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.events.listener import NotifyListener
from bottega.memory.episodes.episode import Outcome, StorageState
from bottega.memory.patterns import store
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.evidence import Verdict
from bottega.memory.patterns.pattern import (
    Applicability,
    Application,
    Arm,
    Category,
    Content,
    ContentKind,
    Evidence,
    Features,
    Guide,
    Pattern,
    PatternState,
    Relations,
)
from tests.memories import day, make_episode, store_episodes
from tests.pattern_changes import add, deprecate, merge, record, update

TENANT = DEFAULT_TENANT
NOW = day(100)
LATER = NOW + timedelta(minutes=1)
"""After a pattern was validated."""
GOOD, BAD = True, False
CANDIDATE, VALIDATED = PatternState.CANDIDATE, PatternState.VALIDATED
IN_REVIEW, DEPRECATED = PatternState.IN_REVIEW, PatternState.DEPRECATED


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def cache(database: Database, clock: Hands) -> PatternCache:
    return cache_of(database, clock)


def cache_of(database: Database, clock: Hands) -> PatternCache:
    """Return a cache that gets no notices, so it reads everything again."""
    listener = NotifyListener(database.connect)
    return PatternCache(database.pool, listener, clock)


def pattern(name: str = "Ask first", **more: Any) -> Pattern:
    fields: dict[str, Any] = {
        "category": Category.STRATEGIC,
        "content": Content(
            ContentKind.STRATEGY,
            {"approach": f"{name}."},
            uses=("ask", "look"),
            affects=("look",),
        ),
        "applicability": Applicability(
            problem_types=("report",),
            domains=("office",),
            complexity=(0.2, 0.9),
            conditions=({"feature": "tool", "op": "eq", "value": "look"},),
        ),
        "summary": "Ask first.",
        "guide": Guide(when="always", alternatives=(uuid4(),)),
        "relations": Relations(specializes=uuid4(), contradicts=(uuid4(),)),
        "origin": {"by": "test"},
        "trust": 3,
    }
    return Pattern(name=name, **(fields | more))


def applied(
    of: Pattern,
    outcomes: Sequence[bool | None],
    arm: Arm = Arm.TRIAL,
    *,
    first: datetime = NOW - timedelta(days=10),
    **more: Any,
) -> list[Application]:
    """Return applications without episodes, a minute apart."""
    return [
        Application(
            pattern_id=of.key,
            version=of.version,
            arm=arm,
            at=first + timedelta(minutes=n),
            good=good,
            **more,
        )
        for n, good in enumerate(outcomes)
    ]


async def counts(owner: asyncpg.Pool) -> list[asyncpg.Record]:
    found: list[asyncpg.Record] = await owner.fetch(
        "SELECT * FROM pattern_applications ORDER BY at, id"
    )
    return found


async def promoted(cache: PatternCache, **more: Any) -> Pattern:
    """Add a pattern that was validated with 18 successes of 20, and none of 8 without it."""
    added = await add(cache, TENANT, pattern(**more))
    await record(cache, TENANT, applied(added, [BAD] * 8, Arm.CONTROL))
    await record(cache, TENANT, applied(added, [BAD] * 2 + [GOOD] * 18))
    now = await cache.get(TENANT, added.key)
    assert now.state is VALIDATED
    return now


class TestOne:
    async def test_a_new_pattern_is_read_back_as_a_candidate(
        self, database: Database, cache: PatternCache
    ) -> None:
        episodes = await store_episodes(
            database.pool, make_episode("a"), make_episode("b"), embedded=False
        )
        new = pattern(evidence=Evidence(mined_from=tuple(sorted(episodes))), fingerprint="f")
        added = await add(cache, TENANT, new)
        assert added == new.with_changes(id=added.id, created_at=NOW, updated_at=NOW)
        assert added == await cache.get(TENANT, added.key)
        assert (added.state, added.version, added.key.version) == (CANDIDATE, 1, 7)

    async def test_concurrent_equal_patterns_are_stored_once(
        self, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        for new in (pattern(fingerprint="f"), pattern("written by a client")):
            added = await asyncio.gather(*(add(cache, TENANT, new) for _ in range(5)))
            assert len({each.id for each in added}) == 1
        assert await owner.fetchval("SELECT count(*) FROM patterns") == 2

    async def test_a_twin_is_merged_with_the_pattern_in_use(
        self, database: Database, cache: PatternCache
    ) -> None:
        old, new = await store_episodes(
            database.pool, *(make_episode("b", day(n)) for n in (1, 2)), embedded=False
        )

        def found_in(name: str, episode: UUID, **more: Any) -> Pattern:
            content = pattern().content
            return pattern(name, content=content, evidence=Evidence(mined_from=(episode,)), **more)

        one = await add(cache, TENANT, found_in("one", old, fingerprint="f"))
        twin = await add(cache, TENANT, found_in("two", new, summary="in other words"))
        assert (twin.id, twin.name, twin.version) == (one.id, "one", 1)
        assert set(twin.evidence.mined_from) == {old, new}
        await deprecate(cache, TENANT, one.key, "of no use")
        assert (await add(cache, TENANT, found_in("three", new))).id != one.id

    async def test_a_twin_has_the_same_trust(self, cache: PatternCache) -> None:
        content = pattern().content
        one = await add(cache, TENANT, pattern("one", content=content, trust=1))
        assert (await add(cache, TENANT, pattern("two", content=content, trust=3))).id != one.id
        assert (await add(cache, TENANT, pattern("three", content=content, trust=1))).id == one.id

    async def test_a_twin_is_found_by_an_index(self, database: Database) -> None:
        async with acting_as(database.pool, TENANT) as connection:
            await connection.execute("SET LOCAL enable_seqscan = off")
            values = (TENANT, "strategic", to_json(pattern().document).decode(), 1, "f")
            plan = await connection.fetch(f"EXPLAIN {store._KNOWN}", *values)
        assert "ix_patterns_meaning" in str(plan)

    async def test_a_deprecated_pattern_returns_after_enough_new_episodes(
        self, database: Database, cache: PatternCache, clock: Hands
    ) -> None:
        added = await add(cache, TENANT, pattern(fingerprint="f"))
        await deprecate(cache, TENANT, added.key, "of no use")
        before = await store_episodes(
            database.pool, *(make_episode("b", day(99)) for _ in range(9)), embedded=False
        )
        since = await store_episodes(
            database.pool, *(make_episode("b", day(101)) for _ in range(5)), embedded=False
        )
        clock.now = day(110)

        def again(*episodes: UUID) -> Pattern:
            return pattern(fingerprint="f", evidence=Evidence(mined_from=episodes))

        assert (await add(cache, TENANT, again(*before, *since[:4]))).state is DEPRECATED
        back = await add(cache, TENANT, again(*before, *since))
        assert (back.id, back.state, back.version) == (added.id, CANDIDATE, 2)
        assert back.lifecycle.reason is None
        assert set(back.evidence.mined_from) == {*before, *since}

    async def test_a_pattern_that_a_person_deprecated_returns_only_by_a_change(
        self, database: Database, cache: PatternCache
    ) -> None:
        added = await add(cache, TENANT, pattern(fingerprint="f"))
        gone = await deprecate(cache, TENANT, added.key, "of no use", by="key:btg_x")
        assert gone.origin["deprecated_by"] == "key:btg_x"
        since = await store_episodes(
            database.pool, *(make_episode("b", day(101)) for _ in range(9)), embedded=False
        )
        again = pattern(fingerprint="f", evidence=Evidence(mined_from=tuple(since)))
        assert (await add(cache, TENANT, again)).state is DEPRECATED
        back = await update(cache, TENANT, added.key, gone.version, {"summary": "Better."})
        assert (back.state, back.origin) == (CANDIDATE, added.origin)

    async def test_a_replaced_pattern_does_not_return(
        self, database: Database, cache: PatternCache
    ) -> None:
        added = await add(cache, TENANT, pattern(fingerprint="f"))
        other = await add(cache, TENANT, pattern("another"))
        await deprecate(cache, TENANT, added.key, "better", other.key)
        since = await store_episodes(
            database.pool, *(make_episode("b", day(101)) for _ in range(5)), embedded=False
        )
        again = pattern(fingerprint="f", evidence=Evidence(mined_from=tuple(since)))
        assert (await add(cache, TENANT, again)).state is DEPRECATED

    async def test_patterns_of_another_tenant_are_not_found(
        self, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        added = await add(cache, TENANT, pattern(fingerprint="f"))
        other = uuid4()
        await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, 'other')", other)
        for doing in (
            cache.get(other, added.key),
            cache.validate(other, [added.key]),
            update(cache, other, added.key, 1, {"name": "mine"}),
            deprecate(cache, other, added.key, "mine"),
        ):
            with pytest.raises(NotFoundError, match=f"there is no pattern {added.key}"):
                await doing
        assert await cache.page(other, limit=9) == []
        assert await record(cache, other, applied(added, [GOOD])) == 0
        assert (await add(cache, other, pattern(fingerprint="f"))).id != added.id


class TestUpdate:
    @pytest.mark.parametrize(
        "changes", [{"summary": "New."}, {"name": "New"}, {"guide": Guide(how="New.")}]
    )
    async def test_a_change_of_the_rendered_text_needs_a_new_trial(
        self, cache: PatternCache, changes: dict[str, Any]
    ) -> None:
        was = await promoted(cache)
        now = await update(cache, TENANT, was.key, 1, changes)
        assert (now.version, now.state, now.evidence.applications) == (2, CANDIDATE, 0)

    async def test_a_change_that_is_not_rendered_keeps_the_evidence(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        was = await promoted(cache)
        [episode] = await store_episodes(database.pool, make_episode("c"), embedded=False)
        late = [replace(each, episode_id=episode) for each in applied(was, [GOOD])]
        await record(cache, TENANT, late)
        now = await update(cache, TENANT, was.key, 1, {"detail": "New."})
        assert (now.version, now.state) == (2, VALIDATED)
        [found] = await cache.validate(TENANT, [was.key])
        assert found.lately.given == (19, 21)
        # A later outcome of a run that was given version 1 is not a second application.
        assert await record(cache, TENANT, [replace(late[0], good=BAD)]) == 1
        [found] = await cache.validate(TENANT, [was.key])
        assert found.lately.given == (18, 21)
        assert len(await counts(owner)) == 21 + 8

    async def test_of_two_changes_to_one_version_one_is_refused(self, cache: PatternCache) -> None:
        added = await add(cache, TENANT, pattern())
        done = await asyncio.gather(
            *(update(cache, TENANT, added.key, 1, {"summary": each}) for each in "abc"),
            return_exceptions=True,
        )
        refused = [each for each in done if isinstance(each, ConflictError)]
        assert [each.code for each in refused] == ["stale_version"] * 2
        assert (await cache.get(TENANT, added.key)).version == 2


class TestApplications:
    @pytest.mark.parametrize("arm", [Arm.TRIAL, Arm.CONTROL, Arm.USED, Arm.WITHHELD])
    async def test_reports_cannot_change_an_assignment(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool, arm: Arm
    ) -> None:
        added = await add(cache, TENANT, pattern())
        drawn = {"patterns": [{"id": str(added.key), "arm": arm}]}
        ids = await store_episodes(
            database.pool,
            make_episode("a", metadata=drawn),
            make_episode("b", metadata=drawn),
            embedded=False,
        )
        first, second = [replace(applied(added, [BAD], arm)[0], episode_id=each) for each in ids]
        assert await record(cache, TENANT, [first]) == 1
        reported = [replace(each, arm=Arm.REPORTED, good=GOOD) for each in (first, second)]
        assert await record(cache, TENANT, reported) == 0
        # The outcome of the second is unknown, and no later one is counted before it.
        assert await record(cache, TENANT, [second]) == 1
        assert [(row["arm"], row["good"]) for row in await counts(owner)] == [(arm, BAD)] * 2

    async def test_a_repeated_run_is_not_counted_twice(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        added = await add(cache, TENANT, pattern())
        runs = [uuid4() for _ in range(4)]
        for run, before in zip(runs, [None, *runs], strict=False):
            await owner.execute(
                "INSERT INTO runs (tenant_id, id, mode, agent, input, priority, timeout_s,"
                " queue_timeout_s, pinned, status, memory, retry_of)"
                " VALUES ($1, $2, 'orchestrated', 'a', '\"x\"', 5, 9, 9, '{}', 'completed',"
                " 'full', $3)",
                *(TENANT, run, before),
            )
        ids = await store_episodes(
            database.pool, *(make_episode("a", run_id=each) for each in runs), embedded=False
        )
        tries = [replace(applied(added, [BAD])[0], episode_id=each) for each in ids]
        again = [replace(each, good=GOOD) for each in tries[1:]]
        # The first run's outcome is unknown and not counted, so the next run's is.
        nothing = replace(tries[0], good=None)
        assert await record(cache, TENANT, [nothing, again[0], again[1]]) == 2
        assert await record(cache, TENANT, [again[2]]) == 0
        good = [row["good"] for row in await counts(owner)]
        assert sorted(good, key=str) == [None, GOOD]

    async def test_ids_of_deleted_episodes_are_removed(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        [kept, gone] = await store_episodes(
            database.pool, make_episode("a"), make_episode("b"), embedded=False
        )
        async with acting_as(database.pool, TENANT) as connection:
            await connection.execute("SELECT erase_episodes($1)", [gone])
        evidence = Evidence(mined_from=(kept, gone))
        assert (await add(cache, TENANT, pattern(evidence=evidence))).evidence.mined_from == (kept,)

    async def test_an_episode_erased_meanwhile_is_not_named(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        added = await add(cache, TENANT, pattern())
        [gone] = await store_episodes(database.pool, make_episode("a"), embedded=False)
        given = [replace(applied(added, [GOOD])[0], episode_id=gone)]

        async def erase() -> None:
            async with acting_as(database.pool, TENANT) as connection:
                await connection.execute("SELECT erase_episodes($1)", [gone])

        async with acting_as(database.pool, TENANT) as connection:
            assert await cache.store(connection, TENANT).record_application(given) == 1
            erasing = asyncio.create_task(erase())
            while not await owner.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            ):
                assert not erasing.done()
        await erasing
        assert [row["episode_id"] for row in await counts(owner)] == [None]

    async def test_applications_count_once_with_the_last_outcome(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool, clock: Hands
    ) -> None:
        added = await add(cache, TENANT, pattern())
        episodes = await store_episodes(
            database.pool, make_episode("a"), make_episode("b"), embedded=False
        )
        first = [
            replace(each, episode_id=episode, features={"domain": "office"})
            for each, episode in zip(applied(added, [GOOD, None]), episodes, strict=True)
        ]
        assert await record(cache, TENANT, first) == 2
        assert await record(cache, TENANT, first) == 0
        now = (await cache.get(TENANT, added.key)).lifecycle
        assert (now.uses, now.last_used) == (2, first[1].at)
        later = [replace(first[0], good=BAD)]
        assert await record(cache, TENANT, [*first[:1], *later]) == 1
        rows = await counts(owner)
        assert [row["good"] for row in rows] == [BAD, None]
        found = await cache.get(TENANT, added.key)
        assert found.lifecycle.uses == 2
        assert found.evidence.contrary == (episodes[0],)
        assert found.evidence.supporting == ()

    async def test_untrusted_episodes_are_no_evidence(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        source, trusted = await store_episodes(
            database.pool, make_episode("s"), make_episode("t"), embedded=False
        )
        added = await add(cache, TENANT, pattern(evidence=Evidence(mined_from=(source,))))
        others = await store_episodes(
            database.pool,
            make_episode("given by somebody", trust=1),
            make_episode("cancelled", outcome=Outcome.CANCELLED),
            make_episode("quarantined"),
            make_episode("forgotten"),
            embedded=False,
        )
        await owner.execute(
            "UPDATE episode_state SET state = CASE episode_id WHEN $1 THEN $3 ELSE $4 END "
            "WHERE episode_id IN ($1, $2)",
            *(others[2], others[3], StorageState.QUARANTINED, StorageState.DELETED),
        )
        [one] = applied(added, [GOOD])
        ids = [source, *others, uuid4(), trusted]
        given = [replace(one, episode_id=each) for each in ids]
        unknown = [replace(one, pattern_id=uuid4()), replace(one, version=2)]
        assert await record(cache, TENANT, [*given, *unknown]) == 1
        assert [row["episode_id"] for row in await counts(owner)] == [trusted]
        assert (await cache.get(TENANT, added.key)).lifecycle.uses == 1

    async def test_a_withheld_pattern_is_not_used(self, cache: PatternCache) -> None:
        added = await add(cache, TENANT, pattern())
        for arm in (Arm.CONTROL, Arm.WITHHELD):
            await record(cache, TENANT, applied(added, [GOOD], arm))
        assert (await cache.get(TENANT, added.key)).lifecycle.uses == 0
        [found] = await cache.validate(TENANT)
        assert found.lately.given.n == 0

    async def test_concurrent_applications_are_all_counted(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        added = [await add(cache, TENANT, pattern(str(n))) for n in range(3)]
        episodes = await store_episodes(
            database.pool, *(make_episode(str(n)) for n in range(20)), embedded=False
        )
        batches = [
            [
                replace(applied(each, [GOOD])[0], episode_id=episode)
                for each in (added if n % 2 else added[::-1])
            ]
            for n, episode in enumerate(episodes)
        ]
        await asyncio.gather(*(record(cache, TENANT, batch) for batch in (*batches, *batches)))
        assert len(await counts(owner)) == 60
        for each in added:
            assert (await cache.get(TENANT, each.key)).lifecycle.uses == 20

    async def test_applications_join_the_caller_s_transaction(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        added = await add(cache, TENANT, pattern())
        async with acting_as(database.pool, TENANT) as connection:
            await cache.store(connection, TENANT).record_application(applied(added, [GOOD]))
            assert await counts(owner) == []
        assert len(await counts(owner)) == 1


class TestValidation:
    async def test_a_look_is_made_once_at_its_number(
        self, cache: PatternCache, owner: asyncpg.Pool, clock: Hands
    ) -> None:
        added = await add(cache, TENANT, pattern())
        await record(cache, TENANT, applied(added, [GOOD] * 2 + [BAD] * 6, Arm.CONTROL))
        tried = applied(added, [GOOD] * 16)
        await record(cache, TENANT, tried[:7])
        assert (await cache.get(TENANT, added.key)).lifecycle.decision is None
        await record(cache, TENANT, tried[7:8])
        decision = "8 of 8 with it, 2 of 8 without: p = 0.003, level 0.001: stays on trial"
        for n in range(8, 15):
            await record(cache, TENANT, tried[n : n + 1])
            [found] = await cache.validate(TENANT)
            assert (found.now.state, found.now.lifecycle.decision) == (CANDIDATE, decision)
        rows = await owner.fetch("SELECT * FROM patterns")
        clock.now += timedelta(hours=1)
        await cache.validate(TENANT)
        assert await owner.fetch("SELECT * FROM patterns") == rows
        await record(cache, TENANT, tried[15:])
        now = await cache.get(TENANT, added.key)
        assert now.state is VALIDATED
        assert now.lifecycle.decision == (
            "16 of 16 with it, 2 of 8 without: p = 0.0002, level 0.005: is validated"
        )

    async def test_a_look_follows_a_late_label(
        self, database: Database, cache: PatternCache
    ) -> None:
        added = await add(cache, TENANT, pattern())
        await record(cache, TENANT, applied(added, [BAD] * 8, Arm.CONTROL))
        await record(cache, TENANT, applied(added, [GOOD] * 7))
        [episode] = await store_episodes(database.pool, make_episode("l"), embedded=False)
        [late] = applied(added, [None])
        await record(cache, TENANT, [replace(late, episode_id=episode)])
        assert (await cache.get(TENANT, added.key)).state is CANDIDATE
        await record(cache, TENANT, [replace(late, episode_id=episode, good=GOOD)])
        assert (await cache.get(TENANT, added.key)).state is VALIDATED

    async def test_the_verdict_uses_recent_evidence(
        self, cache: PatternCache, clock: Hands
    ) -> None:
        was = await promoted(cache)
        clock.now = NOW + timedelta(days=85)
        [found] = await cache.validate(TENANT)
        assert found.lately.verdict is Verdict.INSUFFICIENT_EVIDENCE
        assert found.lately.given.n == 0
        assert found.now.state is VALIDATED
        now = await cache.get(TENANT, was.key)
        assert now.evidence.confidence == was.evidence.confidence

    async def test_a_known_rate_is_compared_with(self, cache: PatternCache) -> None:
        added = await add(cache, TENANT, pattern())
        easy = applied(added, [GOOD] * 18 + [BAD] * 2, Arm.REPORTED, baseline_rate=0.9)
        await record(cache, TENANT, easy)
        [found] = await cache.validate(TENANT, [added.key])
        assert (found.lately.verdict, found.now.state) == (Verdict.IN_REVIEW, CANDIDATE)
        baseline = found.lately.baseline
        assert (baseline.name, round(baseline.rate, 9)) == ("given", 0.9)

    async def test_savings_are_computed(self, cache: PatternCache) -> None:
        added = await add(cache, TENANT, pattern())
        await record(cache, TENANT, applied(added, [GOOD] * 5, duration_s=2.0, tokens=100))
        await cache.validate(TENANT)
        assert (await cache.get(TENANT, added.key)).evidence.tokens_saved is None
        without = applied(added, [BAD] * 4, Arm.CONTROL, duration_s=5.0, tokens=300)
        await record(cache, TENANT, without)
        await cache.validate(TENANT)
        found = (await cache.get(TENANT, added.key)).evidence
        assert (found.time_saved_s, found.tokens_saved) == (3.0, 200.0)

    async def test_a_validated_pattern_that_lacks_significance_stays(
        self, cache: PatternCache, clock: Hands
    ) -> None:
        was = await promoted(cache)
        clock.now = NOW + timedelta(days=85)
        later = applied(
            was, [GOOD, GOOD, GOOD, BAD] * 2, Arm.USED, first=clock.now - timedelta(days=1)
        )
        await record(cache, TENANT, later)
        [found] = await cache.validate(TENANT)
        assert found.lately.verdict is Verdict.IN_REVIEW
        assert (found.was.state, found.now.state) == (VALIDATED, VALIDATED)

    async def test_validation_covers_all_pages(
        self, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        added = await add(cache, TENANT, pattern())
        await owner.execute(
            """
            INSERT INTO patterns (tenant_id, name, category, document, origin)
            SELECT tenant_id, 'n', category, document, origin
            FROM patterns, generate_series(1, 450)
            """
        )
        found = await cache.validate(TENANT)
        assert len({each.now.key for each in found}) == 451
        assert {each.lately.verdict for each in found} == {Verdict.INSUFFICIENT_EVIDENCE}
        assert (await cache.get(TENANT, added.key)).evidence.verdict is None


class TestDeprecation:
    async def test_other_processes_are_notified_of_changes_but_not_of_uses(
        self, cache: PatternCache, database: Database, owner: asyncpg.Pool, database_url: str
    ) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        listener = await asyncpg.connect(database_url)
        try:
            await listener.add_listener(store.CHANNEL, lambda *said: heard.put_nowait(said[3]))

            async def news() -> list[str]:
                """Return the notices up to here; they arrive in the order of sending."""
                await database.trust.signals.sent()
                await owner.execute(f"NOTIFY {store.CHANNEL}, 'here'")
                found = []
                while (said := await heard.get()) != "here":
                    found.append(said)
                return found

            added = await add(cache, TENANT, pattern())
            assert await news() == [str(TENANT)]
            await record(cache, TENANT, applied(added, [BAD] * 8, Arm.CONTROL))
            await record(cache, TENANT, applied(added, [GOOD] * 7))
            assert await news() == []
            await record(cache, TENANT, applied(added, [GOOD]))
            assert await news() == [str(TENANT)]
            await cache.validate(TENANT)
            assert await news() == []
            await update(cache, TENANT, added.key, 1, {"summary": "New."})
            assert await news() == [str(TENANT)]
            await deprecate(cache, TENANT, added.key, "of no use")
            assert await news() == [str(TENANT)]
            await deprecate(cache, TENANT, added.key, "of no use")
            assert await news() == []
        finally:
            await listener.close()


class TestMerging:
    async def test_evidence_is_pooled_and_counts_once(
        self, database: Database, cache: PatternCache, owner: asyncpg.Pool
    ) -> None:
        ids = await store_episodes(
            database.pool, *(make_episode(str(n)) for n in range(12)), embedded=False
        )
        one = await add(cache, TENANT, pattern("1", evidence=Evidence(mined_from=(ids[0],))))
        when = replace(one.applicability, domains=("law",), complexity=(0.5, 1.0))
        two = await add(
            cache,
            TENANT,
            pattern("2", applicability=when, evidence=Evidence(mined_from=(ids[1],)), trust=2),
        )

        def of(each: Pattern, episodes: Sequence[UUID]) -> list[Application]:
            made = applied(each, [GOOD] * len(episodes))
            return [replace(a, episode_id=e) for a, e in zip(made, episodes, strict=True)]

        await record(cache, TENANT, of(one, ids[1:8]))
        await record(cache, TENANT, of(two, [ids[0], *ids[5:12]]))
        await cache.validate(TENANT)
        now = await merge(cache, TENANT, [two.key, one.key])
        # 2 to 11: the first two are the episodes from which one pattern was mined.
        assert now.evidence.applications == 10
        before = [(await cache.get(TENANT, each.key)).lifecycle for each in (one, two)]
        assert now.lifecycle.uses == sum(each.uses for each in before) == 15
        assert now.lifecycle.last_used == max(each.last_used or NOW for each in before)
        assert set(now.evidence.supporting) == set(ids[2:])
        assert set(now.evidence.mined_from) == set(ids[:2])
        assert (now.state, now.version, now.trust) == (CANDIDATE, 1, 2)
        assert now.applicability == Applicability(
            problem_types=("report",),
            domains=("office", "law"),
            complexity=(0.2, 1.0),
            conditions=one.applicability.conditions,
        )
        for each in (one, two):
            was = await cache.get(TENANT, each.key)
            assert (was.state, was.lifecycle.replaced_by) == (DEPRECATED, now.id)
        with pytest.raises(InvalidInputError, match="is deprecated"):
            await merge(cache, TENANT, [one.key, now.key])

    async def test_similar_patterns_are_found(self, cache: PatternCache) -> None:
        one = await add(cache, TENANT, pattern("1"))
        same = await add(cache, TENANT, pattern("1!"))
        near = await add(
            cache,
            TENANT,
            pattern(
                "near",
                content=one.content,
                applicability=replace(one.applicability, domains=("law",)),
            ),
        )
        far = await add(
            cache, TENANT, pattern("far", content=Content(ContentKind.HEURISTIC, uses=("other",)))
        )
        await add(cache, TENANT, pattern("of another kind", category=Category.DOMAIN))
        gone = await add(cache, TENANT, pattern("gone"))
        await deprecate(cache, TENANT, gone.key, "of no use")
        found = await cache.similar(TENANT, one, 9)
        assert [each.id for each, _ in found] == [same.id, near.id, far.id]
        assert found[0][1] == 1.0
        assert 0.5 < found[1][1] < 1.0
        assert [each.id for each, _ in await cache.similar(TENANT, one, 1)] == [same.id]


class TestPruning:
    async def test_low_value_candidates_are_pruned(self, cache: PatternCache, clock: Hands) -> None:
        harmful, hopeless, good, fresh = [
            await add(cache, TENANT, pattern(name)) for name in ("harmful", "hopeless", "good", "f")
        ]
        await record(cache, TENANT, applied(harmful, [BAD] * 11 + [GOOD]))
        await record(cache, TENANT, applied(hopeless, [GOOD, BAD] * 32))
        await record(cache, TENANT, applied(good, [GOOD, GOOD, BAD] * 4))
        await cache.validate(TENANT)
        assert set(await cache.prune_low_value(TENANT)) == {harmful.key, hopeless.key}
        reasons = [
            (await cache.get(TENANT, each.key)).lifecycle.reason for each in (harmful, hopeless)
        ]
        assert reasons == [
            "contrary evidence: 1 of 12 went well, against a baseline of 0.50",
            "low confidence: 32 of 64 with it, none without: p = 0.5, level 0.04: stays on trial",
        ]
        assert await cache.prune_low_value(TENANT) == []
        clock.now += timedelta(days=91)
        assert set(await cache.prune_low_value(TENANT)) == {good.key, fresh.key}

    async def test_validated_patterns_are_not_pruned(
        self, cache: PatternCache, clock: Hands
    ) -> None:
        await promoted(cache)
        clock.now += timedelta(days=400)
        assert await cache.prune_low_value(TENANT) == []


class TestWhichApply:
    task: ClassVar[dict[str, Any]] = {
        "task_type": "report",
        "domain": "office",
        "complexity": 0.5,
        "tool": "look",
    }

    async def test_patterns_about_failures_match_failures(self, cache: PatternCache) -> None:
        strategic = await promoted(cache)
        recovery = await promoted(cache, category=Category.RECOVERY)

        async def ids(features: Features) -> list[UUID]:
            found = await cache.find_applicable(TENANT, features)
            return [each.pattern.key for each in found]

        assert await ids(self.task) == [strategic.key]
        assert await ids(self.task | {"failure_signature": "f"}) == [recovery.key]
        assert await ids(self.task | {"error_type": "Timeout"}) == [recovery.key]

    async def test_a_search_among_many_conditions_gives_the_same(self, cache: PatternCache) -> None:
        words = [{"feature": f"x{n % 5}", "op": "contains", "value": f"w{n}"} for n in range(100)]
        groups = tuple({"any": words[n : n + 20]} for n in range(0, 100, 20))
        document = pattern(applicability=Applicability(conditions=groups)).document
        async with acting_as(cache.pool, TENANT) as connection:
            await connection.execute(
                "INSERT INTO patterns (tenant_id, name, category, document)"
                " SELECT $1, 'p' || n, 'strategic', $2::jsonb FROM generate_series(1, 30) n",
                *(TENANT, to_json(document).decode()),
            )
        listed = {f"x{n}": [f"w{n + 20 * m}" for m in range(5)] for n in range(5)}
        lacking = listed | {f"x{n}": [f"w{n}"] for n in range(5)}
        many = await asyncio.gather(*(cache.candidates(TENANT, listed) for _ in range(5)))
        assert [len(each) for each in many] == [30] * 5
        assert await cache.candidates(TENANT, lacking) == []

    async def test_patterns_added_by_a_tenant_are_bounded(
        self, cache: PatternCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store, "MOST_GIVEN", 2)
        for number in range(2):
            await add(cache, TENANT, pattern(f"p{number}"))
        with pytest.raises(ConflictError, match="2 patterns that were not mined"):
            await add(cache, TENANT, pattern("one more"))
        await add(cache, TENANT, pattern("mined", fingerprint="f"))

    async def test_the_most_promising_candidate_is_first_then_random_ones(
        self, cache: PatternCache
    ) -> None:
        names = ("failed", "new", "also new", "went well")
        added = {each: await add(cache, TENANT, pattern(each)) for each in names}
        await record(cache, TENANT, applied(added["failed"], [BAD]))
        await record(cache, TENANT, applied(added["went well"], [GOOD]))
        await record(cache, TENANT, applied(added["new"], [GOOD] * 9, Arm.CONTROL))
        await promoted(cache)
        await cache.validate(TENANT)
        found = await cache.candidates(TENANT, self.task)
        assert [each.pattern.name for each in found] == ["went well", "new", "also new", "failed"]
        lots = {"new": 0.7, "also new": 0.2, "failed": 0.0, "went well": 0.9}
        found = await cache.candidates(TENANT, self.task, draw=lambda each: lots[each.name])
        assert [each.pattern.name for each in found] == ["went well", "also new", "new", "failed"]
