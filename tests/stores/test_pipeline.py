"""A whole maintenance job: repeated, or killed at any point, it has the same result as once."""

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from bottega.db import migrate
from bottega.db.connect import connect
from bottega.db.pool import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import NotifyListener
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.episode import Episode, Outcome
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.learning import maintenance as jobs
from bottega.memory.learning.maintenance import Job, Maintenance, stages_of
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import (
    Applicability,
    Application,
    Arm,
    Category,
    Content,
    ContentKind,
    Pattern,
    PatternState,
)
from tests.conftest import cloned, name_of
from tests.memories import EMBEDDER, Folder, day, make_episode, rows, states, store_episodes
from tests.pattern_changes import add, record
from tests.waiting import until

NOW = day(60)
TASK = "Export the invoices of each branch"


def numbered(number: int) -> UUID:
    return UUID(int=0xE0000 + number)


class Looked:
    """A memory and its maintenance."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.store = Folder(folder, database.pool)
        pool = database.pool
        self.memory = EpisodicMemory(
            pool,
            embedders=Embedders(pool, lambda: EMBEDDER, lambda _: EMBEDDER),
            objects=self.store,
            clock=lambda: NOW,
        )
        listener = NotifyListener(database.connect)
        self.patterns = PatternCache(pool, listener, clock=lambda: NOW)
        stages = stages_of(
            pool,
            EpisodeMaintenance(pool, self.store),
            self.patterns,
            self.store,
            EmbeddingWorker(pool, self.memory.embedders).measure,
            self.as_maintenance,
            now=lambda: NOW,
        )
        self.maintenance = Maintenance(pool, stages, first_pause_s=0.0)

    async def as_maintenance(self) -> asyncpg.Connection:
        return await connect(self.database.url, role=migrate.ROLE, longest_s=None)

    async def order(self) -> UUID:
        async with acting_as(self.database.pool, DEFAULT_TENANT) as connection:
            return (await jobs.order(connection, DEFAULT_TENANT))[0]

    async def look(self) -> Job:
        """Execute a maintenance job until it ends; return it."""
        ordered = await self.order()
        await until(lambda: self.maintenance.leased().do_due(), lambda seen: seen == float("inf"))
        async with acting_as(self.database.pool, DEFAULT_TENANT) as connection:
            return await jobs.get(connection, DEFAULT_TENANT, ordered)


def tried(number: int, tools: str, outcome: Outcome, **more: Any) -> Episode:
    """Return a recent episode with these tool calls; a name in capitals failed."""
    trace = [
        {"step": step, "task_id": None, "tool": tool.lower()}
        | ({"error": "no answer", "signature": f"no {tool}"} if tool.isupper() else {})
        for step, tool in enumerate(tools.split())
    ]
    fields: dict[str, Any] = {"task_type": "lookup", "domain": "shop", "trace": trace}
    fields["user_id"] = f"user {number % 4}"
    fields["metadata"] = {"agents": tools.lower().split()}
    return make_episode(
        f"Look up order {number}",
        day(50 + number / 100),
        id=numbered(number),
        outcome=outcome,
        **(fields | more),
    )


def said(name: str, action: str, domain: str, **more: Any) -> Pattern:
    content = Content(ContentKind.HEURISTIC, {"condition": "always", "action": action})
    return Pattern(
        name=name,
        category=Category.STRATEGIC,
        content=content,
        applicability=Applicability(problem_types=("report",), domains=(domain,)),
        summary=action,
        trust=3,
        **more,
    )


async def fill(looked: Looked) -> None:
    """Give every stage something to do."""
    pool = looked.database.pool
    alike = [make_episode(TASK, day(1 + n / 10), id=numbered(500 + n)) for n in range(3)]
    gone = make_episode("Forget this", day(2), id=numbered(600))
    good = [tried(n, "search open", Outcome.SUCCESS) for n in range(8)]
    bad = [tried(20 + n, "search GUESS", Outcome.FAILURE) for n in range(8)]
    imported = [tried(40 + n, "pray", Outcome.SUCCESS, trust=1) for n in range(8)]
    cancelled = [tried(60 + n, "wait", Outcome.CANCELLED) for n in range(8)]
    await store_episodes(pool, *alike, gone, *good, *bad, *imported, *cancelled)
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        await connection.fetchval("SELECT mark_episode_deleted($1, $2)", gone.id, day(3))
    ids = {}
    for name, action, domain in (
        ("promising", "ask first", "office"),
        ("twin one", "check twice", "office"),
        ("twin two", "check twice", "branch"),
        ("failing", "skip the check", "office"),
    ):
        kept = await add(looked.patterns, DEFAULT_TENANT, said(name, action, domain))
        ids[name] = kept.key
    for name in ("twin one", "twin two", "failing"):
        await apply(looked, ids[name], [False] * 8, Arm.REPORTED_WITHOUT)
        await apply(looked, ids[name], [True] * 20)
    await apply(looked, ids["failing"], [True] * 30, Arm.REPORTED_WITHOUT, NOW + timedelta(hours=1))
    await apply(looked, ids["failing"], [False] * 30, Arm.REPORTED, NOW + timedelta(hours=1))
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        # As if the worker had died before the look: the night makes up for it.
        await connection.execute(
            "INSERT INTO pattern_applications (tenant_id, pattern_id, version, arm, at, good)"
            " SELECT $1, $2, 1, arm, $3, arm = 'trial'"
            " FROM unnest(ARRAY['trial', 'control']) arm, generate_series(1, 15)",
            *(DEFAULT_TENANT, ids["promising"], day(55)),
        )


async def apply(
    looked: Looked,
    pattern_id: UUID,
    good: list[bool],
    arm: Arm = Arm.REPORTED,
    at: datetime = day(55),
) -> None:
    await record(
        looked.patterns,
        DEFAULT_TENANT,
        [Application(pattern_id=pattern_id, version=1, arm=arm, at=at, good=each) for each in good],
    )


async def content(owner: asyncpg.Pool) -> Any:
    """Return the content of the memory without random ids."""
    found = await rows(owner)
    for table in ("patterns", "pattern_sources", "pattern_applications"):
        texts = await owner.fetch(f"SELECT to_jsonb(t) AS row FROM {table} t")
        found[table] = [json.loads(each["row"]) for each in texts]
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", _known, json.dumps(found))
    return {name: sorted(map(json.dumps, each)) for name, each in json.loads(text).items()}


def _known(match: re.Match[str]) -> str:
    number = UUID(match[0]).int
    return match[0] if 0xE0000 <= number <= 0xE1000 else "made up"


@pytest.fixture(scope="module")
def filled(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a database with something to do for every stage; the tests get clones of it."""

    async def work(url: str) -> None:
        async with open_database(url) as database:
            await fill(Looked(database, tmp_path_factory.mktemp("objects")))

    with cloned(server) as url:
        asyncio.run(work(url))
        yield name_of(url)


