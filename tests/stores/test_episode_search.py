"""Search of episodes by words, by vectors and by filters."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.memory.episodes import search
from bottega.memory.episodes.episode import EpisodeFilter, Outcome
from bottega.memory.episodes.scope import EVERYTHING, Reach, Scope
from bottega.memory.episodes.scoring import Candidate
from bottega.memory.text.content import content_words

NOW = datetime(2026, 11, 21, tzinfo=UTC)
AGED = NOW - timedelta(days=180)
EMBEDDER = "test-1"
OTHER = UUID(int=77)


def direction(*parts: float) -> NDArray[np.float32]:
    """Return a unit vector with these components in its first dimensions."""
    vector = np.zeros(768, np.float32)
    vector[: len(parts)] = parts
    return vector / np.linalg.norm(vector)


def at_cosine(cosine: float) -> NDArray[np.float32]:
    """Return a vector with this cosine to ``direction(1)``."""
    return direction(cosine, (1 - cosine**2) ** 0.5)


class Episodes:
    """A tenant's episodes, numbered as they are stored."""

    def __init__(self, database: Database, tenant: UUID) -> None:
        self.database = database
        self.tenant = tenant
        self.count = 0

    @asynccontextmanager
    async def acting(self) -> AsyncIterator[asyncpg.Connection]:
        async with acting_as(self.database.pool, self.tenant) as connection:
            yield connection

    async def store(
        self,
        task: str = "",
        *,
        days: float = 1,
        vector: NDArray[np.float32] | None = None,
        embedder: str = EMBEDDER,
        summary: dict[str, str] | None = None,
        **more: Any,
    ) -> int:
        """Store an episode; return its number, which is also its id."""
        self.count += 1
        row = {
            "id": str(UUID(int=self.count)),
            "at": (NOW - timedelta(days=days)).isoformat(),
            "outcome": "SUCCESS",
            "summary": {"task": task, **(summary or {})},
            **more,
        }
        async with self.acting() as connection:
            await connection.execute(
                "SELECT store_episode($1, $2::jsonb)", self.tenant, json.dumps(row)
            )
            if vector is not None:
                await connection.execute(
                    """
                    INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome,
                        domain, task_type, session_id, task, result, whole)
                    SELECT tenant_id, episode_id, $3, at, outcome, domain, task_type, session_id,
                        $4::real[], packed_vector($4::real[]::halfvec),
                        packed_vector($4::real[]::halfvec)
                    FROM episode_search WHERE tenant_id = $1 AND episode_id = $2
                    """,
                    *(self.tenant, UUID(int=self.count), embedder, vector.tolist()),
                )
        return self.count

    async def candidates(
        self,
        query: str = "",
        vector: NDArray[np.float32] | None = None,
        where: EpisodeFilter = search.ANY,
        scope: Scope = EVERYTHING,
        **more: Any,
    ) -> dict[int, Candidate]:
        async with self.acting() as connection:
            found = await search.candidates(
                connection, scope, content_words(query), vector, where=where,
                **{"embedder": EMBEDDER, "aged_before": AGED, **more},
            )  # fmt: skip
        assert len({each.episode_id for each in found}) == len(found)
        return {each.episode_id.int: each for each in found}

    async def listed(self, where: EpisodeFilter = search.ANY) -> list[int]:
        async with self.acting() as connection:
            given = EVERYTHING.document, search.conditions(where), None, None
            found = await connection.fetch(search.LIST[False], *given, 100)
        return [row["id"].int for row in found]


@pytest.fixture
def mine(database: Database) -> Episodes:
    return Episodes(database, DEFAULT_TENANT)


@pytest.fixture
async def theirs(database: Database, owner: asyncpg.Pool) -> Episodes:
    await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, 'other')", OTHER)
    return Episodes(database, OTHER)


