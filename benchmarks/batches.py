"""Time to accept and to drain a batch, beside single runs, and what a chat notices of it.

python -m benchmarks.batches [--items 10000] [--workers 2]

Each item is one model call that answers at once. First as many single runs are queued, and then
drained by workers that start; then one batch is. While another batch is drained, chats of the same
tenant are started one by one. API, workers and database are processes of their own. Compare only
figures of the same invocation.
"""

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx2
from pydantic_core import from_json, to_json

from benchmarks.harness import process, temporary_database
from benchmarks.model import ModelConnection, encoded
from bottega.llm.demo_model.rules import Answer

_CLIENTS = 32
_CHATS = 100
_SETTINGS = {
    "OPENAI_API_KEY": "none",
    "BOTTEGA_MEMORY": "off",
    "BOTTEGA_QUEUED_RUNS": "100000",
    "BOTTEGA_REQUESTS_PER_S": "100000",
}


class _Model(ModelConnection):
    """The model of all items."""

    def parts(self, body: bytes) -> Sequence[bytes]:
        return encoded(Answer("done"), from_json(body))


class Service:
    """An API process, and workers that start when they are asked for."""

    def __init__(self, settings: dict[str, str], client: httpx2.AsyncClient, workers: int) -> None:
        self._settings, self.client, self._workers = settings, client, workers

    @contextlib.asynccontextmanager
    async def working(self) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(self._workers):
                opened = process("worker", ready="is ready", **self._settings)
                await stack.enter_async_context(opened)
            yield

    async def accept_batch(self, items: int) -> tuple[str, float]:
        """Start a batch; return its id, and the seconds until it was accepted."""
        lines = b"\n".join(to_json({"input": f"item {n}"}) for n in range(items))
        began = time.perf_counter()
        answer = await self.client.post(
            "/v1/batches?agent=clerk&concurrency=50",
            content=lines,
            headers={"content-type": "application/x-ndjson"},
        )
        answer.raise_for_status()
        return str(answer.json()["id"]), time.perf_counter() - began

    async def batch_over(self, batch_id: str) -> dict[str, Any]:
        while True:
            batch: dict[str, Any] = (await self.client.get(f"/v1/batches/{batch_id}")).json()
            if batch["ended_at"] is not None:
                return batch
            await asyncio.sleep(0.2)

    async def accept_runs(self, count: int) -> None:
        numbers = iter(range(count))

        async def start() -> None:
            for number in numbers:
                body = {"agent": "clerk", "input": f"item {number}"}
                (await self.client.post("/v1/runs", json=body)).raise_for_status()

        await asyncio.gather(*[start() for _ in range(_CLIENTS)])

    async def runs_over(self) -> None:
        for status in ("queued", "running"):
            left = True
            while left:
                page = await self.client.get(f"/v1/runs?status={status}&limit=1")
                if left := bool(page.json()["items"]):
                    await asyncio.sleep(0.2)

    async def chat_starts(self, until_over: str | None = None) -> list[float]:
        """Start chats one by one; return the milliseconds until each began."""
        found = []
        for _ in range(_CHATS):
            body = {"agent": "clerk", "input": "hello"}
            run = (await self.client.post("/v1/runs?wait=30", json=body)).json()
            began, made = (datetime.fromisoformat(run[n]) for n in ("started_at", "created_at"))
            found.append((began - made).total_seconds() * 1000)
            if (
                until_over
                and (await self.client.get(f"/v1/batches/{until_over}")).json()["ended_at"]
            ):
                break
        return sorted(found)


def p99(values: Sequence[float]) -> float:
    return values[min(len(values) - 1, int(len(values) * 0.99))]


async def measure(service: Service, items: int) -> None:
    body = {"name": "clerk", "system_message": "You answer."}
    (await service.client.post("/v1/agents", json=body)).raise_for_status()
    await service.accept_runs(items)
    began = time.perf_counter()
    async with service.working():
        await service.runs_over()
    singles = items / (time.perf_counter() - began)
    batch_id, accepted_s = await service.accept_batch(items)
    began = time.perf_counter()
    async with service.working():
        batch = await service.batch_over(batch_id)
        drained = items / (time.perf_counter() - began)
        assert batch["counts"]["completed"] == items, batch
        alone = await service.chat_starts()
        batch_id, _ = await service.accept_batch(items)
        beside = await service.chat_starts(batch_id)
    print(f"{items} items accepted in {accepted_s:.1f} s")
    print(f"single runs/s {singles:.0f}, items/s {drained:.0f} ({drained / singles:.2f} x)")
    print(
        f"a chat begins after ms, p99: alone {p99(alone):.1f}, beside a batch {p99(beside):.1f}"
        f" ({len(beside)} chats)"
    )


async def main(url: str, items: int, workers: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Model, "127.0.0.1", 0)
    model = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    settings = {**_SETTINGS, "DATABASE_URL": url, "OPENAI_BASE_URL": model}
    opened = process("serve", "--no-worker", "--port", "0", ready="listens on", **settings)
    async with opened as (_, line):
        base = re.findall(r"http://[\d.]+:\d+", line)[0]
        async with httpx2.AsyncClient(base_url=base, timeout=600) as client:
            await measure(Service(settings, client, workers), items)
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with temporary_database() as (url, _):
        asyncio.run(main(url, options.items, options.workers))
