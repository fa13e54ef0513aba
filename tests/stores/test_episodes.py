"""The ten operations of episodic memory, on the real database."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import NotFoundError, UnavailableError
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import Episode, EpisodeFilter, Outcome, State, Summary
from bottega.memory.episodes.scope import EVERYTHING, MemoryOptions
from bottega.memory.episodes.store import EpisodicMemory, Hit
from bottega.memory.text.embeddings import Embedder, Vectors
from bottega.objects import Objects, StoredElsewhereError, new_key
from tests.memories import make_episode, store_episodes

NOW = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)
ANY = EpisodeFilter()


class Down:
    """An embedder that is not reachable."""

    name, dimension = "down", 768

    async def embed(self, texts: Sequence[str]) -> Vectors:
        raise UnavailableError("it is down")


class Stuck(Down):
    """An embedder that never answers."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        await asyncio.Event().wait()
        raise AssertionError


def episode(task: str = "Export the invoices of March.", **changes: Any) -> Episode:
    plain = Episode(
        at=NOW,
        outcome=Outcome.SUCCESS,
        task={"original_input": task},
        summary=Summary(task=task),
    )
    return replace(plain, **changes)


FULL = Episode(
    at=NOW,
    outcome=Outcome.PARTIAL,
    task={
        "original_input": "Größe \U0001f468‍\U0001f469 'quoted' \\ \"double\" \n new line"[:2000],
        "goals": ["one", {"deep": [1, 2.5, None, True, {"a": []}]}],
        "constraints": [],
        "context": {"Key": 10**40, "small": 1e-9, "": "empty name"},
        "complexity": 0.25,
    },
    summary=Summary(task="export", result="done", errors="TimeoutError", steps="1. fetch"),
    session_id="s",
    domain="billing",
    task_type="export",
    failure_signature="timeout_error: no answer in #",
    failure_signatures=("timeout_error: no answer in #",),
    trust=1,
    origin={"principal": "key:btg_x", "run": None, "tool": "t"},
    execution={"plan": ["a"], "adaptations": [], "duration_s": 1.5, "resources": {"tokens": 3}},
    result={"output": {"n": 1}, "error": None, "side_effects": [], "quality": {"good": 1}},
    metadata={"tools_used": ["calc"], "strategies_applied": [], "agents": ["lead"]},
    tags=("a b", "zwei", "ümlaut"),
    reflection={"insights": ["x"], "performance": {}},
    trace=[{"step": n, "text": "%_\\" * n} for n in range(50)],
    input="in full " * 400,
    output=["in", {"full": None}],
)


@pytest.fixture
def embedder() -> BuiltinEmbedder:
    return BuiltinEmbedder()


def over(database: Database, embedder: Embedder, **more: Any) -> EpisodicMemory:
    embedders = Embedders(database.pool, lambda: embedder, lambda name: None)
    return EpisodicMemory(database.pool, embedders=embedders, clock=lambda: NOW, **more)


@pytest.fixture
async def memory(database: Database, embedder: BuiltinEmbedder) -> EpisodicMemory:
    return over(database, embedder)


@pytest.fixture
async def stranger(owner: asyncpg.Pool) -> UUID:
    found: UUID = await owner.fetchval("INSERT INTO tenants (name) VALUES ('other') RETURNING id")
    return found


async def test_an_episode_is_read_back_unchanged(memory: EpisodicMemory) -> None:
    stored = await memory.store(DEFAULT_TENANT, FULL)
    found = await memory.get(DEFAULT_TENANT, EVERYTHING, stored)
    assert replace(found, id=None, state=State()) == FULL
    assert found.id == stored
    assert [body["part"] for body in found.state.bodies] == ["input", "output", "trace"]
    assert replace(found.state, bodies=()) == State()
    short = await memory.get(DEFAULT_TENANT, EVERYTHING, stored, bodies=False)
    assert short == replace(found, trace=None, input=None, output=None)


