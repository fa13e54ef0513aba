"""Cost of a durable run on this machine.

    python -m benchmarks [--runs 400] [--turns 5] [--memory full] [--stored 200000]
    python -m benchmarks --table

A run has seven model calls: a coordinator, three sub-agents, a graph. The database, the service,
and a model that costs little are processes of their own. Absolute figures depend on the machine;
the ratio to the floor of the same turn is comparable. The floor makes seven calls of the same model
by ``chat.completions.create``, which do not stream, and nothing else, as many at a time.

Without ``--table`` API and worker are one process, runs come by ``POST /v1/runs?wait=60``, and
floor, runs, and the runs of ``benchmarks.skeleton`` are measured in turns; the last lines are of
``GET`` of a run, and of runs that are alone.
README.md in this folder explains the columns of ``--table``.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from benchmarks.client import Client, Watched
from benchmarks.harness import (
    RUN,
    Service,
    cpu_s,
    define,
    embedded_all,
    floor,
    log_changes_only,
    percentile,
    process,
    served,
    temporary_database,
    written,
)
from benchmarks.model import FastModel, fast_model

_AT_ONCE = 20
_ROOM = {
    "BOTTEGA_CONCURRENT_RUNS": "1000",
    "BOTTEGA_QUEUED_RUNS": "1000000",
    "BOTTEGA_WORKER_CONCURRENCY": "100",
}
_COLUMNS = {
    "memory": 7, "latency": 8, "tokens": 7, "workers": 8, "waiting": 8,
    "runs/s": 8, "worker": 8, "API": 7, "database": 9, "rest": 6, "floor": 7, "sum/floor": 10,
    "writes": 7, "trans.": 7, "KB log": 7, "KB kept": 8, "conn.": 6, "p50 ms": 8, "p99 ms": 8,
}  # fmt: skip


async def in_turns(url: str, postmaster: int, runs: int, turns: int, memory: str) -> None:
    """Measure the floor, runs of one process, and the skeleton in turns; then ``GET`` of a run."""
    async with (
        contextlib.AsyncExitStack() as stack,
        fast_model() as model,
        served(url, model.base_url, **_ROOM, BOTTEGA_MEMORY=memory) as service,
    ):
        await define(service.base_url)
        client = Client(service.port, RUN)
        await client.waited(2 * _AT_ONCE, _AT_ONCE)  # fills caches and statistics
        arguments = url, model.base_url, str(await _stored_bytes(url))
        skeleton = process(*arguments, ready="listens", module="benchmarks.skeleton")
        (bare, line) = await stack.enter_async_context(skeleton)
        bare_client = Client(int(line.split()[-1]), RUN)
        await bare_client.waited(2 * _AT_ONCE, _AT_ONCE)
        cells = "floor", "service", "database", "sum/floor", "runs/s"
        print(f"{runs} runs, {_AT_ONCE} at a time; CPU in ms per run; skeleton last:")
        print("".join(f"{cell:>11}" for cell in (*cells, *cells[1:])))
        lines = []
        for _ in range(turns):
            floor_ms = await floor(model.base_url, max(2 * _AT_ONCE, runs // 4), _AT_ONCE)
            costs = [floor_ms]
            for pid, target in ((service.pid, client), (bare.pid, bare_client)):
                before, began = (cpu_s(pid), cpu_s(postmaster)), time.perf_counter()
                await target.waited(runs, _AT_ONCE)
                took = time.perf_counter() - began
                await embedded_all(url)
                of_process = (cpu_s(pid) - before[0]) * 1000 / runs
                of_database = (cpu_s(postmaster) - before[1]) * 1000 / runs
                ratio = (of_process + of_database) / floor_ms
                costs += of_process, of_database, ratio, runs / took
            lines.append(costs)
            print("".join(f"{value:11.2f}" for value in costs), flush=True)
        medians = [statistics.median(column) for column in zip(*lines, strict=True)]
        print("".join(f"{value:11.2f}" for value in medians) + "  medians")
        await _print_get(client, service, postmaster)
        await _print_alone(client)
        client.close()
        bare_client.close()


async def _stored_bytes(url: str) -> int:
    """Return the mean number of bytes of a run's events."""
    connection = await asyncpg.connect(url)
    query = "SELECT sum(octet_length(events)) / count(DISTINCT run_id) FROM run_steps"
    stored = int(await connection.fetchval(query))
    await connection.close()
    return stored


