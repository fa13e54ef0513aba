"""Cost of the demo pipeline on this machine.

    python -m benchmarks [--runs 400] [--concurrency 20] [--memory off full] [--stored 200000]

All parts are real processes: embedded PostgreSQL, API, one worker, the demo model without latency.
Each run is posted over HTTP and watched over a WebSocket until its final event. Absolute figures
depend on the machine. The ratio to the floor of the same invocation is comparable: the floor makes
the same seven model calls by ``chat.completions.create`` and nothing else. ``--memory`` sets the
use of memory, one measurement for each; ``--stored`` the number of episodes at the start.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import openai
import psutil
import websockets
from pydantic_core import from_json

from bottega.cli.demo.scenarios import SOFTWARE
from bottega.db import embedded, migrate
from bottega.llm.demo_process import demo_model

CALLS = 7


@asynccontextmanager
async def process(
    *arguments: str, ready: str, **environment: str
) -> AsyncIterator[tuple[Any, str]]:
    """Run our command as a process; yield it and the line that reports readiness."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bottega.cli.commands",
        *arguments,
        env={**os.environ, "COLUMNS": "200", **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    while ready not in (line := (await child.stderr.readline()).decode()):
        if not line:
            raise SystemExit(f"`bottega {' '.join(arguments)}` did not start")
    drained = asyncio.ensure_future(_drain(child.stderr))
    try:
        yield child, line
    finally:
        child.terminate()
        await child.wait()
        await drained


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


def model_pid() -> int:
    """Return the pid of the demo model, a child of this process."""
    children = psutil.Process().children()
    return next(child.pid for child in children if "bottega.llm.demo_model" in child.cmdline())


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, with its children unless it is this one."""
    root = psutil.Process(pid)
    total = 0.0
    for member in [root, *(root.children(recursive=True) if pid != os.getpid() else ())]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


async def define(client: httpx2.AsyncClient) -> None:
    """Create the demo's agents and graph, unless an earlier measurement did."""
    wanted = [("/v1/agents", agent) for agent in SOFTWARE.agents]
    for path, body in [*wanted, ("/v1/graphs", SOFTWARE.graph)]:
        answer = await client.post(path, json=body)
        if answer.status_code != httpx2.codes.CONFLICT:
            answer.raise_for_status()


async def one_run(client: httpx2.AsyncClient, port: int) -> tuple[float, float, float]:
    """Return three times of a run, in seconds.

    From POST to the final event here, from queued to started in the log, and from POST to the
    started event here.
    """
    began = time.perf_counter()
    answer = await client.post(
        "/v1/runs",
        json={
            "agent": SOFTWARE.coordinator,
            "graph": SOFTWARE.graph_name,
            "input": "Build a todo app.",
        },
    )
    run_id = answer.raise_for_status().json()["id"]
    at: dict[str, datetime] = {}
    started = 0.0
    async with websockets.connect(
        f"ws://127.0.0.1:{port}/v1/runs/{run_id}/ws", compression=None
    ) as socket:
        async for message in socket:
            event = from_json(message)
            if event["type"] == "heartbeat":
                continue
            at[event["type"]] = datetime.fromisoformat(event["at"])
            if event["type"] == "run.started":
                started = time.perf_counter() - began
            if event["type"] == "run.completed":
                took = time.perf_counter() - began
                return took, (at["run.started"] - at["run.queued"]).total_seconds(), started
    raise SystemExit(f"run {run_id} did not complete: it ended with {max(at, key=lambda k: at[k])}")


async def many(client: httpx2.AsyncClient, port: int, runs: int, concurrency: int) -> list[float]:
    slots = asyncio.Semaphore(concurrency)

    async def slot() -> float:
        async with slots:
            return (await one_run(client, port))[0]

    return await asyncio.gather(*(slot() for _ in range(runs)))


async def floor(base_url: str, rounds: int, concurrency: int) -> tuple[float, float]:
    """Measure seven bare calls in sequence: rounds per second, CPU milliseconds per round."""
    slots = asyncio.Semaphore(concurrency)
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": agent["name"],
                "description": agent["description"],
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string"}},
                    "required": ["query"],
                },
            },
        }
        for agent in SOFTWARE.agents[:3]
    ]

    async with openai.AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as client:

        async def round_() -> None:
            async with slots:
                history: Any = [
                    {"role": "system", "content": SOFTWARE.agents[-1]["system_message"]},
                    {"role": "user", "content": "Build a todo app."},
                ]
                for call in range(CALLS):
                    stream = await client.chat.completions.create(
                        model="demo",
                        messages=history,
                        tools=tools if call % 2 == 0 else openai.omit,
                        stream=True,
                        stream_options={"include_usage": True},
                    )
                    async for _ in stream:
                        pass

        await round_()
        began, spent = time.perf_counter(), time.process_time()
        await asyncio.gather(*(round_() for _ in range(rounds)))
        wall, cpu = time.perf_counter() - began, time.process_time() - spent
    return rounds / wall, cpu * 1000 / rounds


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@contextmanager
def temporary_database() -> Iterator[tuple[str, int]]:
    """Yield the URL of a fresh, migrated server, and the pid of its postmaster."""
    folder = tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True)
    with folder as name, embedded.running(Path(name)) as url:
        migrate.upgrade(url)
        pid_file = Path(name) / "postgres" / "postmaster.pid"
        yield url, int(pid_file.read_text().splitlines()[0])


