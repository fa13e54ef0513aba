"""Cost of storing, searching and reading many episodes, and recall of the search.

    python -m benchmarks.memory [--episodes 10000 100000] [--texts FILE]
    python -m benchmarks.memory --episodes 1000000 --shared-buffers 6GB    (an hour, 20 GB of disk)

Vectors are those of the built-in embedder, of a file's lines or of made-up sentences; if there are
fewer than episodes, they are repeated with a little noise, as tasks that come again in other words.
The floor of the same invocation: an empty round trip, and the exact answer by numpy. Then the
hundred episodes nearest to each question are erased, and the same questions are asked at once. At
last, operations of a run's working memory.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, cast
from uuid import UUID

import asyncpg
import numpy as np
import psutil
from numpy.typing import NDArray
from pgvector.asyncpg import register_vector

from benchmarks.harness import cpu_s, opened_database, percentile
from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT as TENANT
from bottega.llm.builtin_embedder import DIMENSION, BuiltinEmbedder
from bottega.memory.episodes import search
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import EpisodeFilter, Outcome
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.text.content import content_words
from bottega.memory.text.embeddings import Vectors, packed_vectors
from bottega.memory.working_memory import WorkingMemory

NOW = datetime(2026, 11, 1, tzinfo=UTC)
AGED_DAYS, AGED_COSINE = 180.0, 0.8
SESSIONS = 100
"""Episodes per session."""
_BATCH = 5_000
_NOISE = 0.2
_WORDS = (
    ("compare", "forecast", "book", "refund", "translate", "review", "deploy", "measure"),
    ("invoices", "contracts", "tickets", "servers", "flights", "reports", "orders", "sensors"),
    ("of the north", "of last quarter", "for a new customer", "by Friday", "in two languages"),
    ("finance", "support", "travel", "software", "research"),
)


@dataclass(frozen=True)
class Many:
    """Episodes as arrays: row n is the episode with the id n + 1.

    Attributes:
        vectors: shape (episodes, dimension), each of length 1.
        age_days: 360 to 0.
        failed: which ones were failures.
    """

    embedder: str
    texts: Sequence[str]
    vectors: NDArray[np.float16]
    age_days: NDArray[np.float64]
    domain: NDArray[np.str_]
    failed: NDArray[np.bool_]

    def fields(self, number: int) -> dict[str, Any]:
        """Return an episode as ``store_episode`` takes it."""
        text, failed = self.texts[number % len(self.texts)], bool(self.failed[number])
        summary = {
            "task": f"{text} Reference {number:08x}.",
            "result": "The work is done.",
            "errors": "the server did not answer" if failed else "",
            "steps": "look_up write_down",
        }
        return {
            "id": str(UUID(int=number + 1)),
            "at": (NOW - timedelta(days=float(self.age_days[number]))).isoformat(),
            "session_id": f"s{number // SESSIONS}",
            "outcome": "FAILURE" if failed else "SUCCESS",
            "domain": str(self.domain[number]),
            "task_type": f"type{number % 50}",
            "trust": 3,
            "failure_signature": f"failure{number % 100}" if failed else None,
            "task": {"original_input": text, "goals": [], "constraints": [], "context": {}},
            "metadata": {"tools_used": ["look_up", "write_down"]},
            "summary": summary,
        }


async def made(texts: Sequence[str], count: int) -> Many:
    """Return so many episodes with vectors of the texts, in the order of time."""
    embedder = BuiltinEmbedder()
    parts = [
        await embedder.embed(texts[start : min(start + _BATCH, count)])
        for start in range(0, min(count, len(texts)), _BATCH)
    ]
    known = np.concatenate(parts)
    vectors = [known.astype(np.float16)]
    random = np.random.default_rng(7)
    for start in range(len(known), count, _BATCH):
        some = known[random.integers(len(known), size=min(_BATCH, count - start))]
        near = some + random.normal(scale=_NOISE * DIMENSION**-0.5, size=some.shape)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        vectors.append(near.astype(np.float16))
    domains = np.array(_WORDS[-1])[random.integers(len(_WORDS[-1]), size=count)]
    ages = -np.sort(-random.uniform(0, 360, count))
    failed = random.random(count) < 0.2
    return Many(embedder.name, texts, np.concatenate(vectors), ages, domains, failed)


def read(path: Path | None) -> list[str]:
    """Return different texts in random order: a file's lines, or made-up sentences."""
    if path is None:
        texts = [f"{a} the {b} {c}, with {n} steps" for a, b, c in _phrases() for n in range(20)]
    else:
        lines = (line.strip() for line in path.read_text(errors="replace").splitlines())
        texts = list(dict.fromkeys(line for line in lines if len(line) > 25))
    Random(1).shuffle(texts)
    return texts