async def test_an_episode_stored_twice_keeps_its_first_content(
    memory: EpisodicMemory, owner: asyncpg.Pool
) -> None:
    known = uuid4()
    same = replace(FULL, id=known)
    for _ in range(2):
        assert await memory.store(DEFAULT_TENANT, same) == known
    assert await memory.store(DEFAULT_TENANT, replace(same, domain="other", tags=("x",))) == known
    found = await memory.get(DEFAULT_TENANT, EVERYTHING, known)
    assert (found.domain, found.tags) == (FULL.domain, FULL.tags)
    assert await owner.fetchval("SELECT count(*) FROM episodes") == 1


async def test_a_failed_transaction_stores_no_episode(
    memory: EpisodicMemory, database: Database, owner: asyncpg.Pool
) -> None:
    async def fail() -> None:
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            await memory.store(DEFAULT_TENANT, FULL, on=connection)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    for table in ("episodes", "episode_bodies", "episode_state", "episode_search", "episode_tags"):
        assert await owner.fetchval(f"SELECT count(*) FROM {table}") == 0


CHANGES = [
    "UPDATE episodes SET outcome = 'SUCCESS'",
    "UPDATE episodes SET task = '{}' WHERE id = $1",
    "DELETE FROM episodes",
    "UPDATE episode_bodies SET content = '1'",
    "DELETE FROM episode_bodies",
    "UPDATE episode_reflections SET reflection = '{}'",
    "DELETE FROM episode_reflections",
    "TRUNCATE episodes CASCADE",
]


@pytest.mark.parametrize("statement", CHANGES)
async def test_the_database_lets_the_service_change_no_episode(
    memory: EpisodicMemory, database: Database, statement: str
) -> None:
    stored = await memory.store(DEFAULT_TENANT, FULL)
    given = [stored] if "$1" in statement else []
    async with database.pool.acquire() as connection:
        await connection.execute(f"SET bottega.tenant = '{DEFAULT_TENANT}'")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement, *given)
    found = await memory.get(DEFAULT_TENANT, EVERYTHING, stored)
    assert replace(found, id=None, state=State()) == FULL


@pytest.mark.parametrize(
    "statement", [each for each in CHANGES if each.startswith("UPDATE") and "$1" not in each]
)
async def test_the_database_lets_its_owner_change_no_episode(
    memory: EpisodicMemory, owner: asyncpg.Pool, statement: str
) -> None:
    await memory.store(DEFAULT_TENANT, FULL)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await owner.execute(statement)
    assert refused.value.sqlstate == "BT002"


async def semantic_hits(memory: EpisodicMemory, tenant: UUID, query: str) -> Sequence[Hit]:
    return (await memory.semantic_search(tenant, EVERYTHING, query)).hits


Operation = Callable[[EpisodicMemory, UUID, Episode], Awaitable[Any]]
READ: dict[str, Operation] = {
    "get": lambda m, t, e: m.get(t, EVERYTHING, e.id or uuid4()),
    "semantic_search": lambda m, t, e: semantic_hits(m, t, e.summary.task),
    "structured_search": lambda m, t, e: m.structured_search(
        t, EVERYTHING, EpisodeFilter(domain=e.domain), limit=9
    ),
    "recent": lambda m, t, e: m.recent(t, EVERYTHING, 9),
    "similar_failures": lambda m, t, e: m.similar_failures(
        t, EVERYTHING, e.failure_signature or "", 9
    ),
    "mark_deleted": lambda m, t, e: m.mark_deleted(t, e.id or uuid4()),
}


@pytest.mark.parametrize("operation", READ)
async def test_no_operation_reaches_another_tenant_s_episodes(
    memory: EpisodicMemory, stranger: UUID, owner: asyncpg.Pool, operation: str
) -> None:
    theirs = replace(FULL, id=uuid4())
    await memory.store(stranger, theirs)
    memory.accesses.touch(DEFAULT_TENANT, [theirs.id or uuid4()])
    try:
        assert not await READ[operation](memory, DEFAULT_TENANT, theirs)
    except NotFoundError:
        assert operation in ("get", "mark_deleted")
    await memory.accesses.flush()
    state = await owner.fetchrow("SELECT state, access_count FROM episode_state")
    assert (state["state"], state["access_count"]) == ("active", 0)
    assert await READ[operation](memory, stranger, theirs)