class TestByWords:
    async def test_one_word_in_common_is_enough(self, mine: Episodes) -> None:
        await mine.store("migrate the billing database")
        await mine.store("write a poem")
        found = await mine.candidates("which databases were migrated in spring?")
        assert list(found) == [1]
        assert found[1].lexical is not None
        assert found[1].lexical > 0
        assert found[1].cosine is None

    async def test_more_words_in_common_and_in_the_task_rank_higher(self, mine: Episodes) -> None:
        await mine.store("migrate the billing database")
        await mine.store("migrate the accounts")
        await mine.store("tidy up", summary={"steps": "migrate billing database"})
        found = await mine.candidates("migrate billing database")
        ranks = {number: each.lexical or 0 for number, each in found.items()}
        assert sorted(ranks, key=ranks.__getitem__) == [3, 2, 1]

    @pytest.mark.parametrize("query", ["", "   ", "!?'\"\\ & | ! :* <->", "\x00"])
    async def test_a_query_without_words_finds_nothing(self, mine: Episodes, query: str) -> None:
        await mine.store("migrate the billing database")
        assert await mine.candidates(query) == {}

    async def test_stop_words_search_only_if_there_is_nothing_else(self, mine: Episodes) -> None:
        await mine.store("migrate the billing database")
        await mine.store("order of the day")
        assert set(await mine.candidates("the day of billing")) == {1}
        found = await mine.candidates("order of")
        assert set(found) == {2}
        assert content_words("order of").count(found[2].words) == 0

    async def test_quotes_and_operators_are_words_or_nothing(self, mine: Episodes) -> None:
        await mine.store("mend o'reilly\\path & (or) !not it's 'quoted'")
        found = await mine.candidates("o'reilly\\path & !mend | 'quoted' :* <-> (")
        assert list(found) == [1]

    async def test_a_query_may_be_long(self, mine: Episodes) -> None:
        await mine.store("migrate the billing database")
        assert list(await mine.candidates("billing " + "and the " * 20_000)) == [1]


class TestByVector:
    async def test_the_nearest_are_found_with_their_cosines(self, mine: Episodes) -> None:
        for cosine in (0.9, 0.1, 0.5):
            await mine.store(vector=at_cosine(cosine))
        found = await mine.candidates("", direction(1), limit=2)
        cosines = {number: each.cosine for number, each in found.items()}
        assert cosines == pytest.approx({1: 0.9, 3: 0.5}, abs=1e-3)
        assert found[1].lexical is None

    async def test_every_hit_gets_both_measures(self, mine: Episodes) -> None:
        await mine.store("a poem", vector=at_cosine(0.9))
        await mine.store("the billing database", vector=at_cosine(0.1))
        await mine.store("billing, not embedded yet")
        found = await mine.candidates("billing", direction(1), limit=2)
        assert found[1].lexical == 0
        assert found[2].cosine == pytest.approx(0.1, abs=1e-3)
        assert found[3].cosine is None
        assert found[3].lexical is not None

    async def test_vectors_of_another_embedder_are_not_compared(self, mine: Episodes) -> None:
        await mine.store("one", vector=at_cosine(0.9), embedder="test-0")
        await mine.store("two", vector=at_cosine(0.1))
        await mine.store("three", vector=direction(1)[:5], embedder="short")
        assert list(await mine.candidates("", direction(1))) == [2]
        assert (await mine.candidates("one", direction(1)))[1].cosine is None
        assert list(await mine.candidates("", direction(1)[:5], embedder="short")) == [3]

    async def test_another_vector_may_be_the_measure(self, mine: Episodes) -> None:
        await mine.store(vector=at_cosine(0.9))
        async with mine.acting() as connection:
            await connection.execute(
                "UPDATE episode_vectors SET result = packed_vector($1::real[]::halfvec)",
                at_cosine(0.25).tolist(),
            )
        assert (await mine.candidates("", direction(1)))[1].cosine == pytest.approx(0.9, abs=1e-3)
        by_result = await mine.candidates("", direction(1), by="result")
        assert by_result[1].cosine == pytest.approx(0.25, abs=3e-3)

    async def test_aged_episodes_are_found_only_if_very_similar(self, mine: Episodes) -> None:
        await mine.store("old and close", days=200, vector=at_cosine(0.85))
        await mine.store("old and far", days=200, vector=at_cosine(0.75))
        await mine.store("old and not embedded", days=200)
        await mine.store("new and far", days=2, vector=at_cosine(0.1))
        assert sorted(await mine.candidates("old new", direction(1))) == [1, 4]
        assert sorted(await mine.candidates("", direction(1))) == [1, 4]
        assert sorted(await mine.candidates("old new")) == [4]
        assert sorted(await mine.candidates("old new", aged_before=NOW - timedelta(900))) == [
            *range(1, 5)
        ]

    async def test_dissimilar_aged_episodes_displace_no_others(self, mine: Episodes) -> None:
        for _ in range(5):
            await mine.store("old billing", days=200, vector=at_cosine(0.7))
        await mine.store("billing", vector=at_cosine(0.2))
        assert list(await mine.candidates("old billing", direction(1), limit=2)) == [6]