def _phrases() -> Iterable[tuple[str, str, str]]:
    return cast("Iterable[tuple[str, str, str]]", product(*_WORDS[:3]))


# --- Loading: copied first, indexed afterwards ----------------------------------------------------

_EPISODE = (
    "tenant_id", "id", "at", "session_id", "outcome", "domain", "task_type", "failure_signature",
    "trust", "task", "execution", "result", "metadata", "summary",
)  # fmt: skip
_VECTOR = (
    "tenant_id", "episode_id", "embedder", "at", "outcome", "domain", "task_type", "session_id",
    "task", "result", "whole",
)  # fmt: skip
_DROPPED = ("ix_episode_vectors_task_768", "ix_episode_search_terms")
_DERIVED = (
    """
    INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type, session_id,
                                failure_signature, trust, instances, terms)
    SELECT tenant_id, id, at, outcome, domain, task_type, session_id, failure_signature, trust, 1,
           episode_terms(tenant_id, summary)
    FROM episodes
    """,
    """
    INSERT INTO episode_state (tenant_id, episode_id, state, at)
    SELECT tenant_id, id, 'active', at FROM episodes
    """,
    """
    INSERT INTO episode_failures (tenant_id, signature, episode_id)
    SELECT tenant_id, failure_signature, id FROM episodes WHERE failure_signature IS NOT NULL
    """,
    """
    INSERT INTO episode_tags (tenant_id, tag, episode_id)
    SELECT tenant_id, 'rare', id FROM episodes WHERE task_type = 'type7'
    """,
)


async def fill(url: str, count: int) -> None:
    """Give the default tenant so many episodes."""
    await load(url, await made(read(None), count))


async def load(url: str, many: Many) -> None:
    """Store the episodes for the default tenant; print the seconds of each part."""
    connection = await asyncpg.connect(url, command_timeout=None)
    await register_vector(connection)
    query = "SELECT pg_get_indexdef($1::regclass)"
    indexes = [(await connection.fetchval(query, name), name) for name in _DROPPED]
    await connection.execute(
        "SET session_replication_role = replica; SET synchronous_commit = off;"
        "SET maintenance_work_mem = '3GB'; SET max_parallel_maintenance_workers = 2"
    )
    for name in _DROPPED:
        await connection.execute(f"DROP INDEX {name}")
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        print(f"  {name:48} {now - began:8.1f} s", flush=True)
        began = now

    for table, rows, columns in (
        ("episodes", _episodes(many), _EPISODE),
        ("episode_vectors", _vectors(many), _VECTOR),
    ):
        while records := list(islice(rows, _BATCH)):
            await connection.copy_records_to_table(table, records=records, columns=columns)
        lap(f"copy {table}")
    for statement in _DERIVED:
        await connection.execute(statement)
    lap("words, states, tags")
    for definition, name in indexes:
        await connection.execute(definition)
        lap(f"build {name}")
    await connection.execute("VACUUM ANALYZE")
    await search.refresh_common(connection, TENANT)
    await connection.close()
    lap("vacuum, analyse, sample words")