async def test_tenants_may_have_episodes_with_the_same_id(
    memory: EpisodicMemory, stranger: UUID
) -> None:
    same = uuid4()
    await memory.store(DEFAULT_TENANT, episode("ours", id=same))
    await memory.store(stranger, episode("theirs", id=same))
    assert (await memory.get(DEFAULT_TENANT, EVERYTHING, same)).summary.task == "ours"
    await memory.mark_deleted(DEFAULT_TENANT, same)
    assert (await memory.get(stranger, EVERYTHING, same)).summary.task == "theirs"


async def stored(memory: EpisodicMemory, *episodes: Episode) -> list[UUID]:
    return [await memory.store(DEFAULT_TENANT, each) for each in episodes]


def ids(found: Sequence[Episode]) -> list[UUID | None]:
    return [each.id for each in found]


async def test_episodes_are_found_by_filters(memory: EpisodicMemory) -> None:
    hour = timedelta(hours=1)
    first, second, third = await stored(
        memory,
        episode(domain="a", task_type="x", tags=("t", "u"), at=NOW - 2 * hour, session_id="s"),
        episode(domain="b", task_type="x", outcome=Outcome.FAILURE, at=NOW - hour, trust=3),
        episode(
            domain="a",
            tags=("t",),
            outcome=Outcome.PARTIAL,
            failure_signature="e: x",
            failure_signatures=("e: x", "later"),
        ),
    )
    for where, expected in (
        (ANY, [first, second, third]),
        (EpisodeFilter(domain="a"), [first, third]),
        (EpisodeFilter(task_type="x"), [first, second]),
        (EpisodeFilter(outcomes=(Outcome.FAILURE, Outcome.PARTIAL)), [second, third]),
        (EpisodeFilter(session_id="s"), [first]),
        (EpisodeFilter(tags=("t",)), [first, third]),
        (EpisodeFilter(tags=("u", "t")), [first]),
        (EpisodeFilter(after=NOW - 2 * hour), [second, third]),
        (EpisodeFilter(before=NOW), [first, second]),
        (EpisodeFilter(failure_signature="e: x"), [third]),
        (EpisodeFilter(min_trust=2), [second]),
        (EpisodeFilter(domain="a", task_type="x", tags=("t",)), [first]),
        (EpisodeFilter(domain="c"), []),
    ):
        assert (
            ids(await memory.structured_search(DEFAULT_TENANT, EVERYTHING, where, limit=9))
            == expected
        )
        assert ids(await memory.recent(DEFAULT_TENANT, EVERYTHING, 9, where)) == expected[::-1]
    assert ids(await memory.recent(DEFAULT_TENANT, EVERYTHING, 2)) == [third, second]
    for each in ("e: x", "later"):
        assert ids(await memory.similar_failures(DEFAULT_TENANT, EVERYTHING, each, 5)) == [third]