@pytest.fixture
def database_url(server: str, filled: str) -> Iterator[str]:
    with cloned(server, template=filled) as url:
        yield url


@pytest.fixture
async def looked(database: Database, tmp_path: Path) -> Looked:
    return Looked(database, tmp_path / "objects")


async def test_each_stage_works_and_is_reported(owner: asyncpg.Pool, looked: Looked) -> None:
    job = await looked.look()
    assert (job.status, job.error, job.stage) == ("done", None, 6)
    done = job.progress
    assert done["episodes"]["groups"] == 1
    assert done["episodes"]["purged"] == 1
    assert done["mining"]["new"] >= 1
    assert done["mining"]["read"] == 17
    assert done["validation"]["promoted"]["count"] == 1
    assert done["refinement"]["deprecated"]["count"] == 1
    assert "skipped" not in done["indices"]
    report = job.report or {}
    assert report["episodes"]["by_state"]["consolidated"] == 3
    assert report["patterns"]["by_state"] == {
        "CANDIDATE": done["mining"]["new"],
        "VALIDATED": 3,
        "DEPRECATED": 1,
    }
    assert sum(report["patterns"]["discovered_by_day"].values()) == done["mining"]["new"]
    judged = {item["name"]: item for item in report["validations"]["items"]}
    assert judged["promising"]["promoted"] is True
    assert (judged["promising"]["n"], judged["promising"]["rate"]) == (15, 1.0)
    assert judged["promising"]["decision"].endswith("is validated")
    assert report["mined"]["recovery"] + report["mined"]["decomposition"] == done["mining"]["found"]
    assert report["storage"]["objects"]["bodies"] > 0
    assert numbered(600) not in await states(owner)


async def test_only_own_runs_that_were_not_cancelled_are_mined(looked: Looked) -> None:
    await looked.look()
    found = await looked.patterns.page(DEFAULT_TENANT, limit=100)
    mined = [each for each in found if "mined" in each.origin]
    assert mined
    assert all(each.state is PatternState.CANDIDATE and each.trust == 3 for each in mined)
    sources = {source for each in mined for source in each.evidence.mined_from}
    assert sources <= {numbered(n) for n in range(8)}
    assert not {"pray", "wait"} & {name for each in mined for name in each.content.uses}


