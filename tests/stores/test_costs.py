"""Rows that statements read of a tenant that has many: those that they are about."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic_core import to_json

from bottega.clock import monotonic, utcnow
from bottega.db.connect import connect
from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT, runs
from bottega.events import log
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.store import AccessCounter
from bottega.memory.learning import reflection_worker
from bottega.memory.patterns import store as pattern_store
from bottega.tenants import audit, erase
from tests.many import fill, pages_read, rows_ever_read, rows_read
from tests.pattern_changes import add
from tests.stores.test_patterns import Hands, cache_of, pattern

_MANY = 3000


@pytest.fixture
async def acting(database_url: str, owner: asyncpg.Pool) -> Any:
    """A session of the service, in a transaction of a tenant with many rows of each kind."""
    await fill(owner, DEFAULT_TENANT, _MANY)
    connection = await connect(database_url)
    async with connection.transaction():
        query = "SELECT set_config('bottega.tenant', $1, true)"
        await connection.execute(query, str(DEFAULT_TENANT))
        yield connection
    await connection.close()


async def test_a_look_for_old_entries_of_the_audit_log_reads_the_first(
    acting: asyncpg.Connection,
) -> None:
    due = "SELECT kind FROM due_retention($1::jsonb, NULL, true)"
    assert await acting.fetch(due, '{"audit": 1}') == []
    assert await rows_read(acting, "audit_log") <= 1
    assert len(await acting.fetch(due, '{"audit": 0.01}')) == 1
    assert await rows_read(acting, "audit_log") <= 2


async def test_old_entries_of_the_audit_log_are_removed_without_a_look_at_the_others(
    acting: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    before = await owner.fetchval("SELECT at FROM audit_log ORDER BY at LIMIT 1 OFFSET 15")
    for removed in (10, 5, 0):
        assert await acting.fetchval("SELECT expire_audit($1, 10, false)", before) == removed
    assert await rows_read(acting, "audit_log") <= 90


async def test_a_part_of_the_audit_log_is_listed_without_the_others(
    database: Database, owner: asyncpg.Pool
) -> None:
    await fill(owner, DEFAULT_TENANT, _MANY)
    now = datetime.now(UTC)
    parts: tuple[Any, ...] = ({"noted_after": now}, {"noted_before": now - timedelta(days=1)})
    about: dict[str, Any] = {"after": None, "descending": True, "limit": 10}
    async with database.begin(DEFAULT_TENANT) as tx:
        for part in parts:
            assert not await audit.page(tx, DEFAULT_TENANT, **part, **about)
        assert await rows_read(tx.driver, "audit_log") == 0


async def test_an_erased_run_or_episode_is_looked_up_by_key(
    database: Database, owner: asyncpg.Pool
) -> None:
    await fill(owner, DEFAULT_TENANT, _MANY)
    chosen = await owner.fetchval("SELECT id FROM runs WHERE user_id = '9'")
    async with database.begin(DEFAULT_TENANT) as tx:
        removed, _ = await erase.erase_runs(tx, DEFAULT_TENANT, runs.c.id == chosen)
        assert {**removed, "idempotency_keys": 1, "run_learning": 1, "runs": 1} == removed
        connection = tx.driver
        for table in ("idempotency_keys", "run_learning", "episode_state"):
            assert await rows_read(connection, table) <= 20, table


async def test_files_of_sessions_are_looked_at_once_for_all_unused_ones(
    acting: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    await owner.execute("UPDATE files SET session_id = NULL WHERE session_id::integer <= 9")
    page = "SELECT id, used_at FROM unused_files(now(), $1, $2, 3)"
    place, found = (datetime(2000, 1, 1, tzinfo=UTC), UUID(int=0)), []
    while rows := await acting.fetch(page, *place):
        place = rows[-1]["used_at"], rows[-1]["id"]
        found += rows
    assert len(found) == 9
    assert await rows_read(acting, "files") <= 1.1 * _MANY
    assert await rows_read(acting, "sessions") <= 1.1 * _MANY


async def test_accesses_are_counted_by_key(database_url: str, owner: asyncpg.Pool) -> None:
    await fill(owner, DEFAULT_TENANT, _MANY)
    ids = [row["id"] for row in await owner.fetch("SELECT id FROM episodes LIMIT 500")]
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        counter = AccessCounter(pool, utcnow)
        counter.touch(DEFAULT_TENANT, [*ids, ids[0]])
        before = await pages_read(pool)
        await counter.flush()
        assert await pages_read(pool) - before <= 30 * len(ids)
    counted = "SELECT access_count FROM episode_state WHERE episode_id = ANY ($1) ORDER BY 1"
    counts = [row["access_count"] for row in await owner.fetch(counted, ids)]
    assert counts == [1] * (len(ids) - 1) + [2]


async def test_a_change_of_embedder_reads_a_page_at_a_time(
    database_url: str, owner: asyncpg.Pool
) -> None:
    await fill(owner, DEFAULT_TENANT, _MANY)
    await owner.execute("INSERT INTO tenant_memory VALUES ($1, 'one')", DEFAULT_TENANT)
    new = BuiltinEmbedder()
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        embedders = Embedders(pool, lambda: new, lambda name: None, clock=monotonic)
        worker = EmbeddingWorker(pool, embedders)

        async def read() -> int:
            """Return how many rows one step reads."""
            before = await rows_ever_read(pool, "episode_search", "episode_vectors")
            await worker.change_over()
            return await rows_ever_read(pool, "episode_search", "episode_vectors") - before

        for _ in range(3):
            assert await read() <= 1500
            await owner.execute("DELETE FROM episode_work")
        await owner.execute(
            "INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, task, "
            "result, whole) SELECT tenant_id, episode_id, $1, at, outcome, '[1,2]', '', '' "
            "FROM episode_search ORDER BY episode_id LIMIT $2",
            *(new.name, _MANY - 1),
        )
        await worker.change_over()  # orders the one that is missing
        await worker.change_over()
        for _ in range(2):
            assert await read() <= 100
        await owner.execute("UPDATE episode_work SET tries = 9")
        await worker.change_over()
        assert await owner.fetchval("SELECT embedder FROM tenant_memory") == new.name
        for _ in range(_MANY // 512):
            assert await read() <= 2500
        await worker.change_over()
    assert not await owner.fetchval("SELECT count(*) FROM episode_vectors WHERE embedder = 'one'")


@pytest.mark.parametrize("descending", [False, True])
async def test_a_page_of_patterns_reads_its_own(
    database: Database, owner: asyncpg.Pool, descending: bool
) -> None:
    cache = cache_of(database, Hands())
    await add(cache, DEFAULT_TENANT, pattern())
    await owner.execute(
        "INSERT INTO patterns (tenant_id, name, category, document) "
        "SELECT tenant_id, name, category, document FROM patterns, generate_series(1, $1)",
        _MANY,
    )
    await owner.execute("VACUUM ANALYZE patterns")
    ids = [row["id"] for row in await owner.fetch("SELECT id FROM patterns ORDER BY id")]
    ids = ids[::-1] if descending else ids
    for number in (0, _MANY // 2):
        before = await rows_ever_read(database.pool, "patterns")
        after = ids[number - 1] if number else None
        page = await cache.page(DEFAULT_TENANT, limit=20, after=after, descending=descending)
        assert [each.key for each in page] == ids[number : number + 20]
        assert await rows_ever_read(database.pool, "patterns") - before <= 100


@pytest.mark.deep
async def test_episodes_of_evidence_are_held_by_key(database_url: str, owner: asyncpg.Pool) -> None:
    await fill(owner, DEFAULT_TENANT, 20_000)
    ids = [row["id"] for row in await owner.fetch("SELECT id FROM episodes LIMIT 40")]
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        pages = 0
        for some in (ids[:20], ids[20:]):  # at first it reads the catalogue
            given = to_json([{"episode_id": each, "reflection": {}} for each in some]).decode()
            before = await pages_read(pool)
            async with acting_as(pool, DEFAULT_TENANT) as connection:
                await connection.fetch(pattern_store._STAY, DEFAULT_TENANT, some)
                await connection.execute("SELECT hold_episodes($1)", some)
                await connection.execute(reflection_worker._WRITE, DEFAULT_TENANT, given)
            pages = await pages_read(pool) - before
    assert pages <= 700


async def test_a_long_log_is_read_once(
    database: Database, acting: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    run = await owner.fetchval("SELECT id FROM runs LIMIT 1")
    await owner.execute(
        "INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events) "
        "SELECT $1, $2, i, i, 1, now(), $4 FROM generate_series(1, $3) AS i",
        *(DEFAULT_TENANT, run, _MANY, '{"type":"warning","task_id":null,"data":{}}'),
    )
    await owner.execute("VACUUM ANALYZE run_steps")
    events = await log.read_all(database.pool, DEFAULT_TENANT, run, acting)
    assert [event.seq for event in events] == [*range(1, _MANY + 1)]
    assert await rows_read(acting, "run_steps") <= 1.1 * _MANY
    before = await rows_read(acting, "run_steps")
    read = "SELECT first_seq FROM read_logs($1, $2, $3, 50, 1000000, 1000000)"
    rows = await acting.fetch(read, [DEFAULT_TENANT], [run], [_MANY // 2])
    assert [row["first_seq"] for row in rows] == [_MANY // 2 + n for n in range(1, 51)]
    assert await rows_read(acting, "run_steps") - before <= 200
