"""Bottega beside its peers: the same work, the same model, measured in turns.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r benchmarks/peers/requirements.txt
    python -m benchmarks.peers --python /tmp/peers/bin/python [--rounds 5] [--latency-ms 50]

The work: a loop of 20 tool calls; a coordinator that asks three sub-agents; one that asks 100 at
once. Each participant is a process, which does its runs side by side. CPU is
that of this process per run, wall the median time of a run; both also as ratios to the bare SDK in
the same round. The figures are medians of the rounds.

The durable work is the same with every step stored in PostgreSQL: CPU is that of all processes of
the participant, and of the database. Bottega is its service there, with API and worker.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx2

from benchmarks.client import Client
from benchmarks.harness import Service, cpu_s, served, temporary_database
from benchmarks.model import fast_model
from benchmarks.peers.work import (
    ASSISTANT,
    COORDINATOR,
    FAN_OUT,
    HELPER,
    LOOP,
    SPECIALISTS,
    STEPS,
    TEAM,
    described,
    measure,
    prompt_of,
)

ROOT = Path(__file__).parents[2]
RUNS = {LOOP: (8, 4), TEAM: (40, 10), FAN_OUT: (2, 1)}
"""Runs of a round, and how many at once."""
FLOOR = "bare SDK"
PEERS = {
    FLOOR: "bare_sdk",
    "Bottega, library": "with_bottega",
    "openai-agents": "with_openai_agents",
    "LangGraph": "with_langgraph",
    "Agno": "with_agno",
}
DURABLE = {"LangGraph, PostgreSQL": "with_langgraph", "Agno, PostgreSQL": "with_agno"}


@dataclass(frozen=True, slots=True)
class Cost:
    """A round's milliseconds per run: CPU, of it that of the database, and wall."""

    cpu: float
    database: float
    wall: float


Work = Callable[[str], Awaitable[Cost]]
"""Does the runs of a round of a work."""


