"""Cost of a log of many events, as one table and with a partition for each day.

    python -m benchmarks.retention [--events 1000000] [--days 30] [--layouts plain days]

Copies finished runs of ten tenants, 60 events in 8 rows each, into a database of its own. Then it
measures, for the layouts in turns: an insert of ten steps as workers store them, the read of a
run's log, a stream's look at 50 runs (also with the least and the greatest of their ids named);
the list of a tenant's runs; at last the removal of the oldest day: rows in pages of 100 runs, or
the partition. 100,000,000 events need 11 GB for each layout. Times are milliseconds of one
statement.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import asyncpg

from benchmarks.harness import percentile
from benchmarks.retention.loading import (
    EVENTS,
    ROWS,
    TENANTS,
    Load,
    fill_logs,
    fill_runs,
    move_logs,
    partition,
)
from bottega.db import embedded, migrate

LAYOUTS = {
    "plain": "run_steps",
    "days": "steps_of_days",
    "months": "steps_of_months",
    "many": "steps_of_many",
}
_PARTITIONS = {"days": {}, "months": {"days": 30}, "many": {"before": 370}}
"""Of a day each, of 30 days each; of a day each with 370 more, which are empty."""
_ROUNDS = 400
_PAGE = 100
_APPEND = """
INSERT INTO {} (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
SELECT $1, r, 1000000 + $3, 1000000 + $3, 1, now(), $4 FROM unnest($2::uuid[]) AS r
"""
_READ = """
SELECT first_seq, last_seq, at, events FROM {} WHERE tenant_id = $1 AND run_id = $2
AND last_seq > 0 ORDER BY last_seq LIMIT 101
"""
_LOOK = """
SELECT w.n, l.events FROM unnest($2::uuid[]) WITH ORDINALITY AS w(run_id, n)
LEFT JOIN LATERAL (SELECT o.events FROM {} o WHERE o.tenant_id = $1 AND o.run_id = w.run_id
    AND o.last_seq > 53 ORDER BY o.last_seq LIMIT 2) AS l ON true
"""
_BOUNDED = _LOOK.replace(
    "AND o.run_id = w.run_id", "AND o.run_id = w.run_id AND o.run_id BETWEEN $3 AND $4"
)
_SIZE = """
SELECT coalesce(
    sum(pg_total_relation_size(relid))::bigint, pg_total_relation_size($1::regclass))
FROM pg_partition_tree($1::regclass)
"""
_LIST = "SELECT id, status, created_at FROM runs WHERE tenant_id = $1 ORDER BY id DESC LIMIT 50"


async def main(events: int, days: int, layouts: Sequence[str]) -> None:
    load = Load(days, max(len(TENANTS), events // EVENTS // days))
    count = load.runs * days
    print(f"{count * EVENTS:,} events of {count:,} runs in {count * ROWS:,} rows, {days} days")
    with tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True) as name:
        await _configure(Path(name))
        with embedded.running(Path(name)) as url:
            await asyncio.to_thread(migrate.upgrade, url)
            connection = await asyncpg.connect(url, command_timeout=None)
            await connection.execute("SET session_replication_role = replica")
            for each in layouts[1:]:
                await partition(connection, LAYOUTS[each], load, **_PARTITIONS[each])
            checkpoints = {days // 10, days // 3, days}
            for day in range(days):
                await fill_runs(connection, load, day)
                took = {"plain": await fill_logs(connection, load, day)}
                for each in layouts[1:]:
                    took[each] = await move_logs(connection, LAYOUTS[each], load, day)
                if day + 1 in checkpoints:
                    await _tell(connection, load, day, took)
                    await _measure(connection, load, day, layouts)
            await _remove(connection, load, layouts)
            await connection.close()


async def _configure(folder: Path) -> None:
    """Leave the copied rows out of the write-ahead log; the server must be started for that."""
    with embedded.running(folder) as url:
        connection = await asyncpg.connect(url)
        for name, value in (
            ("wal_level", "minimal"),
            ("max_wal_senders", "0"),
            ("max_wal_size", "4GB"),
            ("full_page_writes", "off"),
        ):
            await connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        await connection.close()


async def _tell(
    connection: asyncpg.Connection, load: Load, day: int, took: dict[str, float]
) -> None:
    print(f"\n{(day + 1) * load.runs * EVENTS:,} events")
    await connection.execute("ANALYZE runs")
    for layout, seconds in took.items():
        table = LAYOUTS[layout]
        await connection.execute(f"ANALYZE {table}")
        size = await connection.fetchval(_SIZE, table)
        rate = load.runs * EVENTS / seconds
        print(f"{layout}: {size / 1e9:.2f} GB; the last day came at {rate:,.0f} events/s")


async def _measure(
    connection: asyncpg.Connection, load: Load, day: int, layouts: Sequence[str]
) -> None:
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    random = Random(1)
    times: dict[tuple[str, str], list[float]] = {}
    old = [each for each in load.ids(day // 2) if each[0] == TENANTS[0]]
    new = [each for each in load.ids(day) if each[0] == TENANTS[0]]
    step = '{"type":"llm.completed","data":{"content":"' + "some text " * 60 + '"}}'
    for number in range(_ROUNDS):
        runs = [each[1] for each in random.sample(new, min(50, len(new)))]
        acts: dict[str, tuple[str, tuple[Any, ...]]] = {
            "ten steps": (_APPEND, (TENANTS[0], runs[:10], number, step)),
            "read, new run": (_READ, (TENANTS[0], runs[-1])),
            "read, old run": (_READ, (TENANTS[0], random.choice(old)[1])),
            "look at 50": (_LOOK, (TENANTS[0], runs)),
            "look, bounded": (_BOUNDED, (TENANTS[0], runs, min(runs), max(runs))),
        }
        for what, (query, arguments) in acts.items():
            for each in random.sample(layouts, len(layouts)):
                began = time.perf_counter()
                await connection.fetch(query.format(LAYOUTS[each]), *arguments)
                took = (time.perf_counter() - began) * 1000
                times.setdefault((what, each), []).append(took)
        began = time.perf_counter()
        await connection.fetch(_LIST, random.choice(TENANTS))
        times.setdefault(("list of runs", "all"), []).append((time.perf_counter() - began) * 1000)
    print(f"{'':16}{'layout':8}{'median':>8}{'p99':>8}")
    for (what, each), values in sorted(times.items()):
        print(
            f"{what:16}{each:8}{statistics.median(values):8.3f}{percentile(values, 0.99):8.3f}",
            flush=True,
        )


async def _remove(connection: asyncpg.Connection, load: Load, layouts: Sequence[str]) -> None:
    """Remove the oldest day."""
    ids: dict[UUID, list[UUID]] = {each: [] for each in TENANTS}
    for tenant, run, _ in load.ids(0):
        ids[tenant].append(run)
    for layout in layouts:
        table = LAYOUTS[layout]
        await connection.execute("CHECKPOINT")
        before = await connection.fetchval("SELECT pg_current_wal_lsn()")
        began, longest = time.perf_counter(), 0.0
        if layout == "months":
            continue
        if layout == "plain":
            delete = f"DELETE FROM {table} WHERE tenant_id = $1 AND run_id = ANY($2)"
            for tenant, runs in ids.items():
                for start in range(0, len(runs), _PAGE):
                    page = time.perf_counter()
                    await connection.execute(delete, tenant, runs[start : start + _PAGE])
                    longest = max(longest, time.perf_counter() - page)
        else:
            await connection.execute(f"DROP TABLE {table}_{load.day(0):%Y%m%d}")
            longest = time.perf_counter() - began
        took = time.perf_counter() - began
        log = "SELECT (pg_current_wal_lsn() - $1::pg_lsn)::bigint"
        log_bytes = await connection.fetchval(log, before)
        print(
            f"{layout}: oldest day removed in {took:.2f} s, longest statement {longest:.3f} s, "
            f"{log_bytes / 1e6:.1f} MB of write-ahead log",
            flush=True,
        )
        if layout == "plain":
            began = time.perf_counter()
            await connection.execute(f"VACUUM {table}")
            print(f"{layout}: vacuumed in {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retention",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["plain", "days"])
    arguments = parser.parse_args()
    load_before = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores, load before {load_before}: others at work make times noisy")
    asyncio.run(main(arguments.events, arguments.days, arguments.layouts))
