"""Search among many tenants' episodes: complete results, by way of the indices."""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
import pytest

from benchmarks import tenants_in_index as tenants
from benchmarks.tenants_in_index import EMBEDDER, FILTERS, NOW, IndexedEpisodes, Tenant, connected
from bottega.db.connect import APP_ROLE
from tests.conftest import at

TENANTS = (
    Tenant("40 %", 0.4),
    Tenant("40 %, far", 0.4, far=True),
    Tenant("5 %", 0.05),
    Tenant("5 %, far", 0.05, far=True),
    Tenant("1 %, far", 0.01, far=True),
    Tenant("0.1 %", 0.001),
    Tenant("the rest", 0.089),
)
BIG, BIG_FAR = 0, 1
VECTORS = "ix_episode_vectors_task_768"


@dataclass(frozen=True)
class Loaded:
    url: str
    held: IndexedEpisodes


@pytest.fixture(
    scope="module",
    params=[6_000, pytest.param(200_000, marks=[pytest.mark.deep, pytest.mark.timeout(1800)])],
)
def loaded(server: str, request: pytest.FixtureRequest) -> Iterator[Loaded]:
    name = f"test_{uuid.uuid4().hex}"
    held = tenants.drawn(request.param, TENANTS)

    async def execute(statement: str) -> None:
        connection = await asyncpg.connect(server)
        await connection.execute(statement)
        await connection.close()

    asyncio.run(execute(f"CREATE DATABASE {name} TEMPLATE template_bottega STRATEGY FILE_COPY"))
    asyncio.run(tenants.load(at(server, name), held))
    yield Loaded(at(server, name), held)
    asyncio.run(execute(f"DROP DATABASE {name} WITH (FORCE)"))


async def used(loaded: Loaded, query: str, *arguments: object) -> dict[str, int]:
    """Return the number of rows that a query of the application reads, by index."""
    async with connected(loaded.url) as owner:
        before = await rows_read(owner)
        async with connected(loaded.url, TENANTS[BIG]) as connection:
            assert await connection.fetch(query, *arguments)
            await connection.execute("SELECT pg_stat_force_next_flush()")
        after = await rows_read(owner)
    return {name: n for name, count in after.items() if (n := count - before[name])}


async def rows_read(owner: asyncpg.Connection) -> dict[str, int]:
    await owner.execute("SELECT pg_stat_clear_snapshot()")
    return dict(await owner.fetch("SELECT indexrelname, idx_tup_read FROM pg_stat_user_indexes"))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("tenant", range(len(TENANTS)), ids=[each.name for each in TENANTS])
async def test_a_tenant_finds_all_its_episodes(loaded: Loaded, tenant: int, name: str) -> None:
    answers = await tenants.ask(loaded.url, loaded.held, tenant, name)
    assert [answer.found for answer in answers] == [answer.expected for answer in answers]
    assert sum(answer.exact for answer in answers) / len(answers) >= 0.95


ALL = """'{"reach": "everything"}'"""
BY_VECTOR = f"""
SELECT * FROM search_episodes(
    {ALL}, '{{}}', $1::real[]::halfvec, $2, 'task', '{{}}', $3, 0.8, $4)
"""
AGED_BEFORE = NOW - timedelta(days=180)


@pytest.mark.parametrize("tenant", [BIG, BIG_FAR])
async def test_search_by_vector_uses_the_index_and_finds_enough(
    loaded: Loaded, tenant: int
) -> None:
    """Find enough also for a tenant whose episodes an index walk alone may not reach."""
    question = loaded.held.questions[0].tolist()
    assert VECTORS in await used(loaded, BY_VECTOR, question, EMBEDDER, AGED_BEFORE, tenants.K)
    async with connected(loaded.url, TENANTS[tenant]) as connection:
        rows = await connection.fetch(BY_VECTOR, question, EMBEDDER, AGED_BEFORE, tenants.K)
    assert len({row["episode_id"] for row in rows}) == tenants.K


LISTED = f"SELECT episode_list({ALL}, $1::jsonb, NULL, NULL, true, 20)"
FOUND = f"""
SELECT * FROM search_episodes(
    {ALL}, ARRAY[$1::text], NULL, NULL, 'task', '{{}}', '-infinity', 0.8, 20)
"""


@pytest.mark.parametrize(
    ("query", "argument", "index"),
    [
        (LISTED, "{}", "ix_episode_search_at"),
        (LISTED, '{"after": "2026-10-30T00:00:00Z"}', "ix_episode_search_at"),
        (LISTED, '{"domain": "domain3"}', "ix_episode_search_domain"),
        (LISTED, '{"task_type": "type7"}', "ix_episode_search_task_type"),
        (LISTED, '{"outcomes": ["PARTIAL"]}', "ix_episode_search_outcome"),
        (LISTED, '{"session_id": "session42"}', "ix_episode_search_session"),
        (LISTED, '{"failure_signature": "failure4"}', "pk_episode_failures"),
        (LISTED, '{"tags": ["tag3"]}', "pk_episode_tags"),
        (FOUND, "group17", "ix_episode_search_terms"),
    ],
)
async def test_each_kind_of_search_uses_its_index(
    loaded: Loaded, query: str, argument: str, index: str
) -> None:
    """Check plans under the policies, with the application's role, since plans depend on it."""
    assert index in await used(loaded, query, argument)


async def test_the_latest_of_a_common_tag_are_found_by_time(loaded: Loaded) -> None:
    """Read until the twentieth is found, not all episodes with the tag."""
    async with connected(loaded.url) as owner:
        await owner.execute(
            "INSERT INTO episode_tags (tenant_id, tag, episode_id) "
            "SELECT tenant_id, 'common', episode_id FROM episode_search; ANALYZE episode_tags"
        )
    assert sum((await used(loaded, LISTED, '{"tags": ["common"]}')).values()) < 200


async def test_unknown_words_of_a_large_memory_find_about_2000_episodes(loaded: Loaded) -> None:
    words = [f"word{letter}" for letter in "abcdfgkx"]
    query = "SELECT rare, rare_rows FROM episode_words($1, $2, $3, '')"
    for rows, count, rare_rows in ((100_000, 8, 400), (1_000_000, 4, 2_000)):
        async with connected(loaded.url) as owner:
            row = await owner.fetchrow(query, uuid.uuid4(), words, rows)
        assert (row["rare"].count("|") + 1, round(row["rare_rows"])) == (count, rare_rows)


async def test_a_plain_query_by_words_could_not_use_it(loaded: Loaded) -> None:
    plain = "SELECT episode_id FROM episode_search WHERE terms @@ $1::tsquery"
    assert "ix_episode_search_terms" not in await used(loaded, plain, "group17")


async def test_walk_of_the_index_that_finds_some_but_not_enough_is_no_answer(
    loaded: Loaded,
) -> None:
    """Three vectors of a tenant lie at the question, the others far from it."""
    tenant = TENANTS[BIG_FAR]
    question = loaded.held.questions[0].tolist()
    move = """
        UPDATE episode_vectors SET task = $2::real[]::halfvec WHERE tenant_id = $1
        AND episode_id IN (SELECT episode_id FROM episode_vectors WHERE tenant_id = $1 LIMIT 3)
    """
    async with connected(loaded.url) as connection:
        moving = connection.transaction()
        await moving.start()
        await connection.execute(move, tenant.id, question)
        await connection.execute(f"SET LOCAL ROLE {APP_ROLE}")
        await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant.id))
        found = await connection.fetch(BY_VECTOR, question, EMBEDDER, AGED_BEFORE, tenants.K)
        await moving.rollback()
    assert len(found) == tenants.K