@asynccontextmanager
async def _participant(python: str, module: str, *addresses: str) -> AsyncIterator[Any]:
    """Start a participant; yield a function that asks it for a round of a work."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "benchmarks.peers.work", module, *addresses),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def line() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await stdout.readline())
        return found

    async def ask(work: str) -> dict[str, Any]:
        runs, at_once = RUNS[work]
        asked = {"work": work, "runs": runs, "at_once": at_once}
        stdin.write(json.dumps(asked).encode() + b"\n")
        return await line()

    print(module, await line(), file=sys.stderr)
    try:
        yield ask
    finally:
        stdin.close()
        await process.wait()


def _in_process(ask: Any, postmaster: int | None = None) -> Work:
    """Return the work of a participant, with the CPU of its database."""

    async def work(name: str) -> Cost:
        before = cpu_s(postmaster) if postmaster else 0.0
        found = await ask(name)
        spent = (cpu_s(postmaster) - before) * 1000 / RUNS[name][0] if postmaster else 0.0
        return Cost(found["cpu_ms"] + spent, spent, statistics.median(found["took_ms"]))

    return work


def _of_service(service: Service, postmaster: int) -> Work:
    """Return the work of a service, whose clients wait for the end of their run."""
    agents = {LOOP: "assistant", TEAM: "coordinator", FAN_OUT: "leader"}

    async def work(name: str) -> Cost:
        client = Client(service.port, None)

        async def ask(query: str) -> object:
            body = json.dumps({"agent": agents[name], "input": query}).encode()
            return (await client.request("POST", "/v1/runs?wait=60", body))["output"]

        runs, at_once = RUNS[name]
        before = cpu_s(service.pid), cpu_s(postmaster)
        found = await measure(ask, name, runs, at_once)
        spent = (cpu_s(postmaster) - before[1]) * 1000 / runs
        own = (cpu_s(service.pid) - before[0]) * 1000 / runs
        client.close()
        return Cost(own + spent, spent, statistics.median(found["took_ms"]))

    return work


async def _define(service: Service) -> None:
    """Store the agents of all works in the service."""
    calculator = {"type": "builtin", "name": "calculator"}
    agents: list[dict[str, Any]] = [
        {
            "name": "assistant",
            "system_message": ASSISTANT,
            "tools": [calculator],
            "max_iterations": STEPS + 1,
        },
        {"name": "helper", "system_message": HELPER, "description": described("helper")},
        *(
            {"name": name, "system_message": prompt_of(name), "description": described(name)}
            for name in SPECIALISTS
        ),
    ]
    for name, names in (("coordinator", list(SPECIALISTS)), ("leader", ["helper"])):
        leads = {"mode": "sync", "names": names}
        agents.append({"name": name, "system_message": COORDINATOR, "subagents": leads})
    async with httpx2.AsyncClient(base_url=service.base_url) as client:
        for agent in agents:
            answer = await client.post("/v1/agents", json=agent)
            if answer.is_error:
                raise SystemExit(answer.text)


async def compare(works: dict[str, Work], names: Sequence[str], rounds: int) -> None:
    """Print a table of participants for each work, measured in turns."""
    for name in names:
        for work in works.values():
            await work(name)  # fills caches, opens connections
        costs: dict[str, list[Cost]] = {who: [] for who in works}
        for _ in range(rounds):
            for who, work in works.items():
                costs[who].append(await work(name))
        runs, at_once = RUNS[name]
        print(f"\n{name}: {runs} runs, {at_once} at a time, median of {rounds} rounds\n")
        print(
            "| | CPU ms | ÷ bare | of it database | wall ms | ÷ bare |\n|---|---|---|---|---|---|"
        )
        for who, found in costs.items():
            print(_row(who, found, costs[FLOOR]), flush=True)


def _row(who: str, found: Sequence[Cost], floor: Sequence[Cost]) -> str:
    cpu, database, wall = (
        statistics.median(values)
        for values in zip(*((each.cpu, each.database, each.wall) for each in found), strict=True)
    )
    pairs = list(zip(found, floor, strict=True))
    cpu_ratio = statistics.median(one.cpu / bare.cpu for one, bare in pairs)
    wall_ratio = statistics.median(one.wall / bare.wall for one, bare in pairs)
    kept = f"{database:.1f}" if database else ""
    return f"| {who} | {cpu:.1f} | {cpu_ratio:.2f} | {kept} | {wall:.0f} | {wall_ratio:.2f} |"


async def _database(url: str, name: str) -> str:
    """Make another database on the server; return its URL."""
    connection = await asyncpg.connect(url)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return url.replace("/postgres?", f"/{name}?")


async def measure_all(
    python: str, rounds: int, latency_ms: float, only: Sequence[str], database: tuple[str, int]
) -> None:
    async with (
        fast_model(latency_ms=latency_ms, module="benchmarks.peers.model") as model,
        AsyncExitStack() as stack,
    ):

        async def start(module: str, *addresses: str) -> Any:
            own = sys.executable if module == "with_bottega" else python
            participant = _participant(own, module, model.base_url, *addresses)
            return await stack.enter_async_context(participant)

        works = {who: _in_process(await start(module)) for who, module in PEERS.items()}
        if "library" in only:
            await compare(works, list(RUNS), rounds)
        if "durable" not in only:
            return
        url, postmaster = database
        kept = {FLOOR: works[FLOOR]}
        room = {"BOTTEGA_CONCURRENT_RUNS": "1000", "BOTTEGA_MEMORY": "off"}
        service = await stack.enter_async_context(served(url, model.base_url, **room))
        await _define(service)
        kept["Bottega, service"] = _of_service(service, postmaster)
        for who, module in DURABLE.items():
            own_url = await _database(url, module)
            kept[who] = _in_process(await start(module, own_url), postmaster)
        print("\n## Durable")
        await compare(kept, [LOOP, TEAM], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of the environment with the peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--only", choices=("library", "durable"))
    options = parser.parse_args()
    only = (options.only,) if options.only else ("library", "durable")
    with temporary_database() as database:
        asyncio.run(measure_all(options.python, options.rounds, options.latency_ms, only, database))


if __name__ == "__main__":
    main()
