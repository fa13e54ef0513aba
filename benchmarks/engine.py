"""Signals: what listening processes cost, and how soon a subscriber sees what happens.

python -m benchmarks.engine [--workers 0 100 200] [--seconds 15]

Database CPU of a run of one 2 s call, at 40 a second, beside so many idle workers, of whom three
listen, as the workers that get the next runs do; and what the idle workers cost without runs.
Requests that start runs, with commits of 10 ms and of 0 ms. The time from a request to the run's
first event at a subscriber, whose process is not the worker's; and from the opening of a stream in
the middle of a call to the call's text. API, worker and model are processes of their own. A
connection stands for an idle worker: it reports and claims as often as a worker does, but never
has a place. Compare only figures of the same invocation.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import shutil
import socket
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx2
from pydantic_core import to_json

from benchmarks.client import Client
from benchmarks.harness import cpu_s, percentile, process
from benchmarks.model import fast_model
from bottega.db import embedded, migrate
from bottega.db.signals import DUE
from bottega.engine.queue import POLL_S
from bottega.events.nats import NatsSignals
from bottega.services import background
from bottega.settings import Settings

_REPORT = """
SELECT * FROM report($1, $2, 0, '{}', '{}', '{}',
                     '{"version": "0", "age_s": 0, "pool": {}, "tenants": {}}')
