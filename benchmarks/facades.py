"""Cost of a run that comes by another API, beside POST /v1/runs?wait.

python -m benchmarks.facades [--runs 300] [--rounds 3]

API, worker, database and a model that costs next to nothing are processes of their own. One client
asks one question after the other, by each way in turns. Told are the medians of the rounds, per
run: CPU of the API's process, and the time from the request to the answer. Compare only figures of
the same invocation.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from benchmarks.harness import cpu_s, process, temporary_database
from benchmarks.model import fast_model

_QUESTION = "What is the state of my order?"
_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
_STATELESS = {
    "mcp-protocol-version": "2026-07-28",
    "mcp-method": "tools/call",
    "mcp-name": "clerk",
}
Ask = Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]]


async def plain(client: httpx2.AsyncClient) -> httpx2.Response:
    body = {"agent": "clerk", "input": _QUESTION, "memory": "off"}
    return await client.post("/v1/runs?wait=30", json=body)


async def completion(client: httpx2.AsyncClient) -> httpx2.Response:
    body = {"model": "clerk", "messages": [{"role": "user", "content": _QUESTION}]}
    return await client.post("/openai/v1/chat/completions", json=body)


def call(accept: str, meta: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """Return a call of a tool."""

    async def ask(client: httpx2.AsyncClient) -> httpx2.Response:
        params = {"name": "clerk", "arguments": {"input": _QUESTION}, "_meta": meta}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        return await client.post("/mcp", json=body, headers={"accept": accept, **headers})

    return ask


_STREAM = "application/json, text/event-stream"
WAYS: Mapping[str, Ask] = {
    "POST /v1/runs?wait": plain,
    "/openai/v1/chat/completions": completion,
    "/mcp 2025-11-25, JSON": call("application/json", {}, {}),
    "/mcp 2025-11-25, stream": call(_STREAM, {}, {}),
    "/mcp 2026-07-28, stream": call(_STREAM, _META, _STATELESS),
    "/mcp 2026-07-28, progress": call(_STREAM, {**_META, "progressToken": 1}, _STATELESS),
}


async def cost(client: httpx2.AsyncClient, pid: int, ask: Ask, runs: int) -> tuple[float, float]:
    """Return milliseconds per run: CPU of the process, and time."""
    before, began = cpu_s(pid), time.perf_counter()
    for _ in range(runs):
        answer = (await ask(client)).raise_for_status()
        if "error" in answer.text and '"error":null' not in answer.text:
            raise SystemExit(f"the run failed: {answer.text}")
    took = time.perf_counter() - began
    return (cpu_s(pid) - before) * 1000 / runs, took * 1000 / runs


async def measure(client: httpx2.AsyncClient, pid: int, runs: int, rounds: int) -> None:
    agent = {
        "name": "clerk",
        "system_message": "You answer customers.",
        "expose": ["openai", "mcp"],
        "memory": "off",
    }
    (await client.post("/v1/agents", json=agent)).raise_for_status()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, ask in WAYS.items():
            costs = await cost(client, pid, ask, runs if number else 30)
            if number:  # the first is to warm up
                found[way].append(costs)
    print(f"{'way':32}{'API ms':>10}{'ratio':>8}{'more ms':>10}{'took ms':>10}")
    base = statistics.median(cpu for cpu, _ in found["POST /v1/runs?wait"])
    for way, costs_ in found.items():
        cpu, took = (statistics.median(column) for column in zip(*costs_, strict=True))
        print(f"{way:32}{cpu:10.2f}{cpu / base:8.2f}{cpu - base:10.2f}{took:10.1f}")


async def first_of_events(client: httpx2.AsyncClient) -> None:
    """Wait for the first text of a run in its stream of events."""
    run = (await client.post("/v1/runs", json={"agent": "clerk", "input": _QUESTION})).json()
    path, wanted = f"/v1/runs/{run['id']}/events", {"accept": "text/event-stream"}
    async with client.stream("GET", path, headers=wanted) as stream:
        async for line in stream.aiter_lines():
            if line == "event: llm.delta":
                return
    raise SystemExit("the stream of events had no text")


async def first_of_completion(client: httpx2.AsyncClient) -> None:
    """Wait for the first text of a streamed completion."""
    body = {"model": "clerk", "messages": [{"role": "user", "content": _QUESTION}]}
    path = "/openai/v1/chat/completions"
    async with client.stream("POST", path, json={**body, "stream": True, "store": True}) as stream:
        async for line in stream.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return
    raise SystemExit("the completion had no text")


FIRST: Mapping[str, Callable[[httpx2.AsyncClient], Awaitable[None]]] = {
    "POST /v1/runs, then its events": first_of_events,
    "/openai/v1/chat/completions": first_of_completion,
}


async def measure_first(client: httpx2.AsyncClient, samples: int) -> None:
    """Print the medians of the times to the first text, one way after the other."""
    took: dict[str, list[float]] = {way: [] for way in FIRST}
    for _ in range(samples):
        for way, first in FIRST.items():
            began = time.perf_counter()
            await first(client)
            took[way].append((time.perf_counter() - began) * 1000)
    medians = {way: statistics.median(each) for way, each in took.items()}
    base = next(iter(medians.values()))
    print(f"\n{'way':32}{'first text, ms':>15}{'more ms':>10}")
    for way, median in medians.items():
        print(f"{way:32}{median:15.1f}{median - base:10.1f}")


@asynccontextmanager
async def service(url: str, token_delay_ms: float) -> AsyncIterator[tuple[httpx2.AsyncClient, int]]:
    """Run a service with such a model; yield a client, and the id of the API's process."""
    async with fast_model(token_delay_ms=token_delay_ms) as model:
        settings = {
            "DATABASE_URL": url,
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": model.base_url,
        }
        async with (
            process(*("serve", "--no-worker", "--port", "0"), ready="listens on", **settings) as (
                api,
                line,
            ),
            process("worker", ready="ready", **settings),
        ):
            base_url = "http://127.0.0.1:" + line.split("http://127.0.0.1:")[1].split()[0]
            async with httpx2.AsyncClient(base_url=base_url, timeout=60) as client:
                yield client, api.pid


async def served(url: str, runs: int, rounds: int) -> None:
    async with service(url, 0) as (client, pid):
        await measure(client, pid, runs, rounds)
    async with service(url, 20) as (client, _):
        await measure_first(client, max(20, runs // 5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300, help="of each way, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with temporary_database() as (url, _):
        asyncio.run(served(url, options.runs, options.rounds))


if __name__ == "__main__":
    main()
