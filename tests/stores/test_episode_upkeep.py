"""Moving long bodies to the object store, emptying its trash, and counting words."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import UnavailableError
from bottega.leased_work import LeasedWork
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.objects import ALL_PARTS, Objects, copied
from tests.memories import day

LONG = [{"said": "long " * 5000}]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def objects(root: Path, database: Database) -> Objects:
    return Objects(root.as_uri(), database.pool)


@pytest.fixture
def upkeep(database: Database, objects: Objects) -> EpisodeMaintenance:
    return EpisodeMaintenance(database.pool, objects)


@pytest.fixture
def offloading(upkeep: EpisodeMaintenance, clock: Clock) -> LeasedWork:
    return upkeep.offloading(clock)


async def store(database: Database, *numbers: int, **bodies: Any) -> None:
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        for number in numbers:
            row = {
                "id": str(UUID(int=number)),
                "at": day(number).isoformat(),
                "outcome": "SUCCESS",
                "summary": {"task": f"reset router {number}"},
                "bodies": bodies or {"trace": LONG, "output": "short"},
            }
            await connection.execute(
                "SELECT store_episode($1, $2::jsonb)", DEFAULT_TENANT, json.dumps(row)
            )


async def keys(owner: asyncpg.Pool) -> list[str]:
    rows = await owner.fetch(
        "SELECT object_key FROM episode_bodies WHERE object_key IS NOT NULL ORDER BY 1"
    )
    return [row[0] for row in rows]


async def waiting(owner: asyncpg.Pool) -> int:
    count: int = await owner.fetchval("SELECT count(*) FROM episode_work WHERE work = 'offload'")
    return count


async def trash_is_due(owner: asyncpg.Pool) -> None:
    await owner.execute("UPDATE deleted_objects SET at = now() - interval '1 hour'")


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def block(root: Path) -> None:
    """Put a file where the folder should be."""
    if root.exists():
        root.rename(root.with_name("elsewhere"))
    root.touch()


def unblock(root: Path) -> None:
    root.unlink()
    if root.with_name("elsewhere").exists():
        root.with_name("elsewhere").rename(root)


async def test_long_bodies_move_whole_and_short_episodes_stay(
    database: Database, owner: asyncpg.Pool, offloading: LeasedWork, objects: Objects
) -> None:
    await store(database, 1)
    await store(database, 2, trace=[{"said": "short"}])

    assert await offloading.do_due() == 0
    assert await offloading.do_due() == float("inf")

    bodies = [json.loads(await objects.get(key)) for key in await keys(owner)]
    assert LONG in bodies
    assert await waiting(owner) == 0
    rest = await owner.fetch("SELECT episode_id FROM episode_bodies WHERE content IS NOT NULL")
    assert [row[0].int for row in rest] == [2]
    assert await owner.fetchval("SELECT count(*) FROM deleted_objects") == 0


async def test_a_store_that_is_down_leaves_bodies_where_they_are(
    database: Database,
    owner: asyncpg.Pool,
    clock: Clock,
    tmp_path: Path,
    offloading: LeasedWork,
    root: Path,
) -> None:
    await store(database, 1)
    block(root)
    assert await offloading.do_due() == 1
    assert await offloading.do_due() == 1
    assert await keys(owner) == []
    assert await waiting(owner) == 1

    unblock(root)
    clock.now += 1
    await owner.execute("UPDATE episode_work SET next_at = now()")
    assert await offloading.do_due() == 0
    assert len(await keys(owner)) == 2


async def test_a_death_between_object_and_row_leaves_trash_and_the_body(
    database: Database,
    owner: asyncpg.Pool,
    upkeep: EpisodeMaintenance,
    offloading: LeasedWork,
    objects: Objects,
    root: Path,
) -> None:
    await store(database, 1)
    ids = [UUID(int=1)]
    moved = await copied(database.pool, objects, DEFAULT_TENANT, ids, ALL_PARTS)
    # ... and it died here.
    assert len(files(root)) == len(json.loads(moved)) == 2
    assert await upkeep.empty_trash() == float("inf")  # it may still be alive
    assert await offloading.do_due() == 0
    assert len(files(root)) == 4

    await trash_is_due(owner)
    assert await upkeep.empty_trash() == 0
    assert len(files(root)) == 2
    for key in await keys(owner):
        assert await objects.get(key)
    # It was alive but is too late.
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute("SELECT move_bodies($1, $2::jsonb)", ids, moved)
    for key in await keys(owner):
        assert await objects.get(key)


async def test_an_object_in_the_trash_is_not_referenced_again(
    database: Database, owner: asyncpg.Pool, objects: Objects
) -> None:
    await store(database, 1)
    ids = [UUID(int=1)]
    moved = await copied(database.pool, objects, DEFAULT_TENANT, ids, ALL_PARTS)
    await trash_is_due(owner)

    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        with pytest.raises(asyncpg.RaiseError, match="trash by now"):
            await connection.execute("SELECT move_bodies($1, $2::jsonb)", ids, moved)
    assert await keys(owner) == []


async def test_erasure_deletes_objects(
    database: Database, owner: asyncpg.Pool, upkeep: EpisodeMaintenance, root: Path
) -> None:
    await store(database, 1, 2)
    await upkeep.offloading().do_due()
    assert len(files(root)) == 4
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.fetchval("SELECT erase_episodes($1)", [UUID(int=1)])

    assert await upkeep.empty_trash() == float("inf")
    await trash_is_due(owner)
    block(root)
    with pytest.raises(UnavailableError):
        await upkeep.empty_trash()
    assert await owner.fetchval("SELECT count(*) FROM deleted_objects") == 2
    unblock(root)
    assert await upkeep.empty_trash() == 0
    assert await owner.fetchval("SELECT count(*) FROM deleted_objects") == 0
    assert {UUID(path.parent.name).int for path in files(root)} == {2}
