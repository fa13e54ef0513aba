"""Time to accept and to drain a batch, beside single runs, and what chats notice of both.

    python -m benchmarks.batches [--items 10000] [--rounds 2] [--workers 2] [--latency-ms 0]

Each item is one model call. Batches and single runs of the priority of items take turns, and are
measured in two ways. *In all*: the workers wait, and the clock goes from the first request to the
last end; 32 clients post single runs. *Backlog*: all was accepted before the workers start, and the
clock goes from the first start of a run to the last end; single runs are stored by then, while
items become runs as they are queued. Starts and ends are those of the database. The batch and the
single runs have as many runs in progress.

Then chats are started one by one: alone; beside a batch, of its tenant and of another one; and
beside as many single runs. The batch has its default number of concurrent items then, which is half
of the tenant's. The workers have free places for chats and items at any time. API,
workers and database are processes of their own. Compare only figures of the same invocation.
"""

import argparse
import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import asyncpg
import httpx2
from pydantic_core import from_json, to_json

from benchmarks.harness import key_of, percentile, process, temporary_database
from benchmarks.model import ModelConnection, encoded
from bottega.llm.demo_model.rules import Answer

_CLIENTS = 32
_CHATS = 400
_PRIORITY = 8
_AT_ONCE = 100
"""Number of concurrent runs of a tenant; by default a batch takes half of them."""
_SETTINGS = {
    "OPENAI_API_KEY": "none",
    "BOTTEGA_MEMORY": "off",
    "BOTTEGA_QUEUED_RUNS": "100000",
    "BOTTEGA_REQUESTS_PER_S": "100000",
    "BOTTEGA_WORKER_CONCURRENCY": "100",
    "BOTTEGA_CONCURRENT_RUNS": str(_AT_ONCE),
}
_LEFT = "SELECT count(*) FROM runs WHERE ended_at IS NULL"
_SECONDS = "SELECT extract(epoch FROM {})::double precision FROM runs"
_FIRST_START = "min(started_at) FILTER (WHERE started_at > to_timestamp($1))"
_BEGAN = "SELECT started_at IS NOT NULL FROM runs WHERE id = $1"
_STARTED = """
SELECT extract(epoch FROM started_at - created_at)::double precision * 1000
FROM runs WHERE id = ANY ($1)
"""


class _Model(ModelConnection):
    """The model of all items. Its answers take between half and one and a half of the mean."""

    seconds: ClassVar[float] = 0

    def latency_of(self, body: bytes) -> float:
        return self.seconds * random.uniform(0.5, 1.5)

    def parts(self, body: bytes) -> Sequence[bytes]:
        return encoded(Answer("done"), from_json(body))


