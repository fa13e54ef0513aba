"""Drawings of large graphs: their cost for other requests."""

import asyncio
import os
import sys
from typing import Any

import httpx2

from bottega.api.shared.processes import output_of
from tests.api.test_bad_input import problem


def graph(nodes: int, edges: int) -> dict[str, Any]:
    """Return a graph with so many nodes, each connected to a few of the next ones."""
    names = [f"agent-{number}" for number in range(nodes)]
    pairs = [
        (a, a + step) for step in range(1, nodes) for a in range(0, nodes - step, 1 + step % 3)
    ]
    return {
        "nodes": [{"agent": name, "ttl_s": None} for name in names],
        "edges": [
            {"source": names[a], "target": names[b], "policy": "final_response_only"}
            for a, b in pairs[:edges]
        ],
        "ttl_s": None,
    }


async def test_other_requests_are_answered_during_a_large_drawing(
    client: httpx2.AsyncClient,
) -> None:
    await client.post("/v1/graphs", json={"name": "large", **graph(500, 5000)})
    await client.post("/v1/graphs", json={"name": "small", **graph(3, 2)})
    asked = [asyncio.ensure_future(client.get("/v1/graphs/large/drawing")) for _ in range(2)]
    served = 0
    while not any(task.done() for task in asked):
        assert (await client.get("/v1/graphs/small/order")).status_code == 200
        served += 1
        await asyncio.wait(asked, timeout=0.02)  # more at once would be refused
    assert served > 1
    for task in asked:
        assert (await task).text.count("data-node") == 500


async def test_concurrent_drawings_of_a_tenant_are_bounded(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/graphs", json={"name": "large", **graph(500, 5000)})
    requests = [client.get("/v1/graphs/large/drawing") for _ in range(6)]
    answers = await asyncio.gather(*requests)
    refused = [problem(answer, 429)["code"] for answer in answers if answer.status_code != 200]
    assert set(refused) == {"drawings"}
    assert len(refused) < 5


async def test_edges_cannot_exceed_the_bound_on_nodes(
    client: httpx2.AsyncClient,
) -> None:
    edges = [{"source": f"a{n}", "target": f"b{n}"} for n in range(251)]
    refused = await client.post("/v1/graphs", json={"name": "g", "edges": edges})
    assert problem(refused, 422)["errors"][0]["pointer"] == "/edges"
    made = await client.post("/v1/graphs", json={"name": "g", "edges": edges[:250]})
    assert made.status_code == 201
    assert (await client.post("/v1/graphs/g/edges", json=edges[250])).status_code == 422


async def test_a_program_has_low_priority_when_it_begins_its_work() -> None:
    program = "import os, sys; sys.stdin.read(); print(os.nice(0))"
    told = await output_of(([sys.executable, "-c", program], dict(os.environ)), b"")
    assert int(told) == min(os.nice(0) + 10, 19)
