"""Cost of a durable run on this machine.

    python -m benchmarks [--runs 400] [--memory off full] [--latency-ms 0 400] [--workers 1 8]
    python -m benchmarks --table

All parts are real processes: embedded PostgreSQL, API, workers, and a model and a client that cost
little. Each run has seven model calls. It is posted over HTTP and watched over a WebSocket until
its final event. Absolute figures depend on the machine. The ratio to the floor of the same line is
comparable: the floor makes the same seven calls by ``chat.completions.create`` and nothing else, as
many at a time, just before. README.md in this folder explains the columns.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
import httpx2

from benchmarks.client import Client, Watched, body_of
from benchmarks.harness import (
    cpu_s,
    define,
    embedded_all,
    floor,
    log_changes_only,
    percentile,
    process,
    temporary_database,
    written,
)
from benchmarks.model import FastModel, fast_model
from bottega.cli.scenarios import SOFTWARE

_TABLE_LATENCY_MS = 400.0
_TOKEN_DELAY_MS = 5.0
_MOST_RUNS = "1000000"
_COLUMNS = {
    "memory": 7, "latency": 8, "tokens": 7, "workers": 8, "APIs": 5, "waiting": 8,
    "runs/s": 8, "worker": 8, "API": 7, "database": 9, "rest": 6, "floor": 7, "sum/floor": 10,
    "writes": 7, "trans.": 7, "KB log": 7, "KB kept": 8, "conn.": 6, "p50 ms": 8, "p99 ms": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table.

    Attributes:
        latency_ms: of the model's answers.
        token_delay_ms: between the parts of an answer; 0: it comes in one piece.
        waiting: runs in the queue before a worker starts; 0: as many as are watched.
    """

    memory: str = "off"
    latency_ms: float = 0.0
    token_delay_ms: float = 0.0
    workers: int = 1
    waiting: int = 0
    apis: int = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """The database and the amount of work, the same for all lines.

    Attributes:
        postmaster: pid of the database server.
    """

    url: str
    postmaster: int
    runs: int
    concurrency: int

    def at_once(self, setting: Setting) -> int:
        """Return the number of runs under way, or of the floor's rounds of calls."""
        return self.concurrency if setting.latency_ms == 0 else 5 * self.concurrency


def table() -> list[Setting]:
    """Return the settings of ``--table``."""
    slow = _TABLE_LATENCY_MS
    return [
        Setting(),
        Setting(latency_ms=slow),
        Setting(latency_ms=slow, token_delay_ms=_TOKEN_DELAY_MS),
        *(Setting(workers=count) for count in (2, 4, 8)),
        Setting(latency_ms=slow, workers=8),
        Setting(waiting=10_000),
        Setting(memory="full"),
        Setting(memory="full", latency_ms=slow),
    ]