FILTERS = [
    (EpisodeFilter(domain="code"), {1, 2}),
    (EpisodeFilter(task_type="fix"), {1, 3}),
    (EpisodeFilter(domain="code", task_type="fix"), {1}),
    (EpisodeFilter(outcomes=(Outcome.SUCCESS,)), {1, 3}),
    (EpisodeFilter(outcomes=(Outcome.SUCCESS, Outcome.FAILURE)), {1, 2, 3}),
    (EpisodeFilter(session_id="it's"), {2, 4}),
    (EpisodeFilter(tags=("a",)), {1, 2}),
    (EpisodeFilter(tags=("a", "b")), {2}),
    (EpisodeFilter(failure_signature="timeout"), {2}),
    (EpisodeFilter(min_trust=2), {3, 4}),
    (EpisodeFilter(after=NOW - timedelta(days=2)), {1}),
    (EpisodeFilter(before=NOW - timedelta(days=3)), {4}),
    (EpisodeFilter(after=NOW - timedelta(days=4), before=NOW - timedelta(days=1)), {2, 3}),
    (EpisodeFilter(domain="nowhere'; DROP TABLE episodes; --"), set()),
]


@pytest.mark.parametrize(("where", "expected"), FILTERS)
async def test_filters_apply_to_every_kind_of_search(
    mine: Episodes, where: EpisodeFilter, expected: set[int]
) -> None:
    vector = direction(1)
    await mine.store("x", days=1, vector=vector, domain="code", task_type="fix", tags=["a"])
    await mine.store(
        "x", days=2, vector=vector, domain="code", tags=["a", "b"], outcome="FAILURE",
        session_id="it's", failure_signature="timeout",
    )  # fmt: skip
    await mine.store("x", days=3, vector=vector, domain="law", task_type="fix", trust=2)
    await mine.store("x", days=4, vector=vector, outcome="PARTIAL", trust=3, session_id="it's")
    assert set(await mine.candidates("x", None, where)) == expected
    assert set(await mine.candidates("", vector, where)) == expected
    assert set(await mine.listed(where)) == expected


async def test_filters_that_exclude_each_other_find_nothing(
    mine: Episodes, owner: asyncpg.Pool
) -> None:
    """Check it with statistics: the planner then expects no row at all for them."""
    await mine.store("x", vector=direction(1), session_id="s", tags=["a"])
    await owner.execute("ANALYZE")
    scope = Scope(Reach.SESSION, session_id="s")
    where = EpisodeFilter(session_id="other", tags=("a",))
    assert await mine.candidates("x", direction(1), where, scope=scope) == {}
    of_it = EpisodeFilter(session_id="s", tags=("a",))
    assert set(await mine.candidates("x", direction(1), of_it, scope=scope)) == {1}


async def test_each_tenant_finds_only_its_own_episodes(mine: Episodes, theirs: Episodes) -> None:
    await mine.store("billing", vector=direction(1))
    await theirs.store("invoices")
    await theirs.store("billing", vector=direction(1))
    for query, vector in (("billing", None), ("", direction(1)), ("billing", direction(1))):
        assert list(await mine.candidates(query, vector)) == [1]
        assert list(await theirs.candidates(query, vector)) == [2]
    assert await mine.listed() == [1]
    assert await theirs.listed() == [1, 2]