async def test_a_list_continues_after_its_cursor(memory: EpisodicMemory) -> None:
    ends = [NOW - timedelta(days=n // 3) for n in range(7)]  # some at the same time
    made = await stored(memory, *[episode(str(at), at=at) for at in ends])
    in_order = [each for _, each in sorted(zip(ends, made, strict=True))]
    for descending in (False, True):
        seen: list[UUID | None] = []
        place = None
        while page := await memory.structured_search(
            DEFAULT_TENANT, EVERYTHING, ANY, limit=3, after=place, descending=descending
        ):
            seen += ids(page)
            place = (page[-1].at, page[-1].id or uuid4())
        assert seen == (in_order[::-1] if descending else in_order)


async def test_a_new_episode_is_found_by_words_at_once(memory: EpisodicMemory) -> None:
    wanted, _ = await stored(memory, episode(), episode("Water the plants."))
    found = await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, "invoices", k=1)
    (hit,) = found.hits
    assert hit.episode.id == wanted
    assert hit.parts.lexical is not None
    assert hit.parts.cosine is None
    parts = hit.parts
    terms = (parts.similarity, parts.recency, parts.success, parts.accesses, parts.domain)
    assert hit.score == pytest.approx(sum(terms))


@pytest.mark.parametrize("lame", [Down(), Stuck()], ids=lambda each: type(each).__name__)
async def test_without_an_embedder_search_is_by_words_and_is_marked_so(
    database: Database, memory: EpisodicMemory, lame: Down
) -> None:
    (wanted,) = await stored(memory, episode())
    options = MemoryOptions(vector_deadline_ms=0.0 if isinstance(lame, Stuck) else 30_000.0)
    without = over(database, lame, options=options)
    found = await without.semantic_search(DEFAULT_TENANT, EVERYTHING, "invoices")
    assert not found.by_meaning
    assert ids([hit.episode for hit in found.hits]) == [wanted]
    assert not found.by_spelling
    found = await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, "invoices")
    assert found.by_spelling
    assert not found.by_meaning


async def test_accesses_are_counted_in_memory_and_written_in_batches(
    memory: EpisodicMemory, owner: asyncpg.Pool
) -> None:
    first, second = await stored(memory, episode(), episode("Water the plants."))
    for _ in range(3):
        await memory.get(DEFAULT_TENANT, EVERYTHING, first)
    await memory.semantic_search(
        DEFAULT_TENANT, EVERYTHING, "plants", where=EpisodeFilter(domain="none")
    )
    for _ in range(2):
        await memory.recent(DEFAULT_TENANT, EVERYTHING, 9)
    await memory.structured_search(DEFAULT_TENANT, EVERYTHING, ANY, limit=9)
    assert await owner.fetchval("SELECT sum(access_count) FROM episode_state") == 0
    await memory.accesses.flush()
    counts = dict(await owner.fetch("SELECT episode_id, access_count FROM episode_state"))
    assert counts == {first: 5, second: 2}
    memory.accesses.touch(DEFAULT_TENANT, [second, second, uuid4()])
    await memory.accesses.flush()
    state = (await memory.get(DEFAULT_TENANT, EVERYTHING, second)).state
    assert (state.access_count, state.last_access) == (4, NOW)
    await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, "plants", k=1)
    await memory.accesses.flush()
    state = (await memory.get(DEFAULT_TENANT, EVERYTHING, second)).state
    assert state.access_count == 6


async def test_a_forgotten_episode_disappears_at_once(
    memory: EpisodicMemory, owner: asyncpg.Pool
) -> None:
    gone, kept = await stored(memory, episode(failure_signature="e"), episode())
    assert await memory.mark_deleted(DEFAULT_TENANT, gone)
    assert not await memory.mark_deleted(DEFAULT_TENANT, gone)
    with pytest.raises(NotFoundError):
        await memory.get(DEFAULT_TENANT, EVERYTHING, gone)
    with pytest.raises(NotFoundError):
        await memory.mark_deleted(DEFAULT_TENANT, uuid4())
    assert ids(await memory.structured_search(DEFAULT_TENANT, EVERYTHING, ANY, limit=9)) == [kept]
    found = await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, "invoices")
    assert ids([hit.episode for hit in found.hits]) == [kept]
    assert await memory.similar_failures(DEFAULT_TENANT, EVERYTHING, "e", 5) == []
    rows = await owner.fetch("SELECT episode_id, state, deleted_at FROM episode_state")
    assert (gone, "deleted", NOW) in [tuple(row) for row in rows]
    assert await owner.fetchval("SELECT count(*) FROM episodes") == 2  # until it is purged
    assert await owner.fetchval("SELECT count(*) FROM episode_work") == 1


