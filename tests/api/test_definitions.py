"""Agents and graphs over HTTP."""

import asyncio
from typing import Any

import httpx2
import pytest

from tests.service import Running


def agent(name: str, *children: str, **fields: Any) -> dict[str, Any]:
    body = {"name": name, "system_message": f"You are {name}.", "description": name, **fields}
    if children:
        body["subagents"] = {"names": list(children)}
    return body


async def create(client: httpx2.AsyncClient, *bodies: dict[str, Any]) -> None:
    for body in bodies:
        answer = await client.post("/v1/agents", json=body)
        assert answer.status_code == 201, answer.text


async def test_an_agent_is_created_read_replaced_and_deleted(client: httpx2.AsyncClient) -> None:
    created = await client.post("/v1/agents", json=agent("designer", metadata={"team": "a"}))
    assert created.status_code == 201
    assert created.headers["location"] == "/v1/agents/designer"
    assert created.headers["etag"] == '"1"'
    assert created.json()["metadata"] == {"team": "a"}

    read = await client.get("/v1/agents/designer")
    assert read.json() == created.json()

    replaced = await client.put(
        "/v1/agents/designer", json={"system_message": "new"}, headers={"If-Match": '"1"'}
    )
    assert replaced.status_code == 200
    assert replaced.headers["etag"] == '"2"'

    versions = (await client.get("/v1/agents/designer/versions")).json()["items"]
    assert [item["version"] for item in versions] == [1, 2]
    first = await client.get("/v1/agents/designer/versions/1")
    assert first.json() == created.json()

    assert (await client.delete("/v1/agents/designer")).status_code == 204
    assert (await client.get("/v1/agents/designer")).status_code == 404
    assert (await client.delete("/v1/agents/designer")).status_code == 404
    assert (await client.get("/v1/agents/designer/versions")).status_code == 404


async def test_a_name_created_again_continues_its_version_numbers(
    client: httpx2.AsyncClient,
) -> None:
    await create(client, agent("a"))
    await client.delete("/v1/agents/a")
    again = await client.post("/v1/agents", json=agent("a"))
    assert again.status_code == 201
    assert again.json()["version"] == 2


async def test_a_second_post_is_refused_and_changes_nothing(client: httpx2.AsyncClient) -> None:
    await create(client, agent("a"))
    second = await client.post("/v1/agents", json=agent("a", description="other"))
    assert second.status_code == 409
    assert second.json()["code"] == "exists"
    assert (await client.get("/v1/agents/a")).json()["description"] == "a"


async def test_put_stores_a_new_name_or_a_new_version(client: httpx2.AsyncClient) -> None:
    body = {"system_message": "x"}
    for status, version in ((201, 1), (200, 2)):
        answer = await client.put("/v1/agents/a", json=body)
        assert (answer.status_code, answer.json()["version"]) == (status, version)
        assert answer.headers["etag"] == f'"{version}"'
        assert answer.headers.get("location") == ("/v1/agents/a" if status == 201 else None)
    await client.delete("/v1/agents/a")
    again = await client.put("/v1/agents/a", json=body)
    assert (again.status_code, again.json()["version"]) == (201, 3)