"""
_CLAIM = "SELECT * FROM claim($1, 20, 0, '{}', '{}')"
_LISTENING = 3
_PER_S = 40
_CALL_S = 2.0
_CHANNELS = ("bottega_queue", "bottega_events")
_RARE = ("bottega_keys", "bottega_secrets")
_RUN = {"agent": "clerk", "input": "hello"}
_SETTINGS = {
    "OPENAI_API_KEY": "none",
    "BOTTEGA_MEMORY": "off",
    "BOTTEGA_CONCURRENT_RUNS": "1000",
    "BOTTEGA_WORKER_CONCURRENCY": "1000",
    "BOTTEGA_QUEUED_RUNS": "100000",
    "BOTTEGA_REQUESTS_PER_S": "100000",
}
_NO_VACUUM = "ALTER SYSTEM SET autovacuum = off"  # else a pass costs what 100 runs cost
_SLOW_COMMITS = "ALTER SYSTEM SET commit_delay = {}; ALTER SYSTEM SET commit_siblings = 0"


@contextlib.contextmanager
def _many_connections(most: int) -> Iterator[tuple[str, int]]:
    """Yield the URL of a fresh, migrated server, and the pid of its postmaster."""
    with tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True) as name:
        with embedded.running(Path(name)) as url:
            asyncio.run(_alter(url, f"ALTER SYSTEM SET max_connections = {most}", _NO_VACUUM))
        with embedded.running(Path(name)) as url:
            migrate.upgrade(url)
            pid_file = Path(name) / "postgres" / "postmaster.pid"
            yield url, int(pid_file.read_text().splitlines()[0])


async def _alter(url: str, *settings: str) -> None:
    connection = await asyncpg.connect(url)
    for setting in settings:
        await connection.execute(setting)
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()


def _port(line: str) -> int:
    return int(re.findall(r"http://[\d.]+:(\d+)", line)[0])


@contextlib.asynccontextmanager
async def served(url: str, nats: str | None = None, **model: Any) -> AsyncIterator[Client]:
    """Run API, worker and model."""
    async with fast_model(**model) as served_model:
        settings = {**_SETTINGS, "DATABASE_URL": url, "OPENAI_BASE_URL": served_model.base_url}
        settings |= {} if nats is None else {"BOTTEGA_NATS_URL": nats}
        api = process("serve", "--no-worker", "--port", "0", ready="listens on", **settings)
        worker = process("worker", ready="is ready", **settings)
        async with api as (_, line), worker:
            client = Client(_port(line), _RUN)
            body = to_json({"name": "clerk", "system_message": "You answer."})
            with contextlib.suppress(SystemExit):  # it exists
                await client.request("POST", "/v1/agents", body)
            yield client
            client.close()


@contextlib.asynccontextmanager
async def listening(url: str, count: int, nats: str | None) -> AsyncIterator[None]:
    """Keep so many idle workers; with NATS, each has a connection to it for the wake-ups."""
    connections = [await asyncpg.connect(url) for _ in range(count)]
    for connection in connections[:_LISTENING]:
        for channel in _CHANNELS if nats is None else _RARE:
            await connection.add_listener(channel, lambda *notice: None)
    idle = [NatsSignals(nats) for _ in connections if nats is not None]
    begins = [asyncio.Event() for _ in idle]
    for each, begun in zip(idle, begins, strict=True):
        each.subscribe(DUE, str(uuid4()), receive=lambda *_, begun=begun: begun.set())
    ids = [uuid4() for _ in connections]
    for _ in range(6):  # a session plans each of its first five reports
        for connection, worker in zip(connections, ids, strict=True):
            await connection.fetch(_REPORT, worker, Settings().lease_s)
    workers = [
        partial(be_idle, connection, worker, n < _LISTENING)
        for n, (connection, worker) in enumerate(zip(connections, ids, strict=True))
    ]
    async with background(*workers, *(each.run for each in idle)):
        await asyncio.gather(*(begun.wait() for begun in begins))
        yield
    for connection in connections:
        connection.terminate()


async def be_idle(connection: asyncpg.Connection, worker: UUID, listens: bool) -> None:
    """Report and claim without a place, as often as an idle worker with default settings."""
    lease_s, next_claim = Settings().lease_s, 0.0
    await asyncio.sleep(random.uniform(0, lease_s))
    while True:
        (about,) = await connection.fetch(_REPORT, worker, lease_s)
        if about["is_sweep_due"]:
            await connection.fetch("SELECT sweep($1)", lease_s)
        if about["is_due"] or (listens and time.monotonic() > next_claim):
            await connection.fetch(_CLAIM, worker)
            next_claim = time.monotonic() + POLL_S
        await asyncio.sleep(lease_s / 3 if listens else about["again_s"])


async def paced(client: Client, seconds: float) -> int:
    """Start runs evenly; return their number."""
    loop = asyncio.get_running_loop()
    began, tasks = loop.time(), []
    for number in range(int(seconds * _PER_S)):
        await asyncio.sleep(max(0.0, began + number / _PER_S - loop.time()))
        tasks.append(asyncio.ensure_future(client.post()))
    return len(await asyncio.gather(*tasks))


async def cost(
    url: str, pid: int, counts: list[int], seconds: float, nats: str | None = None
) -> None:
    first = 0.0
    by = "NOTIFY" if nats is None else "NATS"
    async with served(url, nats, latency_ms=_CALL_S * 1000) as client:
        await paced(client, 3)
        await asyncio.sleep(2 * _CALL_S)
        for count in counts:
            async with listening(url, count, nats):
                before = cpu_s(pid)
                await asyncio.sleep(seconds / 2)
                idle_ms = (cpu_s(pid) - before) * 1000 / (seconds / 2)
                before = cpu_s(pid)
                runs = await paced(client, seconds)
                await asyncio.sleep(2 * _CALL_S)
                spent_ms = (cpu_s(pid) - before) * 1000 / runs
            first = first or spent_ms
            text = f"database CPU a run {spent_ms:.2f} ms ({spent_ms / first:.2f} x)"
            text += f", without runs {idle_ms:.0f} ms a second"
            print(f"{by}, {count} idle workers: {text}", flush=True)


@contextlib.asynccontextmanager
async def nats_server() -> AsyncIterator[str | None]:
    """Run NATS and yield its URL; ``None``: it is not installed."""
    program = shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        print("nats-server is missing", flush=True)
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = await asyncio.create_subprocess_exec(
        program, "-a", "127.0.0.1", "-p", port, stdout=DEVNULL, stderr=DEVNULL
    )
    yield f"nats://127.0.0.1:{port}"
    server.kill()
    await server.wait()


async def accepted(url: str, seconds: float) -> None:
    rates: dict[int, float] = {}
    async with fast_model() as model:
        settings = {**_SETTINGS, "DATABASE_URL": url, "OPENAI_BASE_URL": model.base_url}
        api = process("serve", "--no-worker", "--port", "0", ready="listens on", **settings)
        async with api as (_, line):
            client = Client(_port(line), _RUN)
            for delay_ms in (0, 10, 0, 10):
                await _alter(url, *_SLOW_COMMITS.format(delay_ms * 1000).split(";"))
                rates[delay_ms] = max(rates.get(delay_ms, 0), await posts(client, seconds / 3))
            await _alter(url, *_SLOW_COMMITS.format(0).split(";"))
            client.close()
    ratio = rates[10] / rates[0]
    print(f"requests/s, commits of 0 ms {rates[0]:.0f}, of 10 ms {rates[10]:.0f} ({ratio:.2f} x)")


async def posts(client: Client, seconds: float) -> float:
    """Return how many runs a second 32 clients start."""
    count, ends = 0, time.perf_counter() + seconds

    async def start() -> None:
        nonlocal count
        while time.perf_counter() < ends:
            await client.post()
            count += 1

    await asyncio.gather(*[start() for _ in range(32)])
    return count / seconds


async def seen(url: str, nats: str | None = None) -> None:
    async with served(url, nats) as client:
        await client.many(20, 1)
        times = [each.started_s * 1000 for each in await client.many(200, 1)]
    shown = ", ".join(f"p{share * 100:.0f} {percentile(times, share):.1f}" for share in (0.5, 0.99))
    print(f"from the request to the first event, in ms: {shown}", flush=True)


async def opened_in_mid_call(url: str, nats: str | None = None) -> None:
    times = []
    async with (
        served(url, nats, token_delay_ms=100) as client,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        base = f"http://127.0.0.1:{client.port}/v1/runs"
        for _ in range(20):
            run_id = await client.post()
            await asyncio.sleep(0.5)
            began = time.perf_counter()
            path = f"{base}/{run_id}/stream?types=llm.delta"
            async with http.stream("GET", path) as answer:
                async for text in answer.aiter_text():
                    if "llm.delta" in text:
                        times.append((time.perf_counter() - began) * 1000)
                        break
    shown = ", ".join(f"p{share * 100:.0f} {percentile(times, share):.0f}" for share in (0.5, 0.9))
    print(f"from opening a stream to a call's text, in ms: {shown} ({len(times)} of 20)")


async def main(url: str, pid: int, workers: list[int], seconds: float) -> None:
    async with nats_server() as nats:
        for each in (None, nats) if nats is not None else (None,):
            print("without NATS:" if each is None else "with NATS:", flush=True)
            await seen(url, each)
            await opened_in_mid_call(url, each)
            await cost(url, pid, workers, seconds, each)
    await accepted(url, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 100, 200])
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    with _many_connections(max(options.workers) + 100) as (url, pid):
        asyncio.run(main(url, pid, options.workers, options.seconds))
