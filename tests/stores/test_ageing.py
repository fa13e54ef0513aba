"""The ageing of episodes, and the purge of those marked for deletion."""

import asyncio
from datetime import datetime
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import UnavailableError
from bottega.memory.episodes.episode import StorageState, ended_before
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from tests.memories import (
    Folder,
    Tripped,
    bodies,
    cold,
    day,
    embed,
    make_episode,
    rows,
    searchable,
    states,
    store_episodes,
    trip,
    untrip,
)


@pytest.fixture
def store(tmp_path: Path, database: Database) -> Folder:
    return Folder(tmp_path, database.pool)


@pytest.fixture
def lifecycle(database: Database, store: Folder) -> EpisodeMaintenance:
    return EpisodeMaintenance(database.pool, store)


async def mark_deleted(pool: asyncpg.Pool, episode_id: UUID, at: float) -> bool | None:
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        marked: bool | None = await connection.fetchval(
            "SELECT mark_episode_deleted($1, $2)", episode_id, day(at)
        )
    return marked


def stage_of(at: datetime, now: datetime) -> StorageState:
    """Return the stage of an episode by its age."""
    later = (StorageState.ARCHIVED, StorageState.AGED, StorageState.MATURE)
    return next((each for each in later if at < ended_before(each, now)), StorageState.ACTIVE)


@pytest.mark.deep
async def test_over_400_days_search_follows_age_and_ids_find_whole_episodes(
    database: Database, owner: asyncpg.Pool, store: Folder
) -> None:
    tending = EpisodeMaintenance(database.pool, store)
    made = [
        make_episode(f"prepare report number {number}", day(20 * number)) for number in range(20)
    ]
    ids: list[UUID] = []
    for today in range(0, 420, 4):
        new = [each for each in made if day(today - 4) < each.at <= day(today)]
        ids += await store_episodes(database.pool, *new)
        await tending.tend(DEFAULT_TENANT, day(today))
        found, in_state = await searchable(owner), await states(owner)
        for episode in made[: len(ids)]:
            assert episode.id is not None
            stage = stage_of(episode.at, day(today))
            assert in_state[episode.id] == stage
            assert (episode.id in found) == (stage is not StorageState.ARCHIVED)
            expected = {StorageState.AGED: {"trace"}, StorageState.ARCHIVED: {"trace", "output"}}
            assert await cold(owner, episode.id) == expected.get(stage, set())
            whole = await bodies(owner, store, episode.id)
            assert whole == {"trace": episode.trace, "output": episode.output}
    assert len(ids) == 20
    assert set((await states(owner)).values()) == {"mature", "aged", "archived"}
    kept = await owner.fetchval("SELECT count(*) FROM episodes WHERE summary <> '{}'")
    assert kept == 20


async def test_an_old_imported_episode_gets_its_state_at_once(
    owner: asyncpg.Pool, database: Database, lifecycle: EpisodeMaintenance
) -> None:
    [old] = await store_episodes(database.pool, make_episode("x", day(-4000)))
    moved = await lifecycle.archive_old(DEFAULT_TENANT, day(0))
    assert moved == {"mature": 1, "aged": 1, "archived": 1}
    assert (await states(owner))[old] == "archived"
    assert await searchable(owner) == set()
    assert await lifecycle.archive_old(DEFAULT_TENANT, day(0)) == {}


@pytest.mark.parametrize("at", [0, 2, 3])
@pytest.mark.parametrize("before", [True, False])
async def test_a_failing_object_store_changes_nothing(
    database: Database, owner: asyncpg.Pool, store: Folder, at: int, before: bool
) -> None:
    ids = await store_episodes(
        database.pool, *(make_episode(f"task {n}", day(n)) for n in range(4))
    )
    await EpisodeMaintenance(database.pool, store).archive_old(DEFAULT_TENANT, day(100))
    as_it_was = await rows(owner)
    broken = Tripped(store.path, database.pool, at=at, before=before)
    with pytest.raises(UnavailableError):
        await EpisodeMaintenance(database.pool, broken).archive_old(DEFAULT_TENANT, day(200))
    assert await rows(owner) == as_it_was
    assert store.keys() <= await trash(owner)
    moved = await EpisodeMaintenance(database.pool, store).archive_old(DEFAULT_TENANT, day(200))
    assert moved == {"aged": 4}
    assert [await cold(owner, each) for each in ids] == [{"trace"}] * 4
    named = await owner.fetch("SELECT object_key AS key FROM episode_bodies WHERE content IS NULL")
    assert store.keys() - {row["key"] for row in named} <= await trash(owner)