async def test_an_episode_is_read_without_its_bodies(
    database: Database, embedder: BuiltinEmbedder
) -> None:
    memory = over(database, embedder)
    known = await memory.store(DEFAULT_TENANT, FULL)
    memory.accesses.touch(DEFAULT_TENANT, [known])
    await memory.accesses.flush()
    whole = await memory.get(DEFAULT_TENANT, EVERYTHING, known)
    assert whole.state.access_count == 1
    short = await memory.get(DEFAULT_TENANT, EVERYTHING, known, bodies=False)
    assert short == replace(whole, trace=None, input=None, output=None)


async def test_a_deleted_episode_and_that_of_another_tenant_are_not_read(
    database: Database, embedder: BuiltinEmbedder, stranger: UUID
) -> None:
    memory, another = over(database, embedder), over(database, embedder)
    known = await memory.store(DEFAULT_TENANT, FULL)
    await memory.get(DEFAULT_TENANT, EVERYTHING, known)
    with pytest.raises(NotFoundError):
        await memory.get(stranger, EVERYTHING, known)
    await another.mark_deleted(DEFAULT_TENANT, known)
    with pytest.raises(NotFoundError):
        await memory.get(DEFAULT_TENANT, EVERYTHING, known)


_ROWS_READ = """
SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows
FROM pg_stat_user_tables WHERE relname LIKE 'episode%'
"""


async def test_a_search_reads_each_row_by_its_key_without_statistics(
    database: Database, database_url: str, embedder: BuiltinEmbedder, owner: asyncpg.Pool
) -> None:
    """Check that rows read do not grow with the tenant's episodes, times those found."""
    for table in ("episodes", "episode_state", "episode_search", "episode_vectors"):
        await owner.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    many = [make_episode("Export the invoices of March.", NOW) for _ in range(400)]
    await store_episodes(database.pool, *many)
    before = dict(await owner.fetch(_ROWS_READ))
    async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        memory = EpisodicMemory(
            pool, embedders=Embedders(pool, lambda: embedder, lambda name: None), clock=lambda: NOW
        )
        found = await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, "invoices", k=40)
        await memory.accesses.flush()
        await pool.execute("SELECT pg_stat_force_next_flush()")
    assert len(found.hits) == 40
    read = {table: count - before[table] for table, count in await owner.fetch(_ROWS_READ)}
    assert read["episodes"] <= 200
    assert read["episode_state"] <= 300
    assert read["episode_reflections"] <= 100
    assert read["episode_vectors"] <= 600  # each is compared once
    assert read["episode_search"] <= 1500


async def test_bodies_come_back_from_the_object_store(
    database: Database, embedder: BuiltinEmbedder, owner: asyncpg.Pool, folder: Path
) -> None:
    objects = Objects((folder / "objects").as_uri(), database.pool)
    memory = over(database, embedder, objects=objects)
    known = await memory.store(DEFAULT_TENANT, FULL)
    for part in ("trace", "output"):
        content = await owner.fetchval("SELECT content FROM episode_bodies WHERE part = $1", part)
        key = new_key(DEFAULT_TENANT, known, part)
        await objects.put(key, content.encode())
        await owner.execute(
            "UPDATE episode_bodies SET content = NULL, object_key = $1 WHERE part = $2", key, part
        )
    found = await memory.get(DEFAULT_TENANT, EVERYTHING, known)
    assert replace(found, id=None, state=State()) == FULL
    places = {body["part"]: body["storage"] == "database" for body in found.state.bodies}
    assert places == {"input": True, "output": False, "trace": False}
    (folder / "objects").rename(folder / "away")
    with pytest.raises(UnavailableError) as away:
        await memory.get(DEFAULT_TENANT, EVERYTHING, known)
    assert away.value.code == "object_store"
    short = await memory.get(DEFAULT_TENANT, EVERYTHING, known, bodies=False)
    assert short.task == FULL.task
    (folder / "away").rename(folder / "objects")
    [lost] = (folder / "objects").rglob("trace-*")
    lost.unlink()
    with pytest.raises(StoredElsewhereError):  # the key exists
        await memory.get(DEFAULT_TENANT, EVERYTHING, known)
