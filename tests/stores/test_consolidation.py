"""Consolidation: similar mature episodes are replaced by one."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import numpy as np
import pytest
from pydantic_core import to_json

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import UnavailableError
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import Episode, EpisodeFilter, Outcome
from bottega.memory.episodes.maintenance import EpisodeMaintenance, as_one
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.store import EpisodicMemory
from bottega.objects import new_key
from bottega.runs.read import give_feedback
from bottega.tenants.erase import erase_session, erase_tenant
from bottega.tenants.operator import transactions
from tests.memories import (
    EMBEDDER,
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
from tests.waiting import until

TASK = "Summarise the quarterly sales report and send it to the board"
LATER = day(60)
"""A time when episodes of the first days are mature, and no similar one can be added."""


@pytest.fixture
def store(tmp_path: Path, database: Database) -> Folder:
    return Folder(tmp_path, database.pool)


@pytest.fixture
def tending(database: Database, store: Folder) -> EpisodeMaintenance:
    return EpisodeMaintenance(database.pool, store)


async def consolidated(owner: asyncpg.Pool) -> list[dict[str, Any]]:
    """Return the consolidated episodes, each with its content."""
    found = await owner.fetch("SELECT * FROM episodes WHERE kind = 'consolidated' ORDER BY at")
    return [dict(row) | {"said": json.loads(row["metadata"])["consolidated"]} for row in found]


async def into(owner: asyncpg.Pool) -> dict[UUID, UUID | None]:
    """Return, for each episode, its consolidated episode."""
    return {
        row["episode_id"]: row["consolidated_into"]
        for row in await owner.fetch("SELECT * FROM episode_state")
    }


async def test_duplicates_are_consolidated(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance, store: Folder
) -> None:
    written = (TASK, f"  {TASK}. ", TASK[0].lower() + TASK[1:], TASK.replace(" ", "  "))
    answer = "Sales rose in all regions but the north, where two shops were closed; it was sent."
    same = [
        make_episode(
            text, day(n), answer=answer, execution={"duration_s": took}, tags=(f"tag {took}",)
        )
        for n, (text, took) in enumerate(zip(written, (1, 2, 6, 3), strict=True))
    ]
    ids = await store_episodes(database.pool, *same)
    [other] = await store_episodes(database.pool, make_episode("Water the plants", day(1)))
    assert await tending.tend(DEFAULT_TENANT, day(25)) == {}  # no episode is mature
    done = await tending.tend(DEFAULT_TENANT, LATER)
    assert done == {"mature": 5, "groups": 1, "consolidated": 4}
    [one] = await consolidated(owner)
    assert await searchable(owner) == {one["id"], other}
    assert (await states(owner))[one["id"]] == "mature"
    found = await owner.fetchrow("SELECT * FROM episode_search WHERE episode_id = $1", one["id"])
    assert (found["instances"], found["at"]) == (4, day(3))
    said = one["said"]
    assert said["instances"] == 4
    assert said["statistics"]["mean_duration_s"] == 3
    assert UUID(said["representative_id"]) in ids
    # References resolve both ways, and each member is still stored whole.
    assert [UUID(each["episode_id"]) for each in said["variations"]] == ids
    assert await into(owner) == dict.fromkeys(ids, one["id"]) | {one["id"]: None, other: None}
    for episode, episode_id in zip(same, ids, strict=True):
        assert await cold(owner, episode_id) == {"trace", "output"}
        whole = await bodies(owner, store, episode_id)
        assert whole == {"trace": episode.trace, "output": episode.output}
    tags = await owner.fetch("SELECT tag FROM episode_tags WHERE episode_id = $1", one["id"])
    assert {row["tag"] for row in tags} == {"tag 1", "tag 2", "tag 3", "tag 6"}


async def test_consolidated_vectors_are_means_for_each_complete_embedder(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    ids = await store_episodes(
        database.pool,
        make_episode(TASK, day(0), answer="sent it"),
        make_episode(TASK, day(1), answer="it is sent"),
    )
    await embed(database.pool, ids, name="other-1")
    await embed(database.pool, ids[:1], name="half-done")
    result = "unpacked_vector(result)::real[] AS result"
    query = f"SELECT embedder, task::real[] AS task, {result} FROM episode_vectors"
    before = await owner.fetch(f"{query} WHERE embedder = 'other-1'")
    await tending.tend(DEFAULT_TENANT, LATER)
    after = await owner.fetch(f"{query} ORDER BY embedder")
    assert [row["embedder"] for row in after] == ["builtin-1", "other-1"]
    for part, most in (("task", 0.002), ("result", 0.004)):
        mean = np.mean([row[part] for row in before], axis=0)
        mean /= np.linalg.norm(mean)
        assert np.abs(after[1][part] - mean).max() < most


async def test_a_second_consolidation_changes_nothing(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(5)))
    await store_episodes(database.pool, *(make_episode(f"Task {n}", day(n)) for n in range(3)))
    await tending.tend(DEFAULT_TENANT, LATER)
    as_it_is = await rows(owner)
    assert await tending.tend(DEFAULT_TENANT, LATER) == {}
    assert await tending.tend(DEFAULT_TENANT, day(100)) == {}
    assert await rows(owner) == as_it_is


async def test_a_daily_task_is_consolidated_into_one_episode_a_week(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(24)))
    for today in range(20, 80):
        await tending.tend(DEFAULT_TENANT, day(today))
    assert [one["said"]["instances"] for one in await consolidated(owner)] == [8, 8, 8]
    assert len(await searchable(owner)) == 3


NEAR_MISSES: list[dict[str, Any]] = [
    {"task": "Summarise the quarterly sales report and send 3 to the board"},
    {"task": "Do not summarise the quarterly sales report and send it to the board"},
    {"task": "Summarise the quarterly sales report and send it to the bored"},
    {"outcome": Outcome.FAILURE},
    {"outcome": Outcome.PARTIAL},
    {"failure_signature": "timeout_error: #"},
    {"domain": "home"},
    {"domain": None},
    {"task_type": "letter"},
    {"trust": 2},
    {"at": day(7.1)},
    {"answer": "Nothing was sent since the server of the mail had been down for hours"},
]


@pytest.mark.parametrize("change", NEAR_MISSES, ids=str)
async def test_near_misses_stay_apart(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance, change: dict[str, Any]
) -> None:
    changed: dict[str, Any] = {"task": TASK, "at": day(1)} | change
    ids = await store_episodes(database.pool, make_episode(TASK, day(0)), make_episode(**changed))
    await tending.tend(DEFAULT_TENANT, LATER)
    assert await consolidated(owner) == []
    assert await searchable(owner) == set(ids)
    # These would have been consolidated as well.
    await store_episodes(database.pool, make_episode(TASK, day(0)), make_episode(TASK, day(0)))
    await tending.tend(DEFAULT_TENANT, LATER)
    assert len(await consolidated(owner)) == 1


async def test_episodes_of_different_tenants_are_not_consolidated(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    other = await owner.fetchval("INSERT INTO tenants (name) VALUES ('other') RETURNING id")
    mine = await store_episodes(database.pool, make_episode(TASK, day(0)))
    theirs = await store_episodes(database.pool, make_episode(TASK, day(0)), tenant=other)
    for tenant in (DEFAULT_TENANT, other):
        await tending.tend(tenant, LATER)
        async with acting_as(database.pool, tenant) as connection:
            episode = json.dumps(make_episode("x").to_row(), default=str)
            assert not await connection.fetchval(
                "SELECT consolidate_episodes($1, $2, $3, '[]')", episode, mine + theirs, LATER
            )
    assert await consolidated(owner) == []


async def test_consolidation_waits_for_missing_vectors(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    ids = await store_episodes(database.pool, make_episode(TASK, day(0)))
    late = await store_episodes(database.pool, make_episode(TASK, day(1)), embedded=False)
    await tending.tend(DEFAULT_TENANT, LATER)
    assert await consolidated(owner) == []
    await embed(database.pool, late)
    await tending.tend(DEFAULT_TENANT, LATER)
    assert set((await into(owner)).values()) == {None, (await consolidated(owner))[0]["id"]}
    assert len(ids + late) == 2


async def test_long_tasks_are_compared_in_full(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    """Check that the cut text in the episode is not compared, but the text of its vectors."""

    def long(ending: str, at: datetime) -> Episode:
        text = "word " * 500 + ending
        task = {"original_input": text[:2000], "goals": []}
        return replace(make_episode(text[:2000], at), task=task, input=text)

    await store_episodes(database.pool, long("a", day(0)), long("b", day(1)), long("a", day(2)))
    cut = long("", day(3))
    await store_episodes(
        database.pool, *(replace(make_episode("x", day(3)), task=cut.task) for _ in range(2))
    )
    await tending.tend(DEFAULT_TENANT, LATER)
    [one] = await consolidated(owner)
    assert one["said"]["instances"] == 2


@pytest.mark.parametrize("what", ["raise", pytest.param("die", marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("table", "event"),
    [
        ("episodes", "INSERT"),
        ("episode_search", "INSERT"),
        ("episode_vectors", "INSERT"),
        ("episode_bodies", "UPDATE"),
        ("deleted_objects", "DELETE"),
        ("episode_search", "DELETE"),
        ("episode_vectors", "DELETE"),
        ("episode_state", "UPDATE"),
    ],
)
async def test_an_interrupted_consolidation_changes_nothing(
    database: Database,
    owner: asyncpg.Pool,
    tending: EpisodeMaintenance,
    table: str,
    event: str,
    what: str,
) -> None:
    ids = await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(3)))
    await tending.archive_old(DEFAULT_TENANT, LATER)
    as_it_was = await rows(owner)
    assert set((await states(owner)).values()) == {"mature"}
    await trip(owner, table, event, what)
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await tending.tend(DEFAULT_TENANT, LATER)
    assert await rows(owner) == as_it_was
    await untrip(owner, table)
    assert (await tending.tend(DEFAULT_TENANT, LATER))["groups"] == 1
    assert await searchable(owner) == {(await into(owner))[ids[0]]}


@pytest.mark.parametrize("at", [0, 3, 5])
async def test_a_failing_object_store_changes_nothing(
    database: Database, owner: asyncpg.Pool, store: Folder, at: int
) -> None:
    await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(3)))
    await EpisodeMaintenance(database.pool, store).archive_old(DEFAULT_TENANT, LATER)
    as_it_was = await rows(owner)
    broken = EpisodeMaintenance(
        database.pool, Tripped(store.path, database.pool, at=at, before=False)
    )
    with pytest.raises(UnavailableError):
        await broken.tend(DEFAULT_TENANT, LATER)
    assert await rows(owner) == as_it_was
    await EpisodeMaintenance(database.pool, store).tend(DEFAULT_TENANT, LATER)
    assert len(await consolidated(owner)) == 1


async def test_two_concurrent_consolidations_make_each_episode_once(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    for number in range(4):
        await store_episodes(
            database.pool, *(make_episode(f"{TASK} {number}", day(n)) for n in range(5))
        )
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(tending.tend(DEFAULT_TENANT, LATER))
    await tending.tend(DEFAULT_TENANT, LATER)
    assert [one["said"]["instances"] for one in await consolidated(owner)] == [5] * 4
    assert len(await searchable(owner)) == 4


async def test_the_members_of_a_consolidated_episode_are_bounded(
    database: Database, owner: asyncpg.Pool, store: Folder
) -> None:
    await store_episodes(database.pool, *(make_episode(TASK, day(n / 10)) for n in range(25)))
    tending = EpisodeMaintenance(database.pool, store, most_compared=10)
    await tending.tend(DEFAULT_TENANT, LATER)
    assert [one["said"]["instances"] for one in await consolidated(owner)] == [10, 10, 5]


# --- Deleting members ---------------------------------------------------------------------------


async def forget(pool: asyncpg.Pool, episode_id: UUID) -> None:
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        assert await connection.fetchval("SELECT mark_episode_deleted($1, $2)", episode_id, LATER)


async def erase(pool: asyncpg.Pool, episode_id: UUID) -> None:
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        assert await connection.fetchval("SELECT erase_episodes($1)", [episode_id])


@pytest.mark.parametrize("go", [forget, erase])
@pytest.mark.parametrize("count", [2, 4])
async def test_removing_a_member_rebuilds_the_episode_from_the_others(
    database: Database,
    owner: asyncpg.Pool,
    tending: EpisodeMaintenance,
    store: Folder,
    go: Any,
    count: int,
) -> None:
    secret = make_episode(TASK, day(1), metadata={"tools_used": ["fetch"], "agents": ["Zacharias"]})
    others = await store_episodes(
        database.pool, *(make_episode(TASK, day(n)) for n in range(count - 1))
    )
    [gone] = await store_episodes(database.pool, secret)
    await tending.tend(DEFAULT_TENANT, LATER)
    [before] = await consolidated(owner)
    assert before["said"]["instances"] == count
    assert "Zacharias" in json.dumps(before["said"])
    await go(database.pool, gone)
    assert await consolidated(owner) == []
    assert await searchable(owner) == set(others)
    await embed(database.pool, others)
    await tending.tend(DEFAULT_TENANT, LATER)
    after = await consolidated(owner)
    assert [one["said"]["instances"] for one in after] == ([count - 1] if count > 2 else [])
    assert "Zacharias" not in json.dumps([one["said"] for one in after])
    assert gone not in await searchable(owner)
    for episode_id in others:
        assert set(await bodies(owner, store, episode_id)) == {"trace", "output"}
    await tending.tend(DEFAULT_TENANT, day(95))
    everything = json.dumps(await rows(owner))
    assert "Zacharias" not in everything
    assert str(gone) not in everything


async def test_forgetting_a_consolidated_episode_forgets_its_members(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(3)))
    await tending.tend(DEFAULT_TENANT, LATER)
    [one] = await consolidated(owner)
    await forget(database.pool, one["id"])
    assert await searchable(owner) == set()
    assert await tending.tend(DEFAULT_TENANT, LATER) == {}
    assert await tending.tend(DEFAULT_TENANT, day(91)) == {"purged": 4}
    assert not any((await rows(owner)).values())


async def test_several_members_may_be_forgotten_at_once(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    ids = await store_episodes(database.pool, *(make_episode(TASK, day(n / 10)) for n in range(10)))
    await tending.tend(DEFAULT_TENANT, LATER)
    async with asyncio.TaskGroup() as group:
        for episode_id in ids[:6]:
            group.create_task(forget(database.pool, episode_id))
    assert await consolidated(owner) == []
    assert await searchable(owner) == set(ids[6:])


async def test_a_consolidated_episode_ages_like_others(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    ids = await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(3)))
    await tending.tend(DEFAULT_TENANT, LATER)
    [one] = await consolidated(owner)
    for today, state in ((182, "mature"), (183, "aged"), (368, "archived")):
        await tending.tend(DEFAULT_TENANT, day(today))
        assert (await states(owner))[one["id"]] == state
    assert await searchable(owner) == set()
    assert {(await states(owner))[each] for each in ids} == {"consolidated"}


# --- In use -------------------------------------------------------------------------------------


@pytest.fixture
def memory(database: Database, store: Folder) -> EpisodicMemory:
    return EpisodicMemory(
        database.pool,
        embedders=Embedders(database.pool, lambda: EMBEDDER, lambda name: None),
        objects=store,
        clock=lambda: LATER,
    )


async def test_search_finds_the_consolidated_episode_instead_of_members(
    database: Database,
    owner: asyncpg.Pool,
    memory: EpisodicMemory,
    tending: EpisodeMaintenance,
) -> None:
    ids = await store_episodes(
        database.pool,
        make_episode(TASK, day(0), session_id="a", tags=("sales",)),
        make_episode(TASK, day(1), session_id="a"),
        make_episode("Water the plants in the hall", day(1)),
    )
    made = await tending.tend(DEFAULT_TENANT, LATER)
    assert (made["groups"], made["consolidated"]) == (1, 2)
    [one] = await consolidated(owner)
    for query in (TASK, "quarterly sales", "who gets the report?"):
        hits = (await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, query, k=3)).hits
        assert [hit.episode.id for hit in hits][:1] == [one["id"]]
        assert not {hit.episode.id for hit in hits} & set(ids[:2])
    tagged = EpisodeFilter(tags=("sales",))
    [listed] = await memory.structured_search(DEFAULT_TENANT, EVERYTHING, tagged, limit=9)
    assert (listed.id, listed.instances) == (one["id"], 2)
    original = await memory.get(DEFAULT_TENANT, EVERYTHING, ids[0])
    assert original.trace
    assert original.state.consolidated_into == one["id"]
    assert original.state.referenced_by == (one["id"],)
    whole = await memory.get(DEFAULT_TENANT, EVERYTHING, one["id"])
    variations = whole.metadata["consolidated"]["variations"]
    assert [UUID(each["episode_id"]) for each in variations] == ids[:2]
    assert whole.session_id == "a"


async def test_different_feedback_separates_a_member(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    runs = [uuid4() for _ in range(3)]
    for run_id in runs:
        await owner.execute(
            "INSERT INTO runs (tenant_id, id, mode, input, pinned, timeout_s, ended_at)"
            " VALUES ($1, $2, 'agent', '\"x\"', '{}', 1, now())",
            *(DEFAULT_TENANT, run_id),
        )
    ids = await store_episodes(
        database.pool, *(make_episode(TASK, day(n), run_id=run_id) for n, run_id in enumerate(runs))
    )
    await tending.tend(DEFAULT_TENANT, LATER)
    for outcome, left in (("SUCCESS", 1), ("FAILURE", 3)):
        async with database.begin(DEFAULT_TENANT) as tx:
            await give_feedback(tx, DEFAULT_TENANT, runs[1], "ann", outcome=outcome)
        assert len(await searchable(owner)) == left
    await embed(database.pool, ids)
    await tending.tend(DEFAULT_TENANT, LATER)
    [one] = await consolidated(owner)
    assert await searchable(owner) == {one["id"], ids[1]}
    assert one["said"]["instances"] == 2


async def test_erasing_a_session_removes_its_members(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    await owner.execute(
        "INSERT INTO sessions (tenant_id, id) VALUES ($1, 'secret')", DEFAULT_TENANT
    )
    ids = await store_episodes(
        database.pool,
        *(make_episode(TASK, day(n), session_id="open") for n in range(2)),
        *(make_episode(TASK, day(n), session_id="secret") for n in range(2)),
    )
    await tending.tend(DEFAULT_TENANT, LATER)
    assert len(await consolidated(owner)) == 2
    await erase_session(database, DEFAULT_TENANT, "secret", "ann")
    assert "secret" not in json.dumps(await rows(owner))
    [one] = await consolidated(owner)
    assert [each["episode_id"] for each in one["said"]["variations"]] == [str(i) for i in ids[:2]]
    assert await searchable(owner) == {one["id"]}


@pytest.mark.parametrize("owned", ["user_id", "session_id", "agent"])
async def test_episodes_of_different_scopes_are_not_consolidated(
    database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance, owned: str
) -> None:
    names = ("alice", "bob", None)
    ids = await store_episodes(
        database.pool,
        *(make_episode(TASK, day(n / 10), **{owned: name}) for n, name in enumerate(names)),
    )
    assert (await tending.tend(DEFAULT_TENANT, LATER))["groups"] == 0
    assert await consolidated(owner) == []
    # The database refuses it, too.
    made = json.dumps(make_episode(TASK, day(0), kind="consolidated").to_row(), default=str)
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        mixed = await connection.fetchval(
            "SELECT consolidate_episodes($1, $2, $3, '[]')", made, ids, LATER
        )
    assert mixed is False


async def test_erasing_a_tenant_removes_its_consolidated_episodes(
    database_url: str, database: Database, owner: asyncpg.Pool, tending: EpisodeMaintenance
) -> None:
    await store_episodes(database.pool, *(make_episode(TASK, day(n)) for n in range(3)))
    await tending.tend(DEFAULT_TENANT, LATER)
    async with transactions(database_url) as begin:
        await erase_tenant(begin, "default", "ann")
    assert not any((await rows(owner)).values())


async def deleted(database: Database, run_id: UUID, episode_id: UUID) -> None:
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute("SELECT mark_episode_deleted($1, now())", episode_id)


async def erased(database: Database, run_id: UUID, episode_id: UUID) -> None:
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute("SELECT erase_episodes(ARRAY[$1::uuid])", episode_id)


async def judged(database: Database, run_id: UUID, episode_id: UUID) -> None:
    async with database.begin(DEFAULT_TENANT) as tx:
        await give_feedback(tx, DEFAULT_TENANT, run_id, "ann", outcome="FAILURE")


@pytest.mark.parametrize("change", [deleted, erased, judged])
async def test_a_member_that_changes_meanwhile_is_left_out(
    database: Database, owner: asyncpg.Pool, change: Callable[..., Awaitable[None]]
) -> None:
    run_id = uuid4()
    await owner.execute(
        "INSERT INTO runs (tenant_id, id, mode, input, pinned, timeout_s, ended_at)"
        " VALUES ($1, $2, 'agent', '\"x\"', '{}', 1, now())",
        *(DEFAULT_TENANT, run_id),
    )
    members = [make_episode(TASK, day(0), run_id=run_id), make_episode(TASK, day(1))]
    ids = await store_episodes(database.pool, *members)
    await owner.execute("UPDATE episode_state SET state = 'mature'")
    one = to_json(as_one(members, members[0]).to_row()).decode()
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        assert await connection.fetchval(
            "SELECT consolidate_episodes($1, $2, $3, '[]')", one, ids, LATER
        )
        changing = asyncio.ensure_future(change(database, run_id, ids[0]))
        await until(
            lambda: owner.fetchval(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
    await changing
    assert await consolidated(owner) == []
    assert ids[1] in await searchable(owner)


async def test_no_object_of_another_tenant_can_be_made_trash(
    database: Database, owner: asyncpg.Pool
) -> None:
    own, other = (new_key(tenant, uuid4(), "trace") for tenant in (DEFAULT_TENANT, uuid4()))
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute("SELECT claim_objects($1)", [own, other])
    trash = await owner.fetch("SELECT object_key FROM deleted_objects")
    assert [row["object_key"] for row in trash] == [own]
