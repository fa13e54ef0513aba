"""Episodes for tests: stored, embedded, and read back with all their rows."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from bottega.db.pool import acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import UnavailableError
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.episodes.episode import Episode, Outcome, Summary
from bottega.objects import Objects

START = datetime(2026, 1, 1, tzinfo=UTC)
EMBEDDER = BuiltinEmbedder()

# The tables of an episode, without deleted objects and access times.
_TABLES = {
    "episodes": "to_jsonb(t)",
    "episode_bodies": "to_jsonb(t) - 'object_key' || jsonb_build_object("
    "'cold', object_key IS NOT NULL)",
    "episode_tags": "to_jsonb(t)",
    "episode_failures": "to_jsonb(t)",
    "episode_parts": "to_jsonb(t)",
    "episode_state": "to_jsonb(t)",
    "episode_search": "to_jsonb(t)",
    "episode_vectors": "to_jsonb(t)",
    "episode_work": "to_jsonb(t) - 'next_at'",
}


def day(number: float) -> datetime:
    """Return the time this many days after the start."""
    return START + timedelta(days=number)


def make_episode(task: str, at: datetime = START, **more: Any) -> Episode:
    """Build an episode of a task; its trace and output differ from others'."""
    episode_id = more.pop("id", None) or uuid4()
    mark = hashlib.sha256(episode_id.bytes).hexdigest()
    result = more.pop("answer", "all done")
    errors = more.get("failure_signature") or ""
    fields: dict[str, Any] = {
        "outcome": Outcome.SUCCESS,
        "task": {"original_input": task, "goals": [], "constraints": [], "context": {}},
        "summary": Summary(task=task, result=result, errors=errors),
        "execution": {"plan": ["look", "answer"], "duration_s": 2.0, "resources": {"tokens": 10}},
        "result": {"output": result, "error": None},
        "metadata": {"tools_used": ["fetch"], "strategies_applied": [], "agents": ["clerk"]},
        "origin": {"principal": "key", "run": None, "tool": None},
        "domain": "office",
        "task_type": "report",
        "trace": [{"step": "look", "mark": mark}],
        "output": {"text": result, "mark": mark},
        "trust": 3,
    }
    return Episode(at=at, id=episode_id, **(fields | more))


async def store_episodes(
    pool: asyncpg.Pool, *episodes: Episode, tenant: UUID = DEFAULT_TENANT, embedded: bool = True
) -> list[UUID]:
    """Store episodes, and their vectors."""
    texts = [json.dumps(episode.to_row(), default=str) for episode in episodes]
    async with acting_as(pool, tenant) as connection:
        found = await connection.fetch(
            "SELECT store_episode($1, row::jsonb) AS id FROM unnest($2::text[]) AS row",
            *(tenant, texts),
        )
    ids = [row["id"] for row in found]
    if embedded and ids:
        await embed(pool, ids, tenant=tenant)
    return ids


async def embed(
    pool: asyncpg.Pool,
    ids: Sequence[UUID],
    *,
    tenant: UUID = DEFAULT_TENANT,
    name: str = EMBEDDER.name,
) -> None:
    """Store vectors for searchable episodes."""
    async with acting_as(pool, tenant) as connection:
        rows = await connection.fetch(
            "SELECT id, summary FROM episodes WHERE id = ANY ($1) ORDER BY id", ids
        )
        summaries = [Summary(**json.loads(row["summary"])) for row in rows]
        whole = [text for each in summaries for text in (each.task, each.result, each.whole)]
        vectors = (await EMBEDDER.embed(whole)).reshape(len(rows), 3, -1).tolist()
        await connection.executemany(
            """
            INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain,
                                         task_type, session_id, user_id, agent, task, result,
                                         whole)
            SELECT tenant_id, episode_id, $2, at, outcome, domain, task_type, session_id,
                   user_id, agent, $3::real[]::halfvec,
                   packed_vector($4::real[]::halfvec), packed_vector($5::real[]::halfvec)
            FROM episode_search WHERE episode_id = $1
            """,
            [(row["id"], name, *three) for row, three in zip(rows, vectors, strict=True)],
        )
        await connection.execute(
            "DELETE FROM episode_work WHERE work = 'embed' AND episode_id = ANY ($1)", ids
        )


