"""Asynchronous sub-agents through the whole service; a part of ``benchmarks.subagents``."""

import asyncio
import time
from typing import Any

import httpx2

from benchmarks.harness import cpu_s, process, temporary_database, written
from bottega.llm.demo_process import demo_model

CHILDREN, CALLS = 20, 5
LATENCY_S = 1.0
AT_ONCE = (1, 5, 10, 25, 50)
RAISED = {
    f"BOTTEGA_SUBAGENT_{name}": "2000" for name in ("MIN_WORKERS", "MAX_WORKERS", "MAX_CONCURRENT")
} | {f"BOTTEGA_SUBAGENT_{name}": "10000" for name in ("MAX_QUEUE_SIZE", "MAX_QUEUED")}
LEAD = {
    "name": "lead",
    "system_message": "You lead a team of researchers.",
    "subagents": {"mode": "async"},
}


def measure_service() -> None:
    with temporary_database() as (url, postmaster):
        asyncio.run(_measure(url, postmaster))


async def _measure(url: str, postmaster: int) -> None:
    async with demo_model(latency_ms=LATENCY_S * 1000) as base_url:
        environment = {
            "DATABASE_URL": url,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "none",
            **RAISED,
        }
        api = process("serve", "--no-worker", "--port", "0", ready="listens", **environment)
        worker = process("worker", ready="ready", **environment)
        async with api as (_, line), worker as (worker_process, _):
            address = line.split(" on ")[1].split()[0]
            async with httpx2.AsyncClient(base_url=address, timeout=120) as client:
                (await client.post("/v1/agents", json=LEAD)).raise_for_status()
                await _one(client)
                print(
                    f"\nthrough API, worker and journal: runs of {CHILDREN} children, model latency"
                    f" {LATENCY_S:g} s, one worker process"
                )
                head = ("runs at once", "children/s", "of ideal", "CPU share")
                costs = ("CPU ms each", "database", "writes", "KB of log")
                print(*(f"{text:>12}" for text in (*head, *costs)))
                for runs in AT_ONCE:
                    await _line(client, url, runs, worker_process.pid, postmaster)


async def _line(
    client: httpx2.AsyncClient, url: str, runs: int, worker: int, postmaster: int
) -> None:
    before, then = [cpu_s(worker), cpu_s(postmaster)], await written(url)
    began = time.perf_counter()
    await asyncio.gather(*(_one(client) for _ in range(runs)))
    wall = time.perf_counter() - began
    spent = [cpu_s(worker) - before[0], cpu_s(postmaster) - before[1]]
    now = await written(url)
    children = runs * CHILDREN
    ideal = children / (CALLS * LATENCY_S)
    print(
        f"{runs:12} {children / wall:12.1f} {children / wall / ideal:12.0%} {spent[0] / wall:12.0%}"
        f" {spent[0] * 1000 / children:12.2f} {spent[1] * 1000 / children:12.2f}"
        f" {(now.writing - then.writing) / children:12.2f}"
        f" {(now.log_bytes - then.log_bytes) / children / 1024:12.1f}"
    )


async def _one(client: httpx2.AsyncClient) -> None:
    body = {"agent": "lead", "input": f"Research the state of shipping in {CHILDREN} parts."}
    run: dict[str, Any] = (await client.post("/v1/runs", json=body)).raise_for_status().json()
    while run["ended_at"] is None:
        await client.get(
            f"/v1/runs/{run['id']}/events",
            headers={"accept": "text/event-stream"},
            params={"types": "run.completed"},
        )
        run = (await client.get(f"/v1/runs/{run['id']}")).json()
    done = f"{CHILDREN} tasks: {CHILDREN} completed"
    if done not in str(run["output"]):
        raise SystemExit(f"run {run['id']} {run['status']}: {run['output'] or run['error']}")
