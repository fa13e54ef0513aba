"""Drawings of large graphs: their cost for other requests, and the cache."""

import asyncio
import os
import sys
from typing import Any
from uuid import UUID

import httpx2

from bottega.api.routes.graphs import Drawings
from bottega.api.shared.processes import output_of
from bottega.errors import LimitedError
from tests.api.test_bad_input import problem

MINE, THEIRS = UUID(int=1), UUID(int=2)
Wanted = tuple[UUID, dict[str, Any], dict[str, int], str]


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


async def test_a_large_drawing_is_made_in_another_process(
    client: httpx2.AsyncClient,
) -> None:
    """Check that other requests are answered meanwhile, and that concurrent ones share it."""
    await client.post("/v1/graphs", json={"name": "large", **graph(500, 1500)})
    await client.post("/v1/graphs", json={"name": "small", **graph(3, 2)})
    before = os.times()
    asked = [asyncio.ensure_future(client.get("/v1/graphs/large/drawing")) for _ in range(4)]
    served = 0
    while not any(task.done() for task in asked):
        assert (await client.get("/v1/graphs/small/order")).status_code == 200
        served += 1
        await asyncio.wait(asked, timeout=0.02)  # more at once would be refused
    drawings = {(await task).text for task in asked}
    spent = os.times()
    assert served > 1
    (picture,) = drawings
    assert picture.count("data-node") == 500
    assert spent.children_user > before.children_user
    assert (await client.get("/v1/graphs/large/drawing")).text == picture
    assert os.times().children_user == spent.children_user


async def test_concurrent_requests_get_the_same_drawing() -> None:
    drawings = Drawings()
    wanted: Wanted = (MINE, graph(150, 200), {"agent-0": 3}, "svg")
    first, *others = await asyncio.gather(*(drawings.get(*wanted) for _ in range(5)))
    assert all(other is first for other in [*others, await drawings.get(*wanted)])
    assert first.count(b'class="version"') == 1
    published = await drawings.get(MINE, graph(150, 200), {"agent-0": 4}, "svg")
    assert published != first
    assert await drawings.get(THEIRS, *wanted[1:]) is not first


async def test_the_cache_is_bounded_in_bytes() -> None:
    drawings = Drawings(most_bytes=10_000)
    small: Wanted = (MINE, graph(2, 1), {}, "svg")
    first = await drawings.get(*small)
    assert await drawings.get(*small) is first
    for count in range(4, 10):  # each about 3 KB
        await drawings.get(MINE, graph(count, 1), {}, "svg")
    assert await drawings.get(*small) is not first
    too_large: Wanted = (MINE, graph(90, 5), {}, "svg")
    assert await drawings.get(*too_large) is not await drawings.get(*too_large)


async def test_a_client_that_disconnects_cancels_no_shared_drawing() -> None:
    drawings = Drawings()
    wanted: Wanted = (MINE, graph(150, 200), {}, "svg")
    leaving, staying = (asyncio.ensure_future(drawings.get(*wanted)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).startswith(b"<svg")


async def test_edges_cannot_exceed_the_bound_on_nodes(
    client: httpx2.AsyncClient,
) -> None:
    edges = [{"source": f"a{n}", "target": f"b{n}"} for n in range(251)]
    refused = await client.post("/v1/graphs", json={"name": "g", "edges": edges})
    assert problem(refused, 422)["errors"][0]["pointer"] == "/edges"
    made = await client.post("/v1/graphs", json={"name": "g", "edges": edges[:250]})
    assert made.status_code == 201
    assert (await client.post("/v1/graphs/g/edges", json=edges[250])).status_code == 422


async def test_concurrent_drawings_of_a_tenant_are_bounded() -> None:
    drawings = Drawings()
    wanted: list[Wanted] = [(MINE, graph(count, 1), {}, "svg") for count in range(2, 12)]
    answers = await asyncio.gather(
        *(drawings.get(*each) for each in wanted),
        drawings.get(THEIRS, *wanted[0][1:]),
        return_exceptions=True,
    )
    refused = [place for place, each in enumerate(answers) if isinstance(each, LimitedError)]
    assert refused == [8, 9]


async def test_a_program_has_low_priority_when_it_begins_its_work() -> None:
    program = "import os, sys; sys.stdin.read(); print(os.nice(0))"
    told = await output_of(([sys.executable, "-c", program], dict(os.environ)), b"")
    assert int(told) == min(os.nice(0) + 10, 19)