async def measure(stage: Stage, setting: Setting) -> None:
    """Measure the floor and one setting beside the same model, and print its line."""
    async with fast_model(
        latency_ms=setting.latency_ms, token_delay_ms=setting.token_delay_ms
    ) as model:
        at_once = stage.at_once(setting)
        rounds = max(2 * at_once, stage.runs // 10)
        floor_ms = await floor(model.base_url, rounds, at_once)
        environment = {
            "DATABASE_URL": stage.url,
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": "none",
            "BOTTEGA_MEMORY": setting.memory,
            "BOTTEGA_CONCURRENT_RUNS": "1000",
            "BOTTEGA_QUEUED_RUNS": _MOST_RUNS,
            "BOTTEGA_WORKER_CONCURRENCY": "100",
        }
        several = () if setting.apis == 1 else ("--api", str(setting.apis))
        command = ("serve", "--no-worker", *several, "--port", "0")
        api = process(*command, ready="listens", **environment)
        async with api as (api_process, line):
            port = int(line.split("http://127.0.0.1:")[1].split()[0])
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as full_client:
                await define(full_client)
            run = {"agent": SOFTWARE.coordinator, "graph": SOFTWARE.graph_name}
            client = Client(port, body_of({**run, "input": "Build a todo app."}))
            measured = _drain if setting.waiting else _watch
            costs = _Costs(stage, setting, floor_ms, api_process.pid, model)
            await measured(stage, setting, client, costs, environment)
            client.close()


async def _watch(
    stage: Stage,
    setting: Setting,
    client: Client,
    costs: "_Costs",
    environment: dict[str, str],
) -> None:
    """Measure runs that a client starts and watches."""
    at_once = stage.at_once(setting)
    async with _workers(setting.workers, environment) as workers:
        await client.many(2 * at_once, at_once)  # fills caches and statistics
        await costs.begin(workers)
        seen = await client.many(stage.runs, at_once)
        await costs.end(stage.runs, seen)
        if setting == Setting():
            await _print_idle(client)


async def _drain(
    stage: Stage,
    setting: Setting,
    client: Client,
    costs: "_Costs",
    environment: dict[str, str],
) -> None:
    """Measure the first runs of a backlog, which nobody watches."""
    for _ in range(setting.waiting // 100):
        await asyncio.gather(*(client.post() for _ in range(100)))
    connection = await asyncpg.connect(stage.url)
    before = await _ended(connection)
    async with _workers(setting.workers, environment) as workers:
        await _ended(connection, before + 100)  # fills caches and statistics
        await costs.begin(workers)
        first = await _ended(connection)
        last = await _ended(connection, first + stage.runs)
        await costs.end(last - first, [])
    await connection.execute("TRUNCATE runs CASCADE")
    await connection.close()


async def _ended(connection: asyncpg.Connection, least: int = 0) -> int:
    """Wait until so many runs have ended; return their number."""
    while True:
        query = "SELECT count(*) FROM runs WHERE ended_at IS NOT NULL"
        count: int = await connection.fetchval(query)
        if count >= least:
            return count
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _workers(count: int, environment: dict[str, str]) -> AsyncIterator[list[int]]:
    async with contextlib.AsyncExitStack() as stack:
        starting = (process("worker", ready="ready", **environment) for _ in range(count))
        yield [(await stack.enter_async_context(one))[0].pid for one in starting]


class _Costs:
    """CPU time and writes between two moments."""

    def __init__(
        self, stage: Stage, setting: Setting, floor_ms: float, api: int, model: FastModel
    ) -> None:
        self._stage, self._setting, self._floor_ms = stage, setting, floor_ms
        self._api, self._model = api, model
        self._workers: list[int] = []

    def _cpu_s(self) -> list[float]:
        rest = self._model.cpu_s() + cpu_s(os.getpid())
        of_workers = sum(map(cpu_s, self._workers))
        return [of_workers, cpu_s(self._api), cpu_s(self._stage.postmaster), rest]

    async def begin(self, workers: list[int]) -> None:
        self._workers = workers
        await embedded_all(self._stage.url)
        self._written = await written(self._stage.url)
        self._before = self._cpu_s()
        self._began = time.perf_counter()

    async def end(self, runs: int, seen: Sequence[Watched]) -> None:
        """Print the line of the table for so many runs."""
        wall = time.perf_counter() - self._began
        await embedded_all(self._stage.url)
        pairs = zip(self._cpu_s(), self._before, strict=True)
        worker, api, database, rest = ((now - then) * 1000 / runs for now, then in pairs)
        now, then = await written(self._stage.url), self._written
        took = [run.took_s * 1000 for run in seen]
        setting = self._setting
        _print_row(
            setting.memory,
            f"{setting.latency_ms:g}",
            f"{setting.token_delay_ms:g}",
            *(f"{each}" for each in (setting.workers, setting.apis, setting.waiting)),
            f"{runs / wall:.1f}",
            *(f"{each:.2f}" for each in (worker, api, database, rest)),
            f"{self._floor_ms:.2f}",
            f"{(worker + api + database) / self._floor_ms:.2f}",
            f"{(now.writing - then.writing) / runs:.1f}",
            f"{(now.transactions - then.transactions) / runs:.1f}",
            f"{(now.log_bytes - then.log_bytes) / runs / 1024:.1f}",
            f"{(now.stored_bytes - then.stored_bytes) / runs / 1024:.1f}",
            f"{await _connections(self._stage.url)}",
            *(f"{percentile(took, share):.1f}" if took else "-" for share in (0.5, 0.99)),
        )


async def _connections(url: str) -> int:
    connection = await asyncpg.connect(url)
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bottega'"
    count: int = await connection.fetchval(query)
    await connection.close()
    return count


async def _print_idle(client: Client) -> None:
    """Print the times of runs that are alone."""
    alone = [await client.one_run() for _ in range(50)]
    for name, values in (
        ("POST to final event", [run.took_s for run in alone]),
        ("POST to run.started", [run.started_s for run in alone]),
        ("queued to started", [run.queued_s for run in alone]),
    ):
        middle, late = statistics.median(values) * 1000, percentile(values, 0.99) * 1000
        print(f"  one run at a time, {name}: p50 {middle:.1f} ms, p99 {late:.1f} ms")


def _print_row(*cells: str) -> None:
    print(
        "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True)),
        flush=True,
    )


async def measure_all(
    url: str, postmaster: int, runs: int, concurrency: int, settings: Sequence[Setting]
) -> None:
    await log_changes_only(url)
    print(f"{runs} runs, {concurrency} at a time (with latency {5 * concurrency}); CPU ms per run:")
    _print_row(*_COLUMNS)
    stage = Stage(url, postmaster, runs, concurrency)
    for setting in settings:
        await measure(stage, setting)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="all lines of benchmarks/README.md")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--memory", nargs="+", choices=("off", "read", "full"), default=["off"])
    parser.add_argument("--latency-ms", nargs="+", type=float, default=[0.0])
    parser.add_argument("--token-delay-ms", nargs="+", type=float, default=[0.0])
    parser.add_argument("--workers", nargs="+", type=int, default=[1])
    parser.add_argument("--api", nargs="+", type=int, default=[1], help="API processes")
    parser.add_argument("--waiting", nargs="+", type=int, default=[0], help="runs in the queue")
    parser.add_argument("--stored", type=int, default=0, help="episodes at the start")
    options = parser.parse_args()
    settings = (
        table()
        if options.table
        else [
            Setting(*each)
            for each in itertools.product(
                *(options.memory, options.latency_ms, options.token_delay_ms),
                *(options.workers, options.waiting, options.api),
            )
        ]
    )
    with temporary_database() as (url, postmaster):
        if options.stored:
            from benchmarks.memory.loading import fill

            asyncio.run(fill(url, options.stored))
        asyncio.run(measure_all(url, postmaster, options.runs, options.concurrency, settings))


if __name__ == "__main__":
    main()
