"""Wall time and cost of a large fan-out, in one worker and over several.

python -m benchmarks.child_runs [--children 1000] [--seconds 1] [--workers 1 2 4]

A coordinator dispatches its children in one step, and awaits them all. Each child is one model call
that takes a second and no CPU. First all children are tasks of one worker; then they are child
runs, which any worker takes. API, workers and database are processes of their own. Compare only
figures of the same invocation.
"""

import argparse
import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx2
from pydantic_core import from_json

from benchmarks.harness import cpu_s, process, temporary_database
from benchmarks.model import ModelConnection, encoded
from bottega.llm.demo_model.rules import Answer, DemoCall

_BATCH = 50
"""Tasks that one call of a tool may name."""
_RAISED = {
    f"BOTTEGA_SUBAGENT_{name}": str(value)
    for name, value in {
        "MAX_CONCURRENT": 10_000,
        "MAX_QUEUED": 10_000,
        "MAX_QUEUE_SIZE": 10_000,
        "MIN_WORKERS": 10_000,
        "MAX_WORKERS": 10_000,
        "MAX_TOTAL_TOKENS": 10**9,
        "SPREAD_ABOVE": 10_000,
    }.items()
}


class _Model(ModelConnection):
    """The model of the coordinator and of its children."""

    children: ClassVar[int] = 0
    seconds: ClassVar[float] = 0

    def latency_of(self, body: bytes) -> float:
        return 0 if b"You dispatch." in body else self.seconds

    def parts(self, body: bytes) -> Sequence[bytes]:
        request = from_json(body)
        answer = self._coordinate(request) if b"You dispatch." in body else Answer("done")
        return encoded(answer, request)

    def _coordinate(self, request: dict[str, Any]) -> Answer:
        results = [from_json(m["content"]) for m in request["messages"] if m["role"] == "tool"]
        if not results:
            tasks = [{"prompt": f"child {n}"} for n in range(self.children)]
            return Answer("", _calls("dispatch_subagents", "tasks", tasks))
        if len(results) == len(range(0, self.children, _BATCH)):
            ids = [task["task_id"] for result in results for task in result["tasks"]]
            return Answer("", _calls("await_subagent", "task_ids", ids))
        ends = [task for result in results for task in result["tasks"] if "status" in task]
        return Answer(str(sum(task["status"] == "completed" for task in ends)))


def _calls(name: str, argument: str, items: Sequence[Any]) -> tuple[DemoCall, ...]:
    parts = (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
    return tuple(DemoCall(name, {argument: list(part)}) for part in parts)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one fan-out, and CPU milliseconds per child."""

    wall_s: float
    workers: float
    database: float
    api: float


async def measured(
    url: str, postmaster: int, model: str, *, workers: int, spread: bool, children: int
) -> Cost:
    """Measure one fan-out."""
    environment = {"DATABASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": model}
    async with contextlib.AsyncExitStack() as stack:
        opened = process("serve", "--no-worker", "--port", "0", ready="listens on", **environment)
        api, line = await stack.enter_async_context(opened)
        pids = []
        for _ in range(workers):
            opened = process("worker", ready="is ready", **environment, **_RAISED)
            worker, _line = await stack.enter_async_context(opened)
            pids.append(worker.pid)
        base = re.findall(r"http://[\d.]+:\d+", line)[0]
        client = await stack.enter_async_context(httpx2.AsyncClient(base_url=base, timeout=600))
        name = "spreads" if spread else "keeps"
        limits = {"spread_above": 0} if spread else {}
        body = {
            "name": name,
            "system_message": "You dispatch.",
            "subagents": {"mode": "async", "names": [], "limits": limits},
        }
        if (await client.get(f"/v1/agents/{name}")).status_code == httpx2.codes.NOT_FOUND:
            (await client.post("/v1/agents", json=body)).raise_for_status()

        def spent() -> list[float]:
            return [sum(map(cpu_s, pids)), cpu_s(postmaster), cpu_s(api.pid)]

        before, began = spent(), time.perf_counter()
        run = {"agent": name, "input": "Go.", "memory": "off", "timeout_s": 600}
        answer = await client.post("/v1/runs?wait=60", json=run)
        answer.raise_for_status()
        done = answer.json()
        while done["ended_at"] is None:
            await asyncio.sleep(0.2)
            done = (await client.get(f"/v1/runs/{done['id']}")).json()
        wall_s = time.perf_counter() - began
        assert done["output"] == str(children), done
        costs = [(b - a) * 1000 / children for a, b in zip(before, spent(), strict=True)]
    return Cost(wall_s, *costs)


async def main(
    url: str, postmaster: int, children: int, seconds: float, workers: Sequence[int]
) -> None:
    _Model.children, _Model.seconds = children, seconds
    server = await asyncio.get_running_loop().create_server(_Model, "127.0.0.1", 0)
    model = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    print(f"{children} children of {seconds:g} s; CPU in milliseconds per child")
    print(f"{'':28}{'wall s':>8}{'workers':>9}{'database':>10}{'API':>7}")
    cases = itertools.chain([(1, False)], ((count, True) for count in workers))
    for count, spread in cases:
        cost = await measured(
            url, postmaster, model, workers=count, spread=spread, children=children
        )
        title = f"child runs, {count} worker(s)" if spread else "tasks of one worker"
        print(
            f"{title:28}{cost.wall_s:8.1f}{cost.workers:9.2f}{cost.database:10.2f}{cost.api:7.2f}"
        )
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--children", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    with temporary_database() as found:
        asyncio.run(main(*found, options.children, options.seconds, options.workers))