@dataclass(frozen=True, slots=True)
class Bench:
    """An API process, and workers that start when they are asked for.

    Attributes:
        mine, other: clients of two tenants.
        owner: connection to the database.
    """

    settings: dict[str, str]
    workers: int
    mine: httpx2.AsyncClient
    other: httpx2.AsyncClient
    owner: asyncpg.Connection

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        opened = (process("worker", ready="is ready", **self.settings) for _ in range(self.workers))
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.gather(*map(stack.enter_async_context, opened))
            yield

    async def accept_batch(self, count: int, concurrency: int) -> None:
        lines = b"\n".join(to_json({"input": f"item {n}"}) for n in range(count))
        path = f"/v1/batches?agent=clerk&priority={_PRIORITY}&concurrency={concurrency}"
        headers = {"content-type": "application/x-ndjson"}
        (await self.mine.post(path, content=lines, headers=headers)).raise_for_status()

    async def accept_runs(self, count: int) -> None:
        numbers = iter(range(count))

        async def start() -> None:
            for number in numbers:
                body = {"agent": "clerk", "input": f"item {number}", "priority": _PRIORITY}
                (await self.mine.post("/v1/runs", json=body)).raise_for_status()

        await asyncio.gather(*[start() for _ in range(_CLIENTS)])

    async def over(self) -> float:
        """Wait until all runs are over; return the time of the last end."""
        while await self.owner.fetchval(_LEFT):
            await self.owner.execute("SELECT pg_sleep(1)")
        found: float = await self.owner.fetchval(_SECONDS.format("max(ended_at)"))
        return found

    async def in_all(self, kind: str, count: int) -> float:
        """Return how many a second were accepted and executed."""
        async with self.working():
            began = time.time()
            await self.accept(kind, count)
            return count / (await self.over() - began)

    async def backlog(self, kind: str, count: int) -> tuple[float, float]:
        """Return the seconds until all were accepted, and how many a second were executed then."""
        began = time.time()
        await self.accept(kind, count)
        accepted_s = time.time() - began
        async with self.working():
            last = await self.over()
        first: float = await self.owner.fetchval(_SECONDS.format(_FIRST_START), began)
        return accepted_s, count / (last - first)

    async def accept(self, kind: str, count: int, concurrency: int = _AT_ONCE) -> None:
        items = kind == "items"
        await (self.accept_batch(count, concurrency) if items else self.accept_runs(count))

    async def chats(self, client: httpx2.AsyncClient, is_over: str = "SELECT false") -> list[float]:
        """Start chats one by one; return the milliseconds until a worker had each."""
        ids: list[str] = []
        while len(ids) < _CHATS and not await self.owner.fetchval(is_over):
            body = {"agent": "clerk", "input": "hello"}
            ids.append((await client.post("/v1/runs", json=body)).json()["id"])
            has_begun = False
            while not has_begun:
                await asyncio.sleep(0.02)
                has_begun = await self.owner.fetchval(_BEGAN, ids[-1])
        return [row[0] for row in await self.owner.fetch(_STARTED, ids)]

    async def chats_beside(self, client: httpx2.AsyncClient, kind: str, count: int) -> list[float]:
        await self.accept(kind, count, concurrency=_AT_ONCE // 2)
        found = await self.chats(client, f"SELECT ({_LEFT}) = 0")
        await self.over()
        return found


async def measure(bench: Bench, items: int, rounds: int) -> None:
    for client in (bench.mine, bench.other):
        body = {"name": "clerk", "system_message": "You answer."}
        (await client.post("/v1/agents", json=body)).raise_for_status()
    for number in range(rounds):
        whole = {kind: await bench.in_all(kind, items) for kind in ("runs", "items")}
        tell(f"in all, round {number + 1}", whole)
        accepted = {kind: await bench.backlog(kind, items) for kind in ("items", "runs")}
        tell(f"backlog, round {number + 1}", {kind: each[1] for kind, each in accepted.items()})
        print(f"  {items} items accepted in {accepted['items'][0]:.1f} s", flush=True)
    async with bench.working():
        await bench.chats(bench.mine)
        show("alone", await bench.chats(bench.mine))
        show("beside a batch", await bench.chats_beside(bench.mine, "items", items))
        show("beside single runs", await bench.chats_beside(bench.mine, "runs", items))
        show("another tenant's, alone", await bench.chats(bench.other))
        show("… beside a batch", await bench.chats_beside(bench.other, "items", items))


def tell(what: str, rates: dict[str, float]) -> None:
    ratio = rates["items"] / rates["runs"]
    text = f"single runs/s {rates['runs']:.0f}, items/s {rates['items']:.0f} ({ratio:.2f} x)"
    print(f"{what}: {text}", flush=True)


def show(what: str, times: list[float]) -> None:
    p50, p90, p99 = (percentile(times, share) for share in (0.5, 0.9, 0.99))
    spread = f"p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}"
    print(f"chat begins, {what}: ms {spread} ({len(times)} chats)", flush=True)


async def main(url: str, items: int, rounds: int, workers: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Model, "127.0.0.1", 0)
    model = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    settings = {**_SETTINGS, "DATABASE_URL": url, "OPENAI_BASE_URL": model}
    keys = [key_of(url, tenant) for tenant in ("default", "other")]
    opened = process("serve", "--no-worker", "--port", "0", ready="listens on", **settings)
    owner = await asyncpg.connect(url)
    async with opened as (_, line), contextlib.AsyncExitStack() as stack:
        base = re.findall(r"http://[\d.]+:\d+", line)[0]
        mine, other = [
            await stack.enter_async_context(
                httpx2.AsyncClient(
                    base_url=base, timeout=600, headers={"authorization": f"Bearer {key}"}
                )
            )
            for key in keys
        ]
        await measure(Bench(settings, workers, mine, other, owner), items, rounds)
    await owner.close()
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--latency-ms", type=float, default=0, help="mean; evenly spread, +/- 50 %")
    options = parser.parse_args()
    _Model.seconds = options.latency_ms / 1000
    with temporary_database() as (url, _):
        asyncio.run(main(url, options.items, options.rounds, options.workers))
