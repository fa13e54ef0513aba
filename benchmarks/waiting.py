"""Cost of runs that wait, for everything else.

python -m benchmarks.waiting [--reason person] [--waiting 10000] [--wake 1000] [--span 10]

API, worker, database and model are processes of their own; the model costs next to nothing. Told
before and after so many runs have begun to wait: what they hold (slots, places in the queue, heads,
connections), memory of API and worker, CPU of all while nothing happens, and the cost of an
ordinary run. They wait for a person's approval, for a tool of the client, for the time of a node's
second try, or for child runs (one each, which waits for a person). Those that wait for a person are
then approved: one, and many at once.
Compare only figures of the same invocation.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import httpx2
import psutil

from benchmarks.harness import cpu_s, process, temporary_database
from benchmarks.model import fast_model

_SAMPLE = 50
_AT_ONCE = 32
_AGENTS: tuple[dict[str, Any], ...] = (
    {"name": "plain", "system_message": "You answer."},
    {
        "name": "person",
        "system_message": "You calculate.",
        "tools": [{"type": "builtin", "name": "calculator", "approval": "always"}],
    },
    {
        "name": "client",
        "system_message": "You calculate.",
        "tools": [
            {
                "type": "client",
                "name": "calculate",
                "description": "Calculates.",
                "parameters": {"type": "object"},
            }
        ],
    },
)
_NEVER = {
    "success_check": [{"type": "contains", "value": "never said"}],
    "retry": {"max": 1, "backoff_s": 600},
}
_GRAPHS: tuple[dict[str, Any], ...] = (
    {"name": "time", "nodes": [{"agent": "plain", **_NEVER}]},
    {
        "name": "children",
        "nodes": [
            {
                "agent": "person",
                "for_each": {"from": "run", "pointer": "/metadata/list", "spread_above": 0},
            }
        ],
    },
)
_HELD = """
SELECT (SELECT count(*) FROM runs WHERE status = 'waiting' AND parent_run_id IS NULL) AS waiting,
       (SELECT count(*) FROM run_queue) AS queue, (SELECT count(*) FROM run_heads) AS heads,
       (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bottega') AS connections
"""
_OVER = "SELECT count(*) FROM runs WHERE id = ANY ($1) AND status = 'completed'"


@dataclass(frozen=True, slots=True)
class Bench:
    """A service that is measured.

    Attributes:
        reason: what runs wait for.
        client: of its API.
        owner: connection to its database.
        pids: of API, worker and database.
    """

    reason: str
    client: httpx2.AsyncClient
    owner: asyncpg.Connection
    pids: tuple[int, int, int]

    def cpu(self) -> list[float]:
        return [cpu_s(pid) * 1000 for pid in self.pids]

    def spent(self, before: Sequence[float], per: float) -> dict[str, float]:
        """Return CPU milliseconds since ``before``, by process."""
        names = ("API CPU ms", "worker CPU ms", "database CPU ms")
        pairs = zip(names, before, self.cpu(), strict=True)
        return {name: (after - earlier) / per for name, earlier, after in pairs}

    async def submit(self, name: str, query: str = "") -> dict[str, str]:
        kind: dict[str, Any] = {"agent": name}
        if name in [each["name"] for each in _GRAPHS]:
            kind = {"graph": name, "mode": "dag", "metadata": {"list": ["What is 12 * 12?"]}}
        body = {**kind, "input": "What is 12 * 12?", "memory": "off"}
        answer = await self.client.post(f"/v1/runs{query}", json=body)
        answer.raise_for_status()
        run: dict[str, str] = answer.json()
        return run

    async def held(self) -> dict[str, float]:
        """Return what all runs hold, once none is under way, and the memory of our processes."""
        found: dict[str, float] = {}
        while not found or found["queue"] or found["heads"]:
            found = dict(await self.owner.fetchrow(_HELD))
            await asyncio.sleep(0.1)
        api, worker = (psutil.Process(pid).memory_info().rss / 2**20 for pid in self.pids[:2])
        return {**found, "API MiB": api, "worker MiB": worker}

    async def idle(self, span_s: float) -> dict[str, float]:
        before = self.cpu()
        await asyncio.sleep(span_s)
        return self.spent(before, span_s)

    async def ordinary(self) -> dict[str, float]:
        """Return the cost of a run that asks nobody."""
        before, began = self.cpu(), time.perf_counter()
        for _ in range(_SAMPLE):
            run = await self.submit("plain", "?wait=30")
            if run["status"] != "completed":
                raise SystemExit(f"the run did not complete: {run}")
        took = (time.perf_counter() - began) * 1000 / _SAMPLE
        return {"ms": took, **self.spent(before, _SAMPLE)}

    async def begin(self, count: int) -> None:
        """Start so many runs that ask, and wait until all of them wait."""
        before = (await self.held())["waiting"]
        for done in range(0, count, 500):
            more = min(500, count - done)
            await spread(self.submit, [self.reason] * more)
            waiting = 0.0
            while waiting < before + done + more:
                waiting = (await self.held())["waiting"]

    async def pending(self, count: int) -> dict[str, str]:
        """Return ids of the newest interrupts that are pending, with their runs."""
        rows = await self.owner.fetch(
            "SELECT id::text, run_id::text FROM interrupts WHERE status = 'pending' "
            "ORDER BY created_at DESC LIMIT $1",
            count,
        )
        return {row["id"]: row["run_id"] for row in rows}

    async def resolve(self, interrupt_id: str) -> None:
        path = f"/v1/interrupts/{interrupt_id}/resolve"
        (await self.client.post(path, json={"decision": "approve"})).raise_for_status()

    async def wake(self, count: int) -> dict[str, float]:
        """Approve so many calls at once; return the time until all their runs are over."""
        chosen = await self.pending(count)
        before, began = self.cpu(), time.perf_counter()
        await spread(self.resolve, list(chosen))
        decided = time.perf_counter() - began
        over = 0
        while over < count:
            over = await self.owner.fetchval(_OVER, list(chosen.values()))
            await asyncio.sleep(0.002 if count == 1 else 0.05)
        took = (time.perf_counter() - began) * 1000
        return {"decided ms": decided * 1000, "ms": took, **self.spent(before, count)}

    async def listed(self) -> dict[str, float]:
        """Return the cost of the first page of what is pending."""
        before, began = self.cpu(), time.perf_counter()
        for _ in range(_SAMPLE):
            (await self.client.get("/v1/interrupts?status=pending")).raise_for_status()
        took = (time.perf_counter() - began) * 1000 / _SAMPLE
        return {"ms": took, **self.spent(before, _SAMPLE)}


async def spread(work: Callable[[str], Awaitable[object]], items: Sequence[str]) -> None:
    """Call ``work`` with each item, :data:`_AT_ONCE` at a time."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(item: str) -> None:
        async with slots:
            await work(item)

    await asyncio.gather(*map(one, items))


def tell(title: str, found: dict[str, float]) -> None:
    values = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
    print(f"  {title:20} {values}", flush=True)


async def measure(bench: Bench, waiting: int, wake: int, span_s: float) -> None:
    for path, definitions in (("/v1/agents", _AGENTS), ("/v1/graphs", _GRAPHS)):
        for each in definitions:
            (await bench.client.post(path, json=each)).raise_for_status()
    for _ in range(2):  # to warm up
        await bench.ordinary()
    await bench.begin(20)
    if bench.reason == "person":
        await bench.wake(20)
    for count in (0, waiting):
        await bench.begin(count)
        print(f"{count} more runs wait, each for: {bench.reason}", flush=True)
        tell("held", await bench.held())
        tell("nothing, each second", await bench.idle(span_s))
        tell("ordinary run", await bench.ordinary())
        tell("page of pending", await bench.listed())
    if bench.reason != "person":
        return
    tell("approve 1", await bench.wake(1))
    tell(f"approve {wake}, each", await bench.wake(wake))
    tell("held", await bench.held())


async def served(
    url: str, postmaster: int, reason: str, waiting: int, wake: int, span_s: float
) -> None:
    """Measure a service on this database."""
    owner = await asyncpg.connect(url)
    async with fast_model() as model:
        environment = {
            "DATABASE_URL": url,
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": model.base_url,
        }
        async with (
            process("worker", ready="is ready", **environment) as (worker, _),
            process(
                *("serve", "--no-worker", "--port", "0"), ready="listens on", **environment
            ) as (api, line),
        ):
            base_url = "http://127.0.0.1:" + line.split("http://127.0.0.1:")[1].split()[0]
            async with httpx2.AsyncClient(base_url=base_url, timeout=60) as client:
                bench = Bench(reason, client, owner, (api.pid, worker.pid, postmaster))
                await measure(bench, waiting, wake, span_s)
    await owner.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--reason", choices=("person", "client", "time", "children"), default="person"
    )
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--wake", type=int, default=1000)
    parser.add_argument("--span", type=float, default=10)
    options = parser.parse_args()
    with temporary_database() as (url, postmaster):
        asyncio.run(
            served(
                *(url, postmaster, options.reason),
                *(options.waiting, options.wake, options.span),
            )
        )


if __name__ == "__main__":
    main()
