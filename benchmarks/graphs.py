"""Cost of nodes that are decided without a model, and of elements.

python -m benchmarks.graphs [--nodes 200] [--elements 1000]

API, worker and database are processes of their own. A run of a chain of calculators with a
condition on each edge, and one whose first condition does not hold, so that all others are skipped;
told is the time from POST to the run's end, divided by the number of nodes.

Then a calculator for each element of a list, in the run itself and as child runs, against runs of
one calculator, 20 at a time; told is the time of each element and run, and the ratio of these.
"""

import argparse
import asyncio
import time
from typing import Any

import httpx2

from benchmarks.harness import process, temporary_database

_TURNS = 5
_AT_ONCE = 20


def chain(nodes: int, least: int) -> dict[str, Any]:
    """Return a chain of calculators; each starts if the one before said more than ``least``."""
    tool = {"type": "builtin", "name": "calculator"}
    when = {"feature": "output_json", "op": "gt", "value": least}
    return {
        "nodes": [
            {"name": f"n{n}", "type": "tool", "tool": tool, "arguments": {"expression": "1 + 1"}}
            for n in range(nodes)
        ],
        "edges": [
            {"source": f"n{n}", "target": f"n{n + 1}", "when": when} for n in range(nodes - 1)
        ],
    }


async def measure(client: httpx2.AsyncClient, nodes: int) -> None:
    for name, least in (("called", 0), ("skipped", 5)):
        stored = await client.put(f"/v1/graphs/{name}", json=chain(nodes, least))
        stored.raise_for_status()
        body = {"mode": "dag", "graph": name, "input": "x", "memory": "off"}
        took = []
        for _ in range(_TURNS):
            began = time.perf_counter()
            answer = await client.post("/v1/runs?wait=60", json=body)
            took.append((time.perf_counter() - began) * 1000 / nodes)
            assert answer.json()["status"] == "completed", answer.text
        print(f"{name:8} {sorted(took)[_TURNS // 2]:.2f} ms a node", flush=True)


def calculator(expression: Any, **more: Any) -> dict[str, Any]:
    """Return a graph of one calculator."""
    tool = {"type": "builtin", "name": "calculator"}
    node = {"name": "n", "type": "tool", "tool": tool, "arguments": {"expression": expression}}
    return {"nodes": [{**node, **more}]}


async def measure_elements(client: httpx2.AsyncClient, elements: int) -> None:
    each = {"from": "run", "pointer": "/metadata/list"}
    item = {"from": "item"}
    graphs = {
        "single": calculator("1+1"),
        "element": calculator(item, for_each={**each, "spread_above": 1000}),
        "child": calculator(item, for_each={**each, "spread_above": 0}),
    }
    for name, graph in graphs.items():
        (await client.put(f"/v1/graphs/{name}", json=graph)).raise_for_status()
    places = asyncio.Semaphore(_AT_ONCE)

    async def run(graph: str, items: int = 0) -> None:
        body = {"mode": "dag", "graph": graph, "input": "x", "memory": "off"}
        async with places:
            answer = await client.post(
                "/v1/runs?wait=60", json=body | {"metadata": {"list": ["1+1"] * items}}
            )
        assert answer.json()["status"] == "completed", answer.text

    async def measured(name: str) -> float:
        began = time.perf_counter()
        if name == "single":
            await asyncio.gather(*(run(name) for _ in range(elements)))
        else:
            await run(name, elements)
        return (time.perf_counter() - began) * 1000 / elements

    took: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_TURNS):  # in turns: the machine's state changes
        for name in graphs:
            took[name].append(await measured(name))
    single = sorted(took["single"])[_TURNS // 2]
    for name, times in took.items():
        median = sorted(times)[_TURNS // 2]
        print(f"{name:8} {median:.2f} ms, {median / single:.2f} x a single run", flush=True)


async def served(url: str, nodes: int, elements: int) -> None:
    """Measure a service on this database."""
    environment = {"DATABASE_URL": url, "OPENAI_API_KEY": "none"}
    async with (
        process("worker", ready="is ready", **environment),
        process("serve", "--no-worker", "--port", "0", ready="listens on", **environment) as found,
    ):
        base_url = "http://127.0.0.1:" + found[1].split("http://127.0.0.1:")[1].split()[0]
        async with httpx2.AsyncClient(
            base_url=base_url, timeout=90, limits=httpx2.Limits(max_connections=50)
        ) as client:
            await measure(client, nodes)
            await measure_elements(client, elements)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--elements", type=int, default=1000)
    options = parser.parse_args()
    with temporary_database() as (url, _):
        asyncio.run(served(url, options.nodes, options.elements))


if __name__ == "__main__":
    main()