def _episodes(many: Many) -> Iterator[tuple[Any, ...]]:
    execution = json.dumps({"tool_calls": 2})
    for number in range(len(many.vectors)):
        row = many.fields(number)
        yield (
            TENANT, UUID(row["id"]), datetime.fromisoformat(row["at"]), row["session_id"],
            row["outcome"], row["domain"], row["task_type"], row["failure_signature"], 3,
            json.dumps(row["task"]), execution, json.dumps({"output": row["summary"]["result"]}),
            json.dumps(row["metadata"]), json.dumps(row["summary"]),
        )  # fmt: skip


def _vectors(many: Many) -> Iterator[tuple[Any, ...]]:
    for number, vector in enumerate(many.vectors):
        row = many.fields(number)
        (packed,) = packed_vectors(vector[None].astype(np.float32))
        yield (
            TENANT, UUID(row["id"]), many.embedder, datetime.fromisoformat(row["at"]),
            row["outcome"], row["domain"], row["task_type"], row["session_id"],
            vector, packed, packed,
        )  # fmt: skip


# --- Measuring ------------------------------------------------------------------------------------


async def timed(
    pool: asyncpg.Pool, name: str, operations: Sequence[Callable[[], Awaitable[Any]]]
) -> None:
    """Do operations one by one; print their times, and CPU of the database and of this process."""
    postmaster = psutil.Process(await pool.fetchval("SELECT pg_backend_pid()")).ppid()
    took = []
    database, client = cpu_s(postmaster), time.process_time()
    for operation in operations:
        began = time.perf_counter()
        await operation()
        took.append((time.perf_counter() - began) * 1e3)
    each = 1e3 / len(operations)
    cpu = (cpu_s(postmaster) - database) * each, (time.process_time() - client) * each
    p50, p95, p99 = (percentile(took, share) for share in (0.5, 0.95, 0.99))
    print(f"  {name:40} {p50:8.2f} {p95:8.2f} {p99:8.2f} ms   {cpu[0]:6.2f} {cpu[1]:6.2f} ms")


class Fixed:
    """An embedder that knows the vectors of the questions."""

    dimension = DIMENSION

    def __init__(self, name: str, vectors: dict[str, NDArray[np.float32]]) -> None:
        self.name = name
        self._vectors = vectors

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return np.array([self._vectors[text] for text in texts])