async def _print_get(client: Client, service: Service, postmaster: int, times: int = 2000) -> None:
    """Print the CPU of ``GET`` of a run."""
    path = "/v1/runs/" + await client.post()
    await _get(client, path, 100)  # to warm up
    before = cpu_s(service.pid), cpu_s(postmaster)
    await asyncio.gather(*(_get(client, path, times // _AT_ONCE) for _ in range(_AT_ONCE)))
    of_service, of_database = (
        (cpu_s(pid) - spent) * 1000 / times
        for pid, spent in zip((service.pid, postmaster), before, strict=True)
    )
    print(
        f"GET of a run: CPU of the service {of_service:.2f} ms, of the database {of_database:.2f}"
    )


async def _get(client: Client, path: str, times: int) -> None:
    for _ in range(times):
        await client.request("GET", path)


async def _print_alone(client: Client) -> None:
    """Print the times of runs that are alone."""
    alone = [await client.watched() for _ in range(50)]
    for name, values in (
        ("POST to final event", [run.took_s for run in alone]),
        ("POST to run.started", [run.started_s for run in alone]),
        ("queued to started", [run.queued_s for run in alone]),
    ):
        middle, late = statistics.median(values) * 1000, percentile(values, 0.99) * 1000
        print(f"one run at a time, {name}: p50 {middle:.1f} ms, p99 {late:.1f} ms")


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

    @property
    def at_once(self) -> int:
        """Number of runs under way, or of the floor's rounds of calls."""
        return _AT_ONCE if self.latency_ms == 0 else 5 * _AT_ONCE


TABLE = (
    Setting(),
    Setting(latency_ms=400),
    Setting(latency_ms=400, token_delay_ms=5),
    *(Setting(workers=count) for count in (2, 4, 8)),
    Setting(latency_ms=400, workers=8),
    Setting(waiting=10_000),
    Setting(memory="full"),
    Setting(memory="full", latency_ms=400),
)


async def table(url: str, postmaster: int, runs: int) -> None:
    """Print a line for each setting, with processes of their own for API and workers."""
    await log_changes_only(url)
    print(f"{runs} runs, {_AT_ONCE} at a time (with latency {5 * _AT_ONCE}); CPU ms per run:")
    _print_row(*_COLUMNS)
    for setting in TABLE:
        async with fast_model(
            latency_ms=setting.latency_ms, token_delay_ms=setting.token_delay_ms
        ) as model:
            rounds = max(2 * setting.at_once, runs // 10)
            floor_ms = await floor(model.base_url, rounds, setting.at_once)
            environment = {**_ROOM, "BOTTEGA_MEMORY": setting.memory}
            async with served(url, model.base_url, "--no-worker", **environment) as api:
                await define(api.base_url)
                client = Client(api.port, RUN)
                costs = _Costs(url, setting, floor_ms, (postmaster, api.pid), model)
                measured = _drain if setting.waiting else _watch
                await measured(costs, client, runs, api.environment)
                client.close()


async def _watch(costs: "_Costs", client: Client, runs: int, environment: dict[str, str]) -> None:
    """Measure runs that a client starts and watches."""
    at_once = costs.setting.at_once
    async with _workers(costs.setting.workers, environment) as workers:
        await client.many(2 * at_once, at_once)  # fills caches and statistics
        await costs.begin(workers)
        await costs.end(runs, await client.many(runs, at_once))


async def _drain(costs: "_Costs", client: Client, runs: int, environment: dict[str, str]) -> None:
    """Measure the first runs of a backlog, which nobody watches."""
    for _ in range(costs.setting.waiting // 100):
        await asyncio.gather(*(client.post() for _ in range(100)))
    connection = await asyncpg.connect(costs.url)
    before = await _ended(connection)
    async with _workers(costs.setting.workers, environment) as workers:
        await _ended(connection, before + 100)  # fills caches and statistics
        await costs.begin(workers)
        first = await _ended(connection)
        last = await _ended(connection, first + runs)
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
        self,
        url: str,
        setting: Setting,
        floor_ms: float,
        pids: tuple[int, int],
        model: FastModel,
    ) -> None:
        self.url, self.setting = url, setting
        self._floor_ms = floor_ms
        self._postmaster, self._api = pids
        self._model = model
        self._workers: list[int] = []

    def _cpu_s(self) -> list[float]:
        rest = self._model.cpu_s() + cpu_s(os.getpid())
        return [sum(map(cpu_s, self._workers)), cpu_s(self._api), cpu_s(self._postmaster), rest]

    async def begin(self, workers: list[int]) -> None:
        self._workers = workers
        await embedded_all(self.url)
        self._written = await written(self.url)
        self._before = self._cpu_s()
        self._began = time.perf_counter()

    async def end(self, runs: int, seen: Sequence[Watched]) -> None:
        """Print the line of the table for so many runs."""
        wall = time.perf_counter() - self._began
        await embedded_all(self.url)
        pairs = zip(self._cpu_s(), self._before, strict=True)
        worker, api, database, rest = ((now - then) * 1000 / runs for now, then in pairs)
        now, then = await written(self.url), self._written
        took = [run.took_s * 1000 for run in seen]
        setting = self.setting
        _print_row(
            setting.memory,
            f"{setting.latency_ms:g}",
            f"{setting.token_delay_ms:g}",
            f"{setting.workers}",
            f"{setting.waiting}",
            f"{runs / wall:.1f}",
            *(f"{each:.2f}" for each in (worker, api, database, rest)),
            f"{self._floor_ms:.2f}",
            f"{(worker + api + database) / self._floor_ms:.2f}",
            f"{(now.writing - then.writing) / runs:.1f}",
            f"{(now.transactions - then.transactions) / runs:.1f}",
            f"{(now.log_bytes - then.log_bytes) / runs / 1024:.1f}",
            f"{(now.stored_bytes - then.stored_bytes) / runs / 1024:.1f}",
            f"{now.connections}",
            *(f"{percentile(took, share):.1f}" if took else "-" for share in (0.5, 0.99)),
        )


def _print_row(*cells: str) -> None:
    print(
        "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True)),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="API and workers by themselves")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory", choices=("off", "read", "full"), default="off")
    parser.add_argument("--stored", type=int, default=0, help="episodes at the start")
    options = parser.parse_args()
    with temporary_database() as (url, postmaster):
        if options.stored:
            from benchmarks.memory import fill

            asyncio.run(fill(url, options.stored))
        if options.table:
            asyncio.run(table(url, postmaster, options.runs))
        else:
            asyncio.run(in_turns(url, postmaster, options.runs, options.turns, options.memory))


if __name__ == "__main__":
    main()
