"""Claims of runs: their cost with many tenants and long queues, and many workers at once.

python -m benchmarks.queue [--quick]

The embedded database and the service's own statements, without models: a claim of 20 runs with what
a worker reads of them; with 1 to 1,000 tenants that have due runs, with few among 100,000, and far
from and at the limit of concurrent runs; runs of few tenants beside 10,000 of one; accepting and
ending a run beside a long queue; a cancellation of one of 1,000 runs that each of 100 workers
executes, and the worker's reading of it; and eight workers that claim and end runs of one tenant
while each commit takes 10 ms.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from uuid import UUID, uuid4

import asyncpg

from benchmarks.harness import temporary_database
from bottega.db.pool import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT

LIMITS = {"concurrent_runs": 1_000_000, "queued_runs": 1_000_000}
_NEW = (
    '{"mode": "dag", "input": "x", "pinned": {}, "timeout_s": 60, "queue_timeout_s": 86400,'
    ' "metadata": {}, "memory": "off", "priority": 5}'
)
_ACCEPT = "SELECT accept_run($1, $2, '{}', '[]')::text"
REPORT = """
SELECT * FROM report($1, 3600, 1000000, '{}', '{}', '{}',
    '{"version": "1", "age_s": 0, "pool": {}, "tenants": {}}')
"""
_CLAIM = (
    "SELECT c.*, claimed_run(c.tenant, c.run) AS claim FROM claim($1, $2, 1000000, '{}', $3) AS c"
)
_END = """
SELECT append_steps(ARRAY[$1::uuid], ARRAY[$2::uuid], '{1}', '{2}', '{1}',
    ARRAY['{"type":"run.completed","data":{}}'], '{NULL}', '{NULL}', '{NULL}', '{NULL}',
    ARRAY[jsonb '{"status": "completed", "tokens": 0}'])
"""
_FILL = """
WITH stored AS (
    INSERT INTO runs (tenant_id, mode, input, pinned, timeout_s, created_at, last_seq)
    SELECT t, 'dag', '"x"', '{}', 60, now() - interval '1 h', 1
    FROM unnest($1::uuid[]) AS t, generate_series(1, $2::integer)
    RETURNING tenant_id, id, created_at)
INSERT INTO run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)
SELECT tenant_id, id, created_at, false, true, created_at, 'infinity' FROM stored
"""
_HOLD = """
INSERT INTO run_heads
    (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline, is_child)
SELECT $1, uuidv7(), 1, 2, $1, now(), 'infinity', false FROM generate_series(1, $2::integer)
"""
_EXECUTED = """
WITH stored AS (
    INSERT INTO runs (tenant_id, mode, input, pinned, timeout_s, last_seq, status, attempt)
    SELECT $1, 'dag', '"x"', '{}', 60, 2, 'running', 1 FROM generate_series(1, $3::integer)
    RETURNING tenant_id, id)
INSERT INTO run_heads
    (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline, is_child)
SELECT tenant_id, id, 1, 2, $2, now(), 'infinity', false FROM stored RETURNING run_id
"""
_CANCEL = "SELECT cancel_run($1, $2)"
_READ_INBOX = "SELECT count(*) FROM read_inbox($1, '{}')"
_TENANTS = "INSERT INTO tenants (name) SELECT uuidv7() FROM generate_series(1, $1) RETURNING id"
_SLOW_COMMITS = "ALTER SYSTEM SET commit_delay = 10000; ALTER SYSTEM SET commit_siblings = 0"


async def make_tenants(owner: asyncpg.Connection, count: int) -> list[UUID]:
    """Make so many tenants; return their ids."""
    return [row["id"] for row in await owner.fetch(_TENANTS, count)]


async def claim(database: Database, worker: UUID, most: int = 20) -> Sequence[asyncpg.Record]:
    """Claim the next runs of the queue."""
    return [row for row in await database.pool.fetch(_CLAIM, worker, most, []) if row["run"]]


async def median_ms(database: Database, rounds: int, expected: int = 20) -> float:
    """Return the median milliseconds of a claim, each of so many runs."""
    await database.pool.execute(REPORT, worker := uuid4())
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        rows = await claim(database, worker)
        took.append((time.perf_counter() - began) * 1000)
        assert len(rows) == expected, len(rows)
    return statistics.median(took)


async def with_tenants(url: str, owner: asyncpg.Connection, rounds: int) -> None:
    """Print the cost of a claim by the number of tenants with due runs."""
    async with open_database(url, pool_size=1, limits=LIMITS) as database:
        ids = await make_tenants(owner, 1000)
        for count in (1, 10, 100, 1000):
            await owner.execute("DELETE FROM run_queue")
            await owner.execute(_FILL, ids[:count], 50_000 // count, timeout=300)
            took = await median_ms(database, rounds)
            print(f"  {count:6} tenants, 50,000 queued: {took:6.2f} ms")
        await owner.execute("DELETE FROM run_queue")
        await make_tenants(owner, 99_000)
        await owner.execute(_FILL, ids[::200], 1000)
        print(f"  100,000 tenants, 5 with runs: {await median_ms(database, rounds):6.2f} ms")


async def at_limits(url: str, owner: asyncpg.Connection, rounds: int) -> None:
    """Print the cost of a claim far from its tenant's limit and at it."""
    (tenant,) = await make_tenants(owner, 1)
    await owner.execute("DELETE FROM run_queue")
    held = 0
    for wanted in (10, 10_000, 100_000):
        await owner.execute(_HOLD, tenant, wanted - held, timeout=300)
        await owner.execute("UPDATE tenant_queues SET claimed = 10 ^ 9, served_at = '-infinity'")
        await owner.execute(_FILL, [tenant], 20 * rounds + 1)
        async with open_database(url, pool_size=1, limits=LIMITS) as database:
            far = await median_ms(database, rounds)
        held = wanted + 20 * rounds
        limits = {**LIMITS, "concurrent_runs": held}
        async with open_database(url, pool_size=1, limits=limits) as database:
            near = await median_ms(database, rounds, 0)
        print(f"  {wanted:7} runs held: {far:6.2f} ms, at the limit {near:6.2f} ms")
        await owner.execute("DELETE FROM run_queue")