async def test_no_text_of_two_users_alone_is_mined(owner: asyncpg.Pool, looked: Looked) -> None:
    """Check kinds of tasks, domains and failures."""
    secret = {"task_type": "divorce", "domain": "alice's"}
    well, badly = (
        [
            tried(100 * place + n, tools, outcome, **secret, user_id=f"user {n % 2}")
            for n in range(10)
        ]
        for place, (tools, outcome) in enumerate(
            (("SEARCH call", Outcome.SUCCESS), ("SEARCH guess", Outcome.FAILURE)), start=2
        )
    )
    await store_episodes(looked.database.pool, *well, *badly)
    await looked.look()
    mined = await owner.fetch("SELECT p::text AS row FROM patterns p WHERE origin ? 'mined'")
    assert mined, "of the others' episodes something is"
    assert not [row for row in mined if "divorce" in row["row"] or "alice" in row["row"]]


async def test_a_second_job_changes_nothing(owner: asyncpg.Pool, looked: Looked) -> None:
    await looked.look()
    first = await content(owner)
    again = await looked.look()
    assert again.status == "done"
    assert again.progress["mining"]["new"] == 0
    assert await content(owner) == first


async def test_traces_in_the_object_store_are_mined_too(
    owner: asyncpg.Pool, looked: Looked
) -> None:
    from bottega.objects import copied

    ids = [numbered(n) for n in range(8)]
    pool = looked.database.pool
    moved = await copied(pool, looked.store, DEFAULT_TENANT, ids, ("trace",))
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        await connection.execute("SELECT move_bodies($1, $2)", ids, moved)
    assert (await looked.look()).progress["mining"]["away"] == 0
    discovered = await owner.fetchval("SELECT count(*) FROM patterns WHERE origin ? 'mined'")
    assert discovered >= 1


# --- Interrupted --------------------------------------------------------------------------------

PLACES = {
    "episodes": ("episode_state", "UPDATE", "true"),
    "purging": ("episodes", "DELETE", "true"),
    "mining": ("patterns", "INSERT", "NEW.origin ? 'mined'"),
    "validation": ("patterns", "UPDATE", "NEW.state = 'VALIDATED' AND OLD.state = 'CANDIDATE'"),
    "reviewing": ("patterns", "UPDATE", "NEW.state = 'DEPRECATED' AND OLD.state = 'IN_REVIEW'"),
    "indices": ("index_maintenance", "INSERT", "true"),
    "report": ("memory_jobs", "UPDATE", "NEW.status = 'done'"),
    "between": ("memory_jobs", "UPDATE", "NEW.stage = 3 AND OLD.stage = 2"),
}


async def trip_once(owner: asyncpg.Pool, place: str, nth: int, what: str) -> None:
    """Make the nth such change fail once: with an error, or with a lost connection."""
    table, event, when = PLACES[place]
    done = {
        "raise": "RAISE EXCEPTION 'tripped'",
        "die": "PERFORM pg_terminate_backend(pg_backend_pid())",
    }[what]
    await owner.execute(
        "CREATE SEQUENCE trips;"
        " CREATE FUNCTION tripped() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN"
        f" IF nextval('public.trips') = {nth} THEN {done}; END IF;"
        " RETURN coalesce(NEW, OLD); END $$;"
        f" CREATE TRIGGER tripped AFTER {event} ON {table} FOR EACH ROW WHEN ({when})"
        " EXECUTE FUNCTION tripped()"
    )


@pytest.fixture(scope="module")
def expected(server: str, filled: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The content after an undisturbed job."""

    async def work(url: str) -> Any:
        async with open_database(url) as database, asyncpg.create_pool(url, min_size=0) as owner:
            await Looked(database, tmp_path_factory.mktemp("undisturbed")).look()
            return await content(owner)

    with cloned(server, template=filled) as url:
        return asyncio.run(work(url))


@pytest.mark.parametrize(
    ("place", "what"),
    [
        *(
            pytest.param(place, "die", marks=() if number % 3 == 0 else pytest.mark.deep)
            for number, place in enumerate(PLACES)
        ),
        ("mining", "raise"),
        *(
            pytest.param(place, "raise", marks=pytest.mark.deep)
            for place in PLACES
            if place != "mining"
        ),
    ],
)
async def test_an_interrupted_job_that_is_resumed_has_the_same_result(
    owner: asyncpg.Pool, looked: Looked, expected: Any, place: str, what: str
) -> None:
    await trip_once(owner, place, 2 if place == "episodes" else 1, what)
    broken = await looked.order()
    try:
        await looked.maintenance.leased().do_due()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        await owner.execute("UPDATE memory_jobs SET next_at = now()")  # its lease is over
    assert await owner.fetchval("SELECT last_value FROM trips") >= 1
    assert await owner.fetchval("SELECT status FROM memory_jobs WHERE id = $1", broken) == "running"
    job = await looked.look()
    assert (job.id, job.status, job.tries) == (broken, "done", 2)
    assert await content(owner) == expected
