"""Bulk loading of episodes into the database: copied first, indexed afterwards."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
from numpy.typing import NDArray
from pgvector.asyncpg import register_vector

from benchmarks.memory import stage
from benchmarks.memory.clusters import Halves
from benchmarks.memory.corpus import Corpus, corpus
from bottega.llm.builtin_embedder import DIMENSION, BuiltinEmbedder
from bottega.memory.episodes import search
from bottega.memory.text.embeddings import packed_vectors

EMBEDDER = "clusters-1"
SESSIONS = 100
"""Episodes per session."""
DROPPED = ("ix_episode_vectors_task_768", "ix_episode_search_terms")

_BATCH = 5_000
_SEARCH = """
INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type, session_id,
                            failure_signature, trust, instances, terms)
SELECT tenant_id, id, at, outcome, domain, task_type, session_id, failure_signature, trust, 1,
       episode_terms(tenant_id, summary)
FROM episodes
"""
_STATE = """
INSERT INTO episode_state (tenant_id, episode_id, state, at)
SELECT tenant_id, id, 'active', at FROM episodes
"""
_FAILURES = """
INSERT INTO episode_failures (tenant_id, signature, episode_id)
SELECT tenant_id, failure_signature, id FROM episodes WHERE failure_signature IS NOT NULL
"""
_TAGS = """
INSERT INTO episode_tags (tenant_id, tag, episode_id)
SELECT tenant_id, task_type, id FROM episodes WHERE task_type IN ('forecast', 'ticket')
"""


@dataclass(frozen=True)
class Many:
    """Episodes as arrays: row n is the episode with the id n + 1.

    Attributes:
        age_days: 360 to 0. domain, outcome, failure: names as text.
    """

    vectors: Halves
    age_days: NDArray[np.float64]
    domain: NDArray[np.str_]
    outcome: NDArray[np.str_]
    failure: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.vectors)

    def at(self, number: int) -> datetime:
        return stage.NOW - timedelta(days=float(self.age_days[number]))


def made(corpus: Corpus, vectors: Halves, seed: int) -> Many:
    """Assign the corpus's texts to the vectors, repeatedly, in the order of time."""
    count = len(vectors)
    rows = [stage.row(told) for told in corpus.episodes]
    ages = -np.sort(-np.random.default_rng(seed).uniform(0, 360, count))
    places = np.arange(count) % len(rows)

    def column(name: str) -> NDArray[np.str_]:
        return np.array([row[name] or "" for row in rows])[places]

    return Many(vectors, ages, column("domain"), column("outcome"), column("failure_signature"))


async def fill(url: str, count: int) -> None:
    """Give :data:`stage.TENANT` ``count`` episodes, with vectors of the built-in embedder."""
    texts = corpus(7, min(count, 5_000))
    embedder = BuiltinEmbedder()
    random = np.random.default_rng(7)
    known = await embedder.embed([told.task for told in texts.episodes])
    noise = random.normal(scale=0.2 * DIMENSION**-0.5, size=(count, DIMENSION))
    vectors = (known[np.arange(count) % len(known)] + noise).astype(np.float16)
    many = made(texts, vectors, seed=9)
    await load(url, texts, many, embedder=embedder.name)


async def load(
    url: str, corpus: Corpus, many: Many, *, embedder: str = EMBEDDER
) -> dict[str, float]:
    """Store the episodes for :data:`stage.TENANT`; return the seconds of each part."""
    connection = await asyncpg.connect(url, command_timeout=None)
    try:
        await register_vector(connection)
        return await _load(connection, corpus, many, embedder)
    finally:
        await connection.close()


async def _load(
    connection: asyncpg.Connection, corpus: Corpus, many: Many, embedder: str
) -> dict[str, float]:
    took: dict[str, float] = {}
    indexes = [
        (await connection.fetchval("SELECT pg_get_indexdef($1::regclass)", name), name)
        for name in DROPPED
    ]
    await connection.execute(
        "SET session_replication_role = replica; SET synchronous_commit = off;"
        "SET maintenance_work_mem = '3GB'; SET max_parallel_maintenance_workers = 2"
    )
    for name in DROPPED:
        await connection.execute(f"DROP INDEX {name}")
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        took[name], began = now - began, now

    rows = [stage.row(told) for told in corpus.episodes]
    for records in _batches(_episodes(rows, many), len(many)):
        await connection.copy_records_to_table("episodes", records=records, columns=_EPISODE)
    lap("copy episodes")
    for statement in (_SEARCH, _STATE, _FAILURES, _TAGS):
        await connection.execute(statement)
    lap("words, states, tags")
    for records in _batches(_vectors(rows, many, embedder), len(many)):
        await connection.copy_records_to_table("episode_vectors", records=records, columns=_VECTOR)
    lap("copy vectors")
    for definition, name in indexes:
        await connection.execute(definition)
        lap(f"build {name}")
    await connection.execute("VACUUM ANALYZE")
    await connection.execute("CHECKPOINT")
    await search.refresh_common(connection, stage.TENANT)
    lap("vacuum, analyse, sample words")
    return took


def _batches(records: Iterator[tuple[Any, ...]], count: int) -> Iterator[list[tuple[Any, ...]]]:
    for start in range(0, count, _BATCH):
        yield [next(records) for _ in range(min(_BATCH, count - start))]


_EPISODE = (
    "tenant_id", "id", "at", "session_id", "outcome", "domain", "task_type", "failure_signature",
    "trust", "task", "execution", "result", "metadata", "summary",
)  # fmt: skip
_VECTOR = (
    "tenant_id", "episode_id", "embedder", "at", "outcome", "domain", "task_type", "session_id",
    "task", "result", "whole",
)  # fmt: skip


def _episodes(rows: list[dict[str, Any]], many: Many) -> Iterator[tuple[Any, ...]]:
    random = Random(0)
    execution = json.dumps(
        {
            "plan": [f"step {n}: look it up, check it, write it down" for n in range(4)],
            "adaptations": [],
            "duration_s": 41.5,
            "resources": {"usage": {"input": 12_000, "output": 900}, "model_calls": 7},
        }
    )
    for number in range(len(many)):
        row = rows[number % len(rows)]
        ticket = f"{random.randrange(16**8):08x}"  # a unique word
        summary = row["summary"] | {"task": f"{row['summary']['task']} Reference {ticket}."}
        yield (
            stage.TENANT, UUID(int=number + 1), many.at(number), f"s{number // SESSIONS}",
            row["outcome"], row["domain"], row["task_type"], row["failure_signature"], 3,
            json.dumps(row["task"] | {"original_input": summary["task"]}),
            execution, json.dumps({"output": row["summary"]["result"]}),
            json.dumps(row["metadata"]), json.dumps(summary),
        )  # fmt: skip


def _vectors(rows: list[dict[str, Any]], many: Many, embedder: str) -> Iterator[tuple[Any, ...]]:
    for number, vector in enumerate(many.vectors):
        row = rows[number % len(rows)]
        (packed,) = packed_vectors(vector[None].astype(np.float32))
        yield (
            stage.TENANT, UUID(int=number + 1), embedder, many.at(number), row["outcome"],
            row["domain"], row["task_type"], f"s{number // SESSIONS}", vector, packed, packed,
        )  # fmt: skip