async def test_without_a_tenant_there_is_an_error(database: Database) -> None:
    connection = await database.connect()
    with pytest.raises(asyncpg.UndefinedObjectError):
        await search.candidates(
            connection, EVERYTHING, content_words("x"), None, embedder=None, aged_before=AGED
        )
    await connection.close()


async def test_a_tenant_with_most_of_the_episodes_finds_its_own_by_words(
    mine: Episodes, database: Database, owner: asyncpg.Pool
) -> None:
    await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, 'other')", OTHER)
    theirs = Episodes(database, OTHER)
    theirs.count = 100
    for _ in range(30):
        await mine.store("zebras")
    for _ in range(3):
        await theirs.store("zebras")
    await owner.execute("ANALYZE episode_search")
    assert set(await mine.candidates("zebras", limit=40)) == set(range(1, 31))
    assert set(await theirs.candidates("zebras", limit=40)) == {101, 102, 103}


class TestCommonWords:
    """Tests of common words, which find no episodes while the query has rarer ones."""

    async def fill(self, mine: Episodes) -> None:
        async with mine.acting() as connection:
            await connection.execute(
                """
                SELECT store_episode($1, jsonb_build_object(
                    'id', md5(n::text)::uuid, 'at', $2::timestamptz - n * interval '1 minute',
                    'outcome', 'SUCCESS', 'summary', jsonb_build_object('task',
                        'report' || CASE n % 10 WHEN 0 THEN ' weekly' ELSE '' END)))
                FROM generate_series(1, 1000) AS n
                """,
                *(mine.tenant, NOW),
            )
            await search.refresh_common(connection, mine.tenant)
            assert await connection.fetchval("SELECT sampled_rows FROM tenant_memory") == 1000

    async def test_common_words_are_found_by_sampling(self, mine: Episodes) -> None:
        await self.fill(mine)
        async with mine.acting() as connection:
            row = await connection.fetchrow("SELECT * FROM tenant_memory")
        assert row is not None
        assert (row["common"], row["sampled_rows"]) == (["report", "week"], 1000)
        assert row["shares"] == pytest.approx([1.0, 0.1])

    async def test_rarer_words_find_episodes_and_all_words_rank_them(self, mine: Episodes) -> None:
        await self.fill(mine)
        await mine.store("a report on zebras", days=3, vector=at_cosine(0.1))
        await mine.store("zebras", days=3, vector=at_cosine(0.1))
        # A hit by vector means that the common words are not needed.
        found = await mine.candidates("report on zebras", direction(1), limit=2)
        assert set(found) == {1, 2}
        assert (found[1].lexical or 0) > (found[2].lexical or 0) > 0

    async def test_common_words_are_used_if_there_are_no_others(self, mine: Episodes) -> None:
        await self.fill(mine)
        assert len(await mine.candidates("the report", limit=7)) == 7
        await mine.store("zebras", days=3)
        found = await mine.candidates("report on zebras", limit=7)
        assert len(found) >= 7
        assert 1 in found

    async def test_a_word_of_thousands_finds_nothing_if_the_vectors_found_enough(
        self, mine: Episodes
    ) -> None:
        await mine.store("zebras", vector=at_cosine(0.1))
        near = [await mine.store("horses", vector=at_cosine(0.9)) for _ in range(2)]
        async with mine.acting() as connection:
            await search.refresh_common(connection, mine.tenant)
            await connection.execute(
                """UPDATE tenant_memory SET common = '{zebr,hors}', shares = '{0.05,0.9}',
                       sampled_rows = 1000000"""
            )
        assert set(await mine.candidates("zebras", direction(1), limit=2)) == set(near)
        assert 1 in await mine.candidates("zebras", direction(1), limit=3)
        assert set(await mine.candidates("zebras")) == {1}

    async def test_an_empty_memory_has_no_common_words(self, mine: Episodes) -> None:
        async with mine.acting() as connection:
            await search.refresh_common(connection, mine.tenant)
            row = await connection.fetchrow("SELECT common, sampled_rows FROM tenant_memory")
        assert tuple(row) == ([], 0)