async def measure(
    url: str, postmaster: int, runs: int, concurrency: int, memory: Sequence[str]
) -> None:
    async with demo_model() as base_url:
        floor_rate, floor_cpu = await floor(base_url, max(20, runs // 10), concurrency)
        environment = {"DATABASE_URL": url, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
        for mode in memory:
            await pipeline(
                {**environment, "BOTTEGA_MEMORY": mode}, postmaster, runs, concurrency, floor_cpu
            )
    print(f"floor: {CALLS} bare chat.completions.create calls")
    print(f"  rounds/s                       {floor_rate:8.1f}")
    print(f"  CPU ms per round               {floor_cpu:8.2f}")


async def pipeline(
    environment: dict[str, str], postmaster: int, runs: int, concurrency: int, floor_cpu: float
) -> None:
    url = environment["DATABASE_URL"]
    api = process("serve", "--no-worker", "--port", "0", ready="listens", **environment)
    worker = process("worker", ready="ready", **environment)
    async with api as (api_process, line), worker as (worker_process, _):
        port = int(line.split("http://127.0.0.1:")[1].split()[0])
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await define(client)
            await many(client, port, 2 * concurrency, concurrency)
            alone = [await one_run(client, port) for _ in range(50)]
            await embedded_all(url)
            pids = {
                "worker": worker_process.pid,
                "API": api_process.pid,
                "database": postmaster,
                "demo model": model_pid(),
                "this client": os.getpid(),
            }
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            written = await writing(url)
            began = time.perf_counter()
            took = await many(client, port, runs, concurrency)
            wall = time.perf_counter() - began
            await embedded_all(url)
            spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
            transactions, log_bytes = (
                (now - then) / runs for now, then in zip(await writing(url), written, strict=True)
            )
    memory = environment["BOTTEGA_MEMORY"]
    print(
        f"{runs} runs of {CALLS} model calls, {concurrency} at a time, one worker, memory {memory}"
    )
    print(f"  runs/s                         {runs / wall:8.1f}")
    for name, seconds in spent.items():
        print(f"  CPU ms per run, {name:14} {seconds * 1000 / runs:8.2f}")
    print(f"  writing transactions per run   {transactions:8.1f}")
    print(f"  KB of database log per run     {log_bytes / 1024:8.1f}")
    print(f"  POST to final event, p50 / p99 {_ms(took, 0.5):8.1f} / {_ms(took, 0.99):.1f} ms")
    whole, start, seen = ([run[part] for run in alone] for part in range(3))
    print(f"  the same, one run at a time    {_ms(whole, 0.5):8.1f} / {_ms(whole, 0.99):.1f} ms")
    print(f"  idle: queued to started        {_ms(start, 0.5):8.1f} / {_ms(start, 0.99):.1f} ms")
    print(f"  idle: POST to started, here    {_ms(seen, 0.5):8.1f} / {_ms(seen, 0.99):.1f} ms")
    ratio = spent["worker"] * 1000 / runs / floor_cpu
    print(f"  worker's CPU / floor's         {ratio:8.2f}")


async def embedded_all(url: str, patience_s: float = 60) -> None:
    """Wait for the vectors of all episodes, to include their cost."""
    connection = await asyncpg.connect(url)
    ends = time.monotonic() + patience_s
    while await connection.fetchval("SELECT EXISTS (SELECT FROM episode_work)"):
        if time.monotonic() > ends:
            print(f"  (after {patience_s:.0f} s there still are episodes without vectors)")
            break
        await asyncio.sleep(0.1)
    await connection.close()


async def writing(url: str) -> tuple[int, int]:
    """Return the number of writing transactions and the bytes of the log so far."""
    connection = await asyncpg.connect(url)
    row = await connection.fetchrow(
        "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS transactions, "
        "(pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint AS log_bytes"
    )
    await connection.close()
    return row["transactions"], row["log_bytes"]


def _ms(values: list[float], share: float) -> float:
    middle = statistics.median(values) if share == 0.5 else percentile(values, share)
    return middle * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--memory", nargs="+", choices=("off", "read", "full"), default=["off"])
    parser.add_argument("--stored", type=int, default=0)
    arguments = parser.parse_args()
    with temporary_database() as (url, postmaster):
        if arguments.stored:
            from benchmarks.memory.loading import fill

            asyncio.run(fill(url, arguments.stored))
        asyncio.run(
            measure(url, postmaster, arguments.runs, arguments.concurrency, arguments.memory)
        )


if __name__ == "__main__":
    main()