async def rows(owner: asyncpg.Pool, *, but: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Read all rows of all episodes, without the columns ``but``."""
    found = {}
    for table, row in _TABLES.items():
        texts = await owner.fetch(f"SELECT {row} - $1::text[] AS row FROM {table} t", list(but))
        found[table] = sorted((json.loads(each["row"]) for each in texts), key=json.dumps)
    return found


async def states(owner: asyncpg.Pool) -> dict[UUID, str]:
    """Read the state of each episode."""
    return {
        row["episode_id"]: row["state"] for row in await owner.fetch("SELECT * FROM episode_state")
    }


async def searchable(owner: asyncpg.Pool) -> set[UUID]:
    """Read the episodes that a search can find; check that each has a vector."""
    found = {row["episode_id"] for row in await owner.fetch("SELECT * FROM episode_search")}
    vectors = {row["episode_id"] for row in await owner.fetch("SELECT * FROM episode_vectors")}
    waiting = await owner.fetch("SELECT * FROM episode_work WHERE work = 'embed'")
    assert found == vectors | {row["episode_id"] for row in waiting}
    return found


class Folder(Objects):
    """Object store in a folder."""

    def __init__(self, path: Path, pool: asyncpg.Pool) -> None:
        super().__init__(path.as_uri(), pool)
        self.path = path

    def keys(self) -> set[str]:
        return {
            str(place.relative_to(self.path)) for place in self.path.rglob("*") if place.is_file()
        }


class Tripped(Folder):
    """Object store that fails at one of the objects, before or after it is stored."""

    def __init__(self, path: Path, pool: asyncpg.Pool, *, at: int, before: bool) -> None:
        super().__init__(path, pool)
        self.left = at
        self.before = before

    async def put(self, key: str, body: bytes, **more: int) -> None:
        self.left -= 1
        if self.left < 0 and self.before:
            raise UnavailableError("the store is down")
        await super().put(key, body, **more)
        if self.left < 0:
            raise UnavailableError("the store is down")


async def bodies(owner: asyncpg.Pool, folder: Folder, episode_id: UUID) -> dict[str, Any]:
    """Read the bodies of an episode, wherever they are."""
    found = await owner.fetch("SELECT * FROM episode_bodies WHERE episode_id = $1", episode_id)
    return {
        row["part"]: json.loads(row["content"] or await folder.get(row["object_key"]))
        for row in found
    }


async def cold(owner: asyncpg.Pool, episode_id: UUID) -> set[str]:
    """Read the parts of an episode that are in cold storage."""
    found = await owner.fetch(
        "SELECT part FROM episode_bodies WHERE episode_id = $1 AND object_key IS NOT NULL",
        episode_id,
    )
    return {row["part"] for row in found}


async def trip(owner: asyncpg.Pool, table: str, event: str, what: str) -> None:
    """Make the first row that is changed this way fail its transaction.

    Args:
        what: ``raise`` an error, or ``die`` with the connection.
    """
    done = {
        "raise": "RAISE EXCEPTION 'tripped'",
        "die": "PERFORM pg_terminate_backend(pg_backend_pid())",
    }[what]
    await owner.execute(
        "CREATE OR REPLACE FUNCTION tripped() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
        f" AS $$ BEGIN {done}; RETURN coalesce(NEW, OLD); END $$"
    )
    await owner.execute(
        f"CREATE TRIGGER tripped AFTER {event} ON {table} FOR EACH ROW EXECUTE FUNCTION tripped()"
    )


async def untrip(owner: asyncpg.Pool, table: str) -> None:
    await owner.execute(f"DROP TRIGGER tripped ON {table}")


def another(episode: Episode, at: datetime, **more: Any) -> Episode:
    """Return a copy of an episode at another time, with its own id."""
    return replace(make_episode(episode.task["original_input"], at), **more)