async def searches(
    database: Database, many: Many, questions: Sequence[str], rounds: int
) -> list[tuple[str, float]]:
    """Measure the modes of search; return the recall of those by meaning, by name."""
    pool = database.pool
    vectors = await BuiltinEmbedder().embed(questions)
    embedder = Fixed(many.embedder, dict(zip(questions, vectors, strict=True)))
    embedders = Embedders(pool, lambda: embedder, lambda _: None)
    memory = EpisodicMemory(pool, embedders=embedders, clock=lambda: NOW)
    all_of_them = np.ones(len(many.vectors), np.bool_)
    began = time.perf_counter()
    cosines = np.concatenate(
        [
            vectors @ many.vectors[start : start + _BATCH].astype(np.float32).T
            for start in range(0, len(many.vectors), _BATCH)
        ],
        axis=1,
    )
    exact_ms = (time.perf_counter() - began) / len(questions) * 1e3
    eligible = (many.age_days < AGED_DAYS) | (cosines >= AGED_COSINE)
    async with pool.acquire() as connection:
        await timed(pool, "floor: SELECT 1", [lambda: connection.fetchval("SELECT 1")] * rounds)
    print(f"  {'floor: exact, numpy':40} {exact_ms:8.2f} (mean)")
    good = EpisodeFilter(domain="finance", outcomes=(Outcome.SUCCESS,))
    month = EpisodeFilter(after=NOW - timedelta(days=30))
    found = []
    for name, where, matching in (
        ("semantic, first time (cold)", search.ANY, all_of_them),
        ("semantic", search.ANY, all_of_them),
        ("hybrid: domain, only successes", good, (many.domain == "finance") & ~many.failed),
        ("temporal: the last 30 days", month, many.age_days < 30),
    ):
        operations = [
            lambda text=text, where=where: memory.semantic_search(
                TENANT, EVERYTHING, text, k=10, where=where
            )
            for text in questions
        ]
        await timed(pool, name, operations)
        nearest = _nearest(cosines, eligible & matching, 10)
        recall = await _recall(pool, many.embedder, vectors, where, nearest)
        print(f"  {'':40} recall@10 {recall:.3f} by meaning alone")
        found.append((name, recall))
    await _by_attributes(memory, pool, len(many.vectors), good, rounds)
    gone = np.unique(_nearest(cosines, eligible, min(100, len(many.vectors) // 5)))
    await _erase(pool, gone.tolist())
    left = eligible.copy()
    left[:, gone] = False
    asked = [
        lambda text=text: memory.semantic_search(TENANT, EVERYTHING, text, k=10)
        for text in questions
    ]
    name = "semantic, after an erasure"
    await timed(pool, name, asked)
    recall = await _recall(
        pool, many.embedder, vectors, search.ANY, _nearest(cosines, left, 10), gone.tolist()
    )
    print(f"  {'':40} recall@10 {recall:.3f} by meaning alone")
    found.append((name, recall))
    return found


def _nearest(cosines: NDArray[np.float32], eligible: NDArray[np.bool_], k: int) -> NDArray[np.intp]:
    """Return the numbers of the k nearest eligible episodes of each question, in any order."""
    rows = (np.where(may, row, -np.inf) for row, may in zip(cosines, eligible, strict=True))
    return np.array([np.argpartition(row, -k)[-k:] for row in rows])


async def _erase(pool: asyncpg.Pool, numbers: Sequence[int]) -> None:
    """Erase episodes, 1,000 per transaction, as the deletion of a session or a user does."""
    ids = [UUID(int=number + 1) for number in numbers]

    async def one(start: int) -> None:
        async with acting_as(pool, TENANT) as connection:
            await connection.execute("SELECT erase_episodes($1)", ids[start : start + 1_000])

    starts = range(0, len(ids), 1_000)
    name = f"erase {len(ids):,}, a thousand at a time"
    await timed(pool, name, [lambda start=start: one(start) for start in starts])  # type: ignore[misc]


async def _recall(
    pool: asyncpg.Pool,
    embedder: str,
    vectors: NDArray[np.float32],
    where: EpisodeFilter,
    nearest: NDArray[np.intp],
    gone: Sequence[int] = (),
) -> float:
    """Return the share of the exact nearest among the candidates; an erased one is an error."""
    hits, erased = 0, set(gone)
    for vector, exact in zip(vectors, nearest, strict=True):
        async with acting_as(pool, TENANT) as connection:
            rows = await search.candidates(
                connection,
                EVERYTHING,
                content_words(""),
                vector,
                embedder=embedder,
                aged_before=NOW - timedelta(days=AGED_DAYS),
                where=where,
            )
        found = {row.episode_id.int - 1 for row in rows}
        if found & erased:
            raise SystemExit(f"erased episodes were found: {sorted(found & erased)}")
        hits += len(found & set(exact.tolist()))
    return hits / nearest.size


async def _by_attributes(
    memory: EpisodicMemory, pool: asyncpg.Pool, count: int, good: EpisodeFilter, rounds: int
) -> None:
    random = Random(1)
    numbers = [random.randrange(count) for _ in range(rounds)]
    for name, where in (
        ("domain and outcome", good),
        ("similar failures", EpisodeFilter(failure_signature="failure7")),
        ("recent", search.ANY),
        ("tag", EpisodeFilter(tags=("rare",))),
    ):
        listed = [lambda where=where: memory.recent(TENANT, EVERYTHING, 20, where)] * rounds
        await timed(pool, f"structured: {name}", listed)
    of_session = [
        lambda n=n: memory.recent(
            TENANT, EVERYTHING, 20, EpisodeFilter(session_id=f"s{n // SESSIONS}")
        )
        for n in numbers
    ]
    await timed(pool, "structured: session", of_session)
    by_id = [lambda n=n: memory.get(TENANT, EVERYTHING, UUID(int=n + 1)) for n in numbers]
    await timed(pool, "by id", by_id)


async def store(pool: asyncpg.Pool, many: Many, rounds: int) -> None:
    """Store episodes, one per transaction."""

    async def one(number: int) -> None:
        fields = many.fields(number) | {"id": str(UUID(int=10**9 + number))}
        async with acting_as(pool, TENANT) as connection:
            await connection.execute(
                "SELECT store_episode($1, $2::jsonb)", TENANT, json.dumps(fields)
            )

    numbers = range(min(rounds, len(many.vectors)))
    await timed(pool, "store", [lambda number=number: one(number) for number in numbers])  # type: ignore[misc]


async def print_size(pool: asyncpg.Pool, count: int) -> None:
    query = (
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
        "WHERE relkind = 'r' AND relname LIKE 'episode%'"
    )
    print(f"  {'bytes per episode':40} {await pool.fetchval(query) / count:8.0f} (at most 10,240)")


async def measure(
    database: Database, texts: Sequence[str], count: int, questions: int = 200, rounds: int = 500
) -> list[tuple[str, float]]:
    """Load so many episodes, and measure; return the recall of each mode by meaning."""
    if len(texts) < 2 * questions:
        raise SystemExit(f"only {len(texts)} different texts")
    many = await made(texts[questions:], count)
    print(f"{f'{count:,} episodes':42} {'p50':>8} {'p95':>8} {'p99':>8}      CPU: database, here")
    await load(database.url, many)
    await print_size(database.pool, count)
    found = await searches(database, many, texts[:questions], rounds)
    await store(database.pool, many, rounds)
    return found


def working_memory(rounds: int = 2_000) -> None:
    """Print microseconds of operations on a full working memory."""
    memory = WorkingMemory()
    memory.initialize("You plan and delegate. " * 340)
    memory.load_task_context("Compare the offers. " * 300, goals=[f"goal {n}" for n in range(40)])
    for number in range(150):
        memory.set(f"fact {number}", "what is known of it, as a sentence " * 3)
        memory.add_intermediate(f"lookup {number}", "value 12.5, state ok, owner team-b; " * 56)
    print(f"a working memory of {memory.tokens:,} tokens{'':12} median      p99   target")
    operations: tuple[tuple[str, Callable[[int], Any], str], ...] = (
        ("set", lambda n: memory.set(f"fact {n % 150}", f"something new, {n}"), "20 us"),
        ("get", lambda n: memory.get(f"fact {n % 150}"), "20 us"),
        ("add", lambda n: memory.add_intermediate("lookup", f"value {n}"), "20 us"),
        ("compose", lambda _: memory.compose(), "1 ms"),
        ("snapshot", lambda _: memory.snapshot(), "1 ms"),
    )
    for name, operation, target in operations:
        took = []
        for number in range(rounds):
            began = time.perf_counter()
            operation(number)
            took.append((time.perf_counter() - began) * 1e6)
        median, late = percentile(took, 0.5), percentile(took, 0.99)
        print(f"  {name:40} {median:8.1f} {late:8.1f} us   {target}")


async def _measure_fresh(texts: Sequence[str], count: int, shared_buffers: str | None) -> None:
    async with opened_database(shared_buffers) as database:
        await measure(database, texts, count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--episodes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--texts", type=Path, help="a file with a text per line")
    parser.add_argument("--shared-buffers", help="PostgreSQL's setting, such as 6GB")
    options = parser.parse_args()
    for count in options.episodes:
        asyncio.run(_measure_fresh(read(options.texts), count, options.shared_buffers))
    working_memory()


if __name__ == "__main__":
    main()