async def beside_a_flood(url: str, owner: asyncpg.Connection) -> None:
    """Print how many claims serve 15 and 5 runs beside 10,000 older ones."""
    flooding, some, few = await make_tenants(owner, 3)
    await owner.execute(_FILL, [flooding], 10_000)
    for tenant, count in ((some, 15), (few, 5)):
        await owner.execute(_FILL, [tenant], count)
    async with open_database(url, pool_size=1, limits=LIMITS) as database:
        await database.pool.execute(REPORT, worker := uuid4())
        claims, left = 0, 20
        while left:
            rows = await claim(database, worker)
            left -= sum(row["tenant"] != flooding for row in rows)
            claims += 1
    print(f"  15 and 5 runs beside 10,000: all claimed by claim {claims}")
    await owner.execute("DELETE FROM run_queue")


async def beside_a_queue(url: str, owner: asyncpg.Connection, rounds: int) -> None:
    """Print the cost to accept and to end a run, without others and beside many."""
    print("  median ms to accept a run, to end one:")
    for waiting in (0, 1000, 10_000):
        await owner.execute("DELETE FROM run_queue")
        await owner.execute(_FILL, [DEFAULT_TENANT], waiting)
        posts, ends = [], []
        async with open_database(url, pool_size=1, limits=LIMITS) as database:
            await database.pool.execute(REPORT, worker := uuid4())
            for _ in range(rounds):
                began = time.perf_counter()
                async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                    await connection.fetchval(_ACCEPT, DEFAULT_TENANT, _NEW)
                posts.append((time.perf_counter() - began) * 1000)
                (row,) = await claim(database, worker, 1)
                began = time.perf_counter()
                await database.pool.fetchval(_END, row["tenant"], row["run"])
                ends.append((time.perf_counter() - began) * 1000)
        post, end = statistics.median(posts), statistics.median(ends)
        print(f"    {waiting:6} queued: {post:6.2f} {end:6.2f}")


async def cancellations(url: str, owner: asyncpg.Connection, rounds: int) -> None:
    """Print the cost of a cancellation beside 100 workers that execute 1,000 runs each."""
    (tenant,) = await make_tenants(owner, 1)
    cancels, reads = [], []
    async with open_database(url, pool_size=1, limits=LIMITS) as database:
        runs: list[tuple[UUID, UUID]] = []
        for _ in range(100):
            await database.pool.execute(REPORT, worker := uuid4())
            rows = await owner.fetch(_EXECUTED, tenant, worker, 1000, timeout=300)
            runs.append((worker, rows[0]["run_id"]))
        for worker, run in runs[:rounds]:
            began = time.perf_counter()
            assert await database.pool.fetchval(_CANCEL, tenant, run) == "requested"
            cancels.append((time.perf_counter() - began) * 1000)
            began = time.perf_counter()
            assert await database.pool.fetchval(_READ_INBOX, worker) == 1
            reads.append((time.perf_counter() - began) * 1000)
    cancel, read = statistics.median(cancels), statistics.median(reads)
    print(
        f"  a cancellation, 100 workers of 1,000 runs: {cancel:.2f} ms, its reading {read:.2f} ms"
    )


async def many_workers(url: str, owner: asyncpg.Connection, runs: int) -> None:
    """Print how many runs a second eight workers claim and end when commits are slow."""
    await owner.execute("DELETE FROM run_queue")
    (tenant,) = await make_tenants(owner, 1)
    await owner.execute(_FILL, [tenant], runs, timeout=300)
    for statement in _SLOW_COMMITS.split("; "):
        await owner.execute(statement)
    await owner.execute("SELECT pg_reload_conf()")
    shares: list[int] = []

    async def work(database: Database) -> None:
        await database.pool.execute(REPORT, worker := uuid4())
        share = 0
        while await owner_free.fetchval("SELECT count(*) FROM run_queue LIMIT 1"):
            rows = await claim(database, worker)
            share += len(rows)
            if not rows:
                await asyncio.sleep(0.01)  # as a worker does while another one claims
            await asyncio.gather(
                *(database.pool.fetchval(_END, row["tenant"], row["run"]) for row in rows)
            )
        shares.append(share)

    async with (
        open_database(url, pool_size=64, limits=LIMITS) as database,
        asyncpg.create_pool(url, min_size=1, max_size=8) as owner_free,
    ):
        began = time.perf_counter()
        await asyncio.gather(*(work(database) for _ in range(8)))
        took_s = time.perf_counter() - began
    speed = f"{runs / took_s:.0f} runs/s, {sorted(shares)} by worker"
    print(f"  8 workers, one tenant, commits of 10 ms: {speed}")


async def measure(url: str, rounds: int) -> None:
    owner = await asyncpg.connect(url)
    print("a claim of 20 runs:")
    await with_tenants(url, owner, rounds)
    await at_limits(url, owner, rounds)
    await beside_a_flood(url, owner)
    await beside_a_queue(url, owner, rounds)
    await cancellations(url, owner, rounds)
    await many_workers(url, owner, 100 * rounds)
    await owner.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: only to see it work")
    options = parser.parse_args()
    with temporary_database() as (url, _):
        asyncio.run(measure(url, 5 if options.quick else 40))


if __name__ == "__main__":
    main()
