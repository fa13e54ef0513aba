"""Cost of storing, searching and reading many episodes, and recall of the search.

The floor in the same invocation: an empty round trip, and the exact answer by numpy.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.harness import cpu_s
from benchmarks.memory import loading, stage
from benchmarks.memory.clusters import Clusters, Floats, Halves, cosines, nearest
from benchmarks.memory.corpus import Corpus, corpus
from benchmarks.memory.loading import Many
from benchmarks.memory.measures import recall_of_exact
from benchmarks.memory.texts import vectors_of
from bottega.db.engine import Database, acting_as
from bottega.llm.builtin_embedder import DIMENSION
from bottega.memory.episodes import search
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import EpisodeFilter, Outcome
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.text.content import content_words
from bottega.memory.text.embeddings import Vectors

AGED_DAYS = 180.0
AGED_COSINE = 0.8
TABLES = (
    "episodes", "episode_bodies", "episode_reflections", "episode_tags", "episode_failures",
    "episode_state",
    "episode_search", "episode_vectors", "episode_work",
)  # fmt: skip


class Fixed:
    """An embedder with precomputed vectors of some texts."""

    name = loading.EMBEDDER
    dimension = DIMENSION

    def __init__(self, known: dict[str, NDArray[np.float32]]) -> None:
        self.known = known

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return np.array([self.known[text] for text in texts])


@dataclass(frozen=True)
class Timed:
    """Times of sequential operations.

    Milliseconds of each, and the mean CPU milliseconds of the database and of this process for one.
    On a busy machine the CPU times are more reliable.
    """

    took: Sequence[float]
    database_ms: float
    client_ms: float


async def timed(pool: asyncpg.Pool, operations: Sequence[Callable[[], Awaitable[Any]]]) -> Timed:
    postmaster = psutil.Process(await pool.fetchval("SELECT pg_backend_pid()")).ppid()
    took = []
    database, client = cpu_s(postmaster), time.process_time()
    for operation in operations:
        began = time.perf_counter()
        await operation()
        took.append((time.perf_counter() - began) * 1e3)
    each = 1e3 / len(operations)
    return Timed(took, (cpu_s(postmaster) - database) * each, (time.process_time() - client) * each)


def show(name: str, timed: Timed, note: str = "") -> None:
    took = sorted(timed.took)
    p50, p95, p99 = (took[min(len(took) - 1, int(len(took) * q))] for q in (0.5, 0.95, 0.99))
    print(
        f"  {name:40} {p50:8.2f} {p95:8.2f} {p99:8.2f} ms"
        f"   {timed.database_ms:6.2f} {timed.client_ms:6.2f} ms   {note}",
        flush=True,
    )


async def ingest(pool: asyncpg.Pool, corpus: Corpus, rounds: int) -> None:
    """Store episodes by ``store_episode``: one per transaction, and many in one."""
    numbers = count(10**9)
    rows = [stage.row(told) for told in corpus.episodes]

    def texts(size: int) -> list[str]:
        return [
            json.dumps(rows[n % len(rows)] | {"id": str(UUID(int=n))})
            for n in (next(numbers) for _ in range(size))
        ]

    async def one(text: str) -> None:
        async with acting_as(pool, stage.TENANT) as connection:
            await connection.execute("SELECT store_episode($1, $2::jsonb)", stage.TENANT, text)

    took = await timed(pool, [lambda text=text: one(text) for text in texts(rounds)])  # type: ignore[misc]
    show("store, one per transaction", took, f"{1e3 / statistics.mean(took.took):,.0f} episodes/s")
    many = [(stage.TENANT, text) for text in texts(rounds)]
    began = time.perf_counter()
    async with acting_as(pool, stage.TENANT) as connection:
        await connection.executemany("SELECT store_episode($1, $2::jsonb)", many)
    print(
        f"  {'store, many in one transaction':40} {rounds / (time.perf_counter() - began):,.0f}/s"
    )


class Asked:
    """Questions with text and vector, and their exact answers."""

    def __init__(self, many: Many, vectors: Floats, corpus: Corpus, random: Random) -> None:
        self.many = many
        self.vectors = vectors
        asked = [query.text for query in corpus.queries]
        self.texts = [f"{random.choice(asked)} ({n})" for n in range(len(vectors))]
        began = time.perf_counter()
        self.cosines = cosines(many.vectors, vectors)
        self.exact_ms = (time.perf_counter() - began) / len(vectors) * 1e3
        fresh = many.age_days < AGED_DAYS
        self.eligible = fresh | (self.cosines >= AGED_COSINE)

    def exact(self, matching: NDArray[np.bool_], k: int = 10) -> NDArray[np.intp]:
        """Return the nearest that match, by the rules of age."""
        return nearest(self.cosines, self.eligible & matching, k)


async def semantic(
    name: str, memory: EpisodicMemory, pool: asyncpg.Pool, asked: Asked,
    matching: NDArray[np.bool_], where: EpisodeFilter = search.ANY,
) -> None:  # fmt: skip
    """Measure the top ten by the whole search: candidates, scoring, reading.

    Recall is the share of the exact ten nearest among the candidates.
    """
    found: list[list[int]] = []

    async def candidates(place: int) -> None:
        async with acting_as(pool, stage.TENANT) as connection:
            rows = await search.candidates(
                connection,
                EVERYTHING,
                content_words(asked.texts[place]),
                asked.vectors[place],
                embedder=loading.EMBEDDER,
                aged_before=stage.NOW - timedelta(days=AGED_DAYS),
                where=where,
            )
        found.append([row.episode_id.int - 1 for row in rows])

    async def whole(place: int) -> None:
        await memory.semantic_search(
            stage.TENANT, EVERYTHING, asked.texts[place], k=10, where=where
        )

    places = range(len(asked.vectors))
    alone = await timed(pool, [lambda p=p: candidates(p) for p in places])  # type: ignore[misc]
    took = await timed(pool, [lambda p=p: whole(p) for p in places])  # type: ignore[misc]
    recall = recall_of_exact(found, asked.exact(matching))
    show(
        name,
        took,
        f"recall@10 {recall:.3f}; candidates alone {statistics.median(alone.took):.2f} ms",
    )


async def modes(opened: Database, asked: Asked, rounds: int) -> None:
    many, pool = asked.many, opened.pool
    known = dict(zip(asked.texts, asked.vectors, strict=True))
    embedder = Fixed(known)
    embedders = Embedders(pool, lambda: embedder, lambda _: None)
    memory = EpisodicMemory(pool, embedders=embedders, clock=lambda: stage.NOW)
    everything = np.ones(len(many), np.bool_)
    async with pool.acquire() as connection:
        show(
            "floor: SELECT 1", await timed(pool, [lambda: connection.fetchval("SELECT 1")] * rounds)
        )
    print(f"  {'floor: exact, numpy':40} {asked.exact_ms:8.2f} (mean)")
    await semantic("semantic, first time (cold)", memory, pool, asked, everything)
    await semantic("semantic", memory, pool, asked, everything)
    domain = EpisodeFilter(domain="finance", outcomes=(Outcome.SUCCESS,))
    fits = (many.domain == "finance") & (many.outcome == "SUCCESS")
    await semantic("hybrid: domain, only successes", memory, pool, asked, fits, domain)
    month = EpisodeFilter(after=stage.NOW - timedelta(days=30))
    await semantic("temporal: the last 30 days", memory, pool, asked, many.age_days < 30, month)
    random = Random(1)
    numbers = [random.randrange(len(many)) for _ in range(rounds)]
    await listed("structured: domain and outcome", memory, pool, many, domain, fits, rounds)
    rare = str(next(each for each in many.failure if each))
    await listed(
        "similar failures", memory, pool, many, EpisodeFilter(failure_signature=rare),
        many.failure == rare, rounds,
    )  # fmt: skip
    await listed("recent", memory, pool, many, search.ANY, everything, rounds)
    by_session = [
        lambda n=n: memory.structured_search(
            stage.TENANT,
            EVERYTHING,
            EpisodeFilter(session_id=f"s{n // loading.SESSIONS}"),
            limit=20,
        )
        for n in numbers
    ]
    show("structured: session", await timed(pool, by_session))
    tagged = replace(domain, tags=("forecast",))
    await listed("structured: tag, domain and outcome", memory, pool, many, tagged, None, rounds)
    by_id = [lambda n=n: memory.get(stage.TENANT, EVERYTHING, UUID(int=n + 1)) for n in numbers]
    show("by id", await timed(pool, by_id), "target 2 ms, at most 50")


async def listed(
    name: str, memory: EpisodicMemory, pool: asyncpg.Pool, many: Many, where: EpisodeFilter,
    matching: NDArray[np.bool_] | None, rounds: int,
) -> None:  # fmt: skip
    """List twenty episodes by attributes, the latest first."""
    answers: list[list[int]] = []

    async def ask() -> None:
        episodes = await memory.recent(stage.TENANT, EVERYTHING, 20, where)
        answers.append([each.id.int - 1 for each in episodes if each.id])

    took = await timed(pool, [ask] * rounds)
    note = "target p95 20 ms, at most 200"
    if matching is not None:
        latest = np.argsort(np.where(matching, many.age_days, np.inf))[: min(20, matching.sum())]
        note = f"recall {recall_of_exact(answers[:1], latest[None]):.3f}; {note}"
    show(name, took, note)


async def sizes(pool: asyncpg.Pool, episodes: int) -> None:
    total = 0
    for table in TABLES:
        heap, all_of = await pool.fetchrow(
            "SELECT pg_table_size($1::regclass), pg_total_relation_size($1::regclass)", table
        )
        total += all_of
        beside = (all_of - heap) / episodes
        print(f"  {table:20} {heap / episodes:8.0f} bytes each, indexes {beside:8.0f}")
    print(f"  {'in all':20} {total / episodes:8.0f} bytes each (at most 10,240)")


async def drawn(episodes: int, queries: int, of: Path | None) -> tuple[Halves, Floats, str]:
    """Return vectors to store, others to ask for, and a title."""
    if of is not None:
        return *await vectors_of(of, episodes, queries), f"{episodes:,} episodes, real texts"
    clusters = Clusters.drawn(max(episodes // 200, 10), seed=7)
    title = f"{episodes:,} episodes in {len(clusters.centres):,} clusters"
    asked = clusters.vectors(queries, seed=10).astype(np.float32)
    return clusters.vectors(episodes, seed=8), asked, title


async def measure(
    opened: Database, episodes: int, queries: int, rounds: int, of: Path | None = None
) -> None:
    texts = corpus(7, min(episodes, 5_000))
    vectors, questions, title = await drawn(episodes, queries, of)
    many = loading.made(texts, vectors, seed=9)
    asked = Asked(many, questions, texts, Random(2))
    print(f"{title:42} {'p50':>8} {'p95':>8} {'p99':>8}      CPU: database, here")
    took = await loading.load(opened.url, texts, many)
    for name, seconds in took.items():
        print(f"  {name:48} {seconds:8.1f} s", flush=True)
    await sizes(opened.pool, episodes)
    await modes(opened, asked, rounds)
    await ingest(opened.pool, texts, rounds)


async def run(
    episodes: int, of: Path | None, shared_buffers: str | None, queries: int, rounds: int
) -> None:
    async with stage.database(shared_buffers) as opened:
        await measure(opened, episodes, queries, rounds, of)


def main(
    episodes: int,
    of: Path | None = None,
    shared_buffers: str | None = None,
    queries: int = 200,
    rounds: int = 500,
) -> None:
    """Measure.

    Args:
        of: file of texts whose vectors are stored; ``None``: vectors in random clusters.
        shared_buffers: PostgreSQL's setting.
    """
    asyncio.run(run(episodes, of, shared_buffers, queries, rounds))
