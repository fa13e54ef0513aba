"""Cost of a backlog of waiting runs for the runs that start and end.

python -m benchmarks.backlog [--waiting 10000] [--rounds 200]

The embedded database and the service's own statements, one transaction each: accept a run (as
POST /v1/runs stores it), and end one, which gives its slot to the next. First without waiting runs,
then with many of the same tenant, each time in one database session. Compare only figures of the
same invocation.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import asyncpg

from benchmarks.harness import temporary_database
from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import acting_as, open_database

_NEW = (
    '{"mode": "dag", "input": "x", "pinned": {}, "timeout_s": 60, "queue_timeout_s": 86400,'
    ' "metadata": {}, "memory": "off", "priority": 5}'
)
_ACCEPT = "SELECT accept_run($1, $2, '[]', '[]')::text"
_TAKE = "SELECT run FROM take_runs($1, $2, 1, 60, false)"
_END = """
SELECT append_steps(ARRAY[$1::uuid], ARRAY[$2::uuid], '{1}', '{2}', '{1}',
    ARRAY['{"type":"run.completed","data":{}}'], '{NULL}', '{NULL}', '{NULL}', '{NULL}',
    ARRAY[jsonb '{"status": "completed", "tokens": 0}'])
"""


@asynccontextmanager
async def timed(pool: asyncpg.Pool, took: list[float]) -> AsyncIterator[asyncpg.Connection]:
    """Open a tenant's transaction; append its milliseconds to ``took``."""
    began = time.perf_counter()
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        yield connection
    took.append((time.perf_counter() - began) * 1000)


async def measure(url: str, rounds: int, waiting: int) -> tuple[list[float], list[float]]:
    """Return milliseconds to accept and to end a run, with ``waiting`` more runs waiting."""
    posts: list[float] = []
    ends: list[float] = []
    limits = {"concurrent_runs": 100, "queued_runs": 10**9}
    worker = uuid4()
    async with open_database(url, pool_size=1, limits=limits) as database:
        for _ in range(waiting):
            async with timed(database.pool, []) as connection:
                await connection.fetchval(_ACCEPT, DEFAULT_TENANT, _NEW)
        for _ in range(rounds):
            async with timed(database.pool, posts) as connection:
                await connection.fetchval(_ACCEPT, DEFAULT_TENANT, _NEW)
            async with timed(database.pool, []) as connection:
                run_id = await connection.fetchval(_TAKE, worker, uuid4())
            async with timed(database.pool, ends) as connection:
                await connection.fetchval(_END, DEFAULT_TENANT, run_id)
    return posts, ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    with temporary_database() as (url, _):
        none = asyncio.run(measure(url, options.rounds, 0))
        many = asyncio.run(measure(url, options.rounds, options.waiting))
    print(f"median ms with no run waiting, with {options.waiting} of the tenant, and the ratio")
    for name, before, after in zip(("accept a run", "end a run"), none, many, strict=True):
        a, b = statistics.median(before), statistics.median(after)
        print(f"  {name:14} {a:8.2f} {b:8.2f} {b / a:8.2f}")


if __name__ == "__main__":
    main()