async def trash(owner: asyncpg.Pool) -> set[str]:
    return {row["object_key"] for row in await owner.fetch("SELECT * FROM deleted_objects")}


@pytest.mark.parametrize("what", ["raise", pytest.param("die", marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("today", "table", "event"),
    [
        (100, "episode_state", "UPDATE"),
        (200, "episode_bodies", "UPDATE"),
        (200, "deleted_objects", "DELETE"),
        (200, "episode_state", "UPDATE"),
        (400, "episode_bodies", "UPDATE"),
        (400, "episode_state", "UPDATE"),
        (400, "episode_search", "DELETE"),
        (400, "episode_vectors", "DELETE"),
    ],
)
async def test_an_interrupted_step_changes_nothing(
    database: Database,
    owner: asyncpg.Pool,
    lifecycle: EpisodeMaintenance,
    store: Folder,
    today: int,
    table: str,
    event: str,
    what: str,
) -> None:
    ids = await store_episodes(
        database.pool, *(make_episode(f"task {n}", day(n)) for n in range(3))
    )
    for earlier in (100, 200):
        if earlier < today:
            await lifecycle.archive_old(DEFAULT_TENANT, day(earlier))
    as_it_was = await rows(owner)
    await trip(owner, table, event, what)
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await lifecycle.archive_old(DEFAULT_TENANT, day(today))
    assert await rows(owner) == as_it_was
    await untrip(owner, table)
    assert (await lifecycle.archive_old(DEFAULT_TENANT, day(today))).total() == 3
    for episode_id in ids:
        assert set(await bodies(owner, store, episode_id)) == {"trace", "output"}


async def test_concurrent_ageing_happens_once(
    database: Database, owner: asyncpg.Pool, lifecycle: EpisodeMaintenance, store: Folder
) -> None:
    ids = await store_episodes(
        database.pool, *(make_episode(f"task {n}", day(0)) for n in range(30)), embedded=False
    )
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(lifecycle.archive_old(DEFAULT_TENANT, day(400))) for _ in range(3)
        ]
    await lifecycle.archive_old(DEFAULT_TENANT, day(400))
    assert all(task.done() for task in tasks)
    assert set((await states(owner)).values()) == {"archived"}
    for episode_id in ids:
        assert set(await bodies(owner, store, episode_id)) == {"trace", "output"}
    named = await owner.fetch("SELECT object_key AS key FROM episode_bodies WHERE content IS NULL")
    assert store.keys() - {row["key"] for row in named} <= await trash(owner)


async def test_locked_episodes_are_skipped_until_later(
    database: Database, owner: asyncpg.Pool, lifecycle: EpisodeMaintenance
) -> None:
    held, free = await store_episodes(
        database.pool, make_episode("a", day(0)), make_episode("b", day(1))
    )
    async with owner.acquire() as connection, connection.transaction():
        await connection.execute("SELECT FROM episode_state WHERE episode_id = $1 FOR UPDATE", held)
        await lifecycle.archive_old(DEFAULT_TENANT, day(200))
        assert (await states(owner)) == {held: "active", free: "aged"}
    await lifecycle.archive_old(DEFAULT_TENANT, day(200))
    assert (await states(owner)) == {held: "aged", free: "aged"}


async def test_ageing_works_in_pages_and_one_call_is_bounded(
    database: Database, owner: asyncpg.Pool, store: Folder
) -> None:
    await store_episodes(
        database.pool,
        *(make_episode(f"task {n}", day(n / 100)) for n in range(130)),
        embedded=False,
    )
    some = EpisodeMaintenance(database.pool, store, most=100)
    assert await some.archive_old(DEFAULT_TENANT, day(200)) == {"mature": 100, "aged": 100}
    assert await EpisodeMaintenance(database.pool, store).archive_old(DEFAULT_TENANT, day(200)) == {
        "mature": 30,
        "aged": 30,
    }


async def test_objects_with_an_expired_claim_are_not_used(
    database: Database, owner: asyncpg.Pool, store: Folder
) -> None:
    await store_episodes(database.pool, make_episode("a", day(0)))

    class Slow(Folder):
        async def put(self, key: str, body: bytes, **more: int) -> None:
            await super().put(key, body, **more)
            await owner.execute("DELETE FROM deleted_objects")

    with pytest.raises(asyncpg.RaiseError, match="claimed too long ago"):
        await EpisodeMaintenance(database.pool, Slow(store.path, database.pool)).archive_old(
            DEFAULT_TENANT, day(200)
        )
    assert set((await states(owner)).values()) == {"mature"}


async def test_episodes_that_are_not_due_cannot_change_state(
    database: Database, owner: asyncpg.Pool
) -> None:
    other = await owner.fetchval("INSERT INTO tenants (name) VALUES ('other') RETURNING id")
    [mine] = await store_episodes(database.pool, make_episode("a", day(0)))
    as_it_was = await rows(owner)
    for tenant, state, before in (
        (DEFAULT_TENANT, "aged", day(9)),  # it is active
        (DEFAULT_TENANT, "archived", day(9)),
        (DEFAULT_TENANT, "aged", day(-1)),
        (DEFAULT_TENANT, "deleted", day(9)),
        (other, "aged", day(9)),
    ):
        async with acting_as(database.pool, tenant) as connection:
            assert not await connection.fetchval(
                "SELECT age_episodes($1, $2, $3, '[]')", [mine], state, before
            )
            assert not await connection.fetchval("SELECT purge_episodes($1, 9)", day(999))
    assert await rows(owner) == as_it_was


# --- Purging ------------------------------------------------------------------------------------


async def test_a_marked_episode_is_hidden_at_once_and_purged_after_30_days(
    database: Database, owner: asyncpg.Pool, lifecycle: EpisodeMaintenance
) -> None:
    gone, kept = await store_episodes(
        database.pool, make_episode("a", day(0)), make_episode("b", day(0))
    )
    assert await mark_deleted(database.pool, gone, 1) is True
    assert await mark_deleted(database.pool, gone, 2) is False
    assert await mark_deleted(database.pool, uuid4(), 1) is None
    assert await searchable(owner) == {kept}
    assert await lifecycle.purge_deleted(DEFAULT_TENANT, day(31)) == 0
    assert await lifecycle.purge_deleted(DEFAULT_TENANT, day(31.1)) == 1
    left = await rows(owner)
    assert {row.get("episode_id", row.get("id")) for each in left.values() for row in each} == {
        str(kept)
    }


async def test_objects_of_purged_episodes_become_trash(
    database: Database, owner: asyncpg.Pool, lifecycle: EpisodeMaintenance, store: Folder
) -> None:
    [gone] = await store_episodes(database.pool, make_episode("a", day(0)))
    await lifecycle.archive_old(DEFAULT_TENANT, day(400))
    await mark_deleted(database.pool, gone, 400)
    await lifecycle.purge_deleted(DEFAULT_TENANT, day(431))
    assert len(store.keys()) == 2
    assert await trash(owner) == store.keys()


@pytest.mark.parametrize("table", ["episode_bodies", "episodes", "episode_state"])
async def test_an_interrupted_purge_removes_nothing(
    database: Database, owner: asyncpg.Pool, lifecycle: EpisodeMaintenance, table: str
) -> None:
    gone, _ = await store_episodes(
        database.pool, make_episode("a", day(0)), make_episode("b", day(0))
    )
    await mark_deleted(database.pool, gone, 1)
    as_it_was = await rows(owner)
    await trip(owner, table, "DELETE", "die")
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await lifecycle.purge_deleted(DEFAULT_TENANT, day(40))
    assert await rows(owner) == as_it_was
    await untrip(owner, table)
    assert await lifecycle.purge_deleted(DEFAULT_TENANT, day(40)) == 1


async def test_episodes_without_vectors_age(
    database: Database, owner: asyncpg.Pool, lifecycle: EpisodeMaintenance
) -> None:
    [late] = await store_episodes(database.pool, make_episode("a", day(0)), embedded=False)
    await lifecycle.archive_old(DEFAULT_TENANT, day(200))
    assert await searchable(owner) == {late}
    await embed(database.pool, [late])
    await lifecycle.archive_old(DEFAULT_TENANT, day(400))
    assert await searchable(owner) == set()