async def test_put_can_ask_for_a_new_name_or_an_old_one(client: httpx2.AsyncClient) -> None:
    body = {"system_message": "x"}
    for present in ('"1"', "*"):
        missing = await client.put("/v1/agents/a", json=body, headers={"If-Match": present})
        assert missing.status_code == 404
    only_new = {"If-None-Match": "*"}
    assert (await client.put("/v1/agents/a", json=body, headers=only_new)).status_code == 201
    for headers in (only_new, {"If-None-Match": '"7"'}):
        refused = await client.put("/v1/agents/a", json=body, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (412, "version_conflict")
        assert "If-None-Match" in refused.json()["detail"]
    assert (await client.get("/v1/agents/a")).json()["version"] == 1


async def test_puts_at_once_make_a_version_each(client: httpx2.AsyncClient) -> None:
    puts = [client.put("/v1/agents/a", json={"system_message": "x"}) for _ in range(10)]
    answers = await asyncio.gather(*puts)
    assert sorted(answer.json()["version"] for answer in answers) == [*range(1, 11)]
    assert [answer.status_code for answer in answers].count(201) == 1


async def test_a_stale_if_match_is_refused(client: httpx2.AsyncClient) -> None:
    await create(client, agent("a"))
    for tag in ('"7"', "nonsense", '"0"'):
        stale = {"If-Match": tag}
        answer = await client.put("/v1/agents/a", json={"system_message": "x"}, headers=stale)
        assert answer.status_code == 412
        assert answer.json()["code"] == "version_conflict"
        assert (await client.get("/v1/agents/a")).json()["version"] == 1
        assert (await client.delete("/v1/agents/a", headers=stale)).status_code == 412
    assert (await client.delete("/v1/agents/a", headers={"If-Match": '"1"'})).status_code == 204


async def test_sub_agents_in_a_circle_are_refused_with_the_path(
    client: httpx2.AsyncClient,
) -> None:
    await create(client, agent("a", "b"), agent("b", "c"))
    closing = await client.post("/v1/agents", json=agent("c", "a"))
    assert closing.status_code == 409
    assert closing.json()["code"] == "cycle"
    assert "c -> a -> b -> c" in closing.json()["detail"]
    itself = await client.post("/v1/agents", json=agent("d", "d"))
    assert itself.status_code == 409
    assert "d -> d" in itself.json()["detail"]
    await create(client, agent("c"))
    by_put = await client.put(
        "/v1/agents/c", json={k: v for k, v in agent("c", "a").items() if k != "name"}
    )
    assert by_put.status_code == 409


async def test_lists_come_in_pages_that_join_without_gaps(client: httpx2.AsyncClient) -> None:
    names = [f"agent-{number:02}" for number in range(7)]
    await create(client, *(agent(name) for name in reversed(names)))
    for order, expected in (("asc", names), ("desc", names[::-1])):
        found: list[str] = []
        url: str | None = f"/v1/agents?limit=3&order={order}"
        while url:
            page = await client.get(url)
            assert page.status_code == 200, page.text
            found += [item["name"] for item in page.json()["items"]]
            url = page.links["next"]["url"] if "next" in page.links else None
            assert (url is None) == (page.json()["next_cursor"] is None)
        assert found == expected


@pytest.mark.parametrize("query", ["cursor=nonsense", "cursor=WzFd", "limit=0", "limit=x", "no=1"])
async def test_bad_list_parameters_are_refused_with_a_hint(refusing: Running, query: str) -> None:
    answer = await refusing.client.get(f"/v1/agents?{query}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_cursor_is_valid_for_its_own_list_only(client: httpx2.AsyncClient) -> None:
    await create(client, agent("a"), agent("b"))
    cursor = (await client.get("/v1/agents?limit=1")).json()["next_cursor"]
    for path in ("/v1/runs", "/v1/agents/a/versions"):
        other = await client.get(path, params={"cursor": cursor})
        assert other.status_code == 422
        assert other.json()["code"] == "invalid_cursor"
    turned = await client.get("/v1/agents", params={"cursor": cursor, "order": "desc"})
    assert turned.status_code == 422


async def test_edges_are_added_to_and_removed_from_a_graph(client: httpx2.AsyncClient) -> None:
    created = await client.post(
        "/v1/graphs",
        json={
            "name": "g",
            "nodes": ["z", {"agent": "a", "ttl_s": 60.0}],
            "edges": [{"source": "a", "target": "b"}],
        },
    )
    assert created.status_code == 201, created.text
    nodes = [(node["agent"], node["ttl_s"]) for node in created.json()["nodes"]]
    assert nodes == [("z", None), ("a", 60.0), ("b", None)]

    added = await client.post("/v1/graphs/g/edges", json={"source": "b", "target": "c"})
    assert added.status_code == 200
    assert added.json()["version"] == 2
    order = await client.get("/v1/graphs/g/order")
    assert order.json() == {"order": ["z", "a", "b", "c"]}

    cycle = await client.post("/v1/graphs/g/edges", json={"source": "c", "target": "a"})
    assert cycle.status_code == 409
    assert cycle.json()["code"] == "cycle"
    assert "a -> b -> c" in cycle.json()["detail"]
    twice = await client.post("/v1/graphs/g/edges", json={"source": "b", "target": "c"})
    assert twice.json()["code"] == "exists"

    removed = await client.delete("/v1/graphs/g/edges", params={"source": "b", "target": "c"})
    assert removed.status_code == 200
    assert removed.json()["version"] == 3
    missing = await client.delete("/v1/graphs/g/edges", params={"source": "b", "target": "c"})
    assert missing.status_code == 404
    assert (await client.get("/v1/graphs/g")).json()["version"] == 3


async def test_a_graph_is_drawn_in_three_formats(client: httpx2.AsyncClient) -> None:
    edges = [{"source": "first-one", "target": "second-one"}]
    await client.post("/v1/graphs", json={"name": "g", "edges": edges})
    for kind, media, part in (
        ("svg", "image/svg+xml", "</svg>"),
        ("mermaid", "text/vnd.mermaid", "flowchart"),
        ("dot", "text/vnd.graphviz", "digraph"),
    ):
        answer = await client.get("/v1/graphs/g/drawing", params={"format": kind})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(media)
        assert part in answer.text
        assert "first-one" in answer.text
        assert "second-one" in answer.text
    assert (await client.get("/v1/graphs/g/drawing?format=png")).status_code == 422
    assert (await client.get("/v1/graphs/none/drawing")).status_code == 404
