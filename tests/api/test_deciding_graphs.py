"""Definitions of graphs that decide: what they give back, and what is refused with its pointer."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

HUMAN = {
    "name": "ok",
    "type": "human",
    "ask": "Refund it?",
    "schema": {
        "type": "object",
        "properties": {"refund": {"type": "boolean"}, "sum": {"type": "number"}},
        "required": ["refund"],
    },
}
TOOL = {
    "name": "sum",
    "type": "tool",
    "tool": {"type": "builtin", "name": "calculator"},
    "arguments": {"expression": "1 + 1"},
}
WHEN = {"feature": "output_json.refund", "op": "eq", "value": True}


def edge(source: str, target: str, **more: Any) -> dict[str, Any]:
    return {"source": source, "target": target, **more}


async def test_a_graph_gives_back_what_it_was_given(client: httpx2.AsyncClient) -> None:
    nodes = [
        {"agent": "triage", "router": True, "memory": "off"},
        {"name": "first", "agent": "clerk", "join": "all", "timeout_s": 5.0},
        TOOL | {"retry": {"max": 2, "backoff_s": 0.5, "on": ["503"]}, "on_error": "continue"},
        HUMAN | {"who": "approve", "expires_s": 60.0},
        "last",
    ]
    edges = [
        edge("triage", "sum"),
        edge("triage", "ok"),
        edge("ok", "first", when=WHEN),
        edge("ok", "last", **{"else": True}),
    ]
    body = {"name": "g", "nodes": nodes, "edges": edges, "output": "first"}
    created = await client.post("/v1/graphs", json=body)
    assert created.status_code == 201, created.text
    shown = (await client.get("/v1/graphs/g")).json()
    assert [(node["name"], node["type"]) for node in shown["nodes"]] == [
        ("triage", "agent"),
        ("first", "agent"),
        ("sum", "tool"),
        ("ok", "human"),
        ("last", "agent"),
    ]
    for given, found in zip(nodes[:4], shown["nodes"], strict=False):
        assert isinstance(given, dict)
        known = {name: found[name] for name in given if name != "tool"}
        assert known == {name: value for name, value in given.items() if name != "tool"}
    assert shown["nodes"][2]["tool"]["name"] == "calculator"
    assert [(node["join"], node["on_error"]) for node in shown["nodes"][1:3]] == [
        ("all", "fail"),
        ("any", "continue"),
    ]
    assert (shown["edges"][2]["when"], shown["edges"][3]["else"]) == (WHEN, True)
    assert "when" not in shown["edges"][0]
    assert shown["output"] == "first"
    again = {name: shown[name] for name in ("nodes", "edges", "output", "ttl_s")}
    replaced = await client.put("/v1/graphs/g", json=again)
    assert replaced.status_code == 200, replaced.text
    assert {**replaced.json(), "version": 1, "created_at": 0} == {**shown, "created_at": 0}


async def test_a_graph_without_new_fields_is_stored_as_before(client: httpx2.AsyncClient) -> None:
    body = {"name": "g", "nodes": ["a"], "edges": [edge("a", "b")]}
    shown = (await client.post("/v1/graphs", json=body)).json()
    assert shown["edges"] == [edge("a", "b", policy="final_response_only")]
    assert [(node["name"], node["type"]) for node in shown["nodes"]] == [
        ("a", "agent"),
        ("b", "agent"),
    ]


AGENTS = ["a", "b", "c"]
REFUSED: list[tuple[str, list[Any], list[dict[str, Any]]]] = [
    ("/edges/0/when/op", AGENTS, [edge("a", "b", when=WHEN | {"op": "like"})]),
    ("/edges/0/when/feature", AGENTS, [edge("a", "b", when=WHEN | {"feature": "arguments.x"})]),
    (
        "/edges/0/when/op",
        AGENTS,
        [edge("a", "b", when={"feature": "output", "op": "gt", "value": 3})],
    ),
    (
        "/edges/0/when/all/1/value",
        AGENTS,
        [
            edge(
                "a",
                "b",
                when={
                    "all": [
                        {"feature": "input", "op": "exists"},
                        {"feature": "status", "op": "eq", "value": "done"},
                    ]
                },
            )
        ],
    ),
    ("/edges/0/when", AGENTS, [edge("a", "b", when=WHEN, **{"else": True}), edge("a", "c")]),
    ("/edges/0/else", AGENTS, [edge("a", "b", **{"else": True})]),
    (
        "/edges/1/else",
        [*AGENTS, "d"],
        [edge("a", "b", when=WHEN), edge("a", "c", **{"else": True}), edge("a", "d")],
    ),
    (
        "/edges/0/else",
        [*AGENTS, "d"],
        [
            edge("a", "b", **{"else": True}),
            edge("a", "c", **{"else": True}),
            edge("a", "d", when=WHEN),
        ],
    ),
    ("/edges/1/target", AGENTS, [edge("a", "b", when=WHEN), edge("a", "zz")]),
    (
        "/edges/0/when/feature",
        [HUMAN, "b"],
        [edge("ok", "b", when=WHEN | {"feature": "output_json.nobody"})],
    ),
    ("/edges/0/when/value", [HUMAN, "b"], [edge("ok", "b", when=WHEN | {"value": "yes"})]),
    (
        "/edges/0/when/value",
        [HUMAN, "b"],
        [edge("ok", "b", when={"feature": "output_json.sum", "op": "gt", "value": "1"})],
    ),
    ("/edges/0/when", [{"agent": "a", "router": True}, "b", "c"], [edge("a", "b", when=WHEN)]),
    ("/nodes/0/router", [{"agent": "a", "router": True}, "b"], [edge("a", "b")]),
    ("/nodes/0/router", [TOOL | {"router": True}], []),
    ("/nodes/0/name", [{"type": "tool", "tool": TOOL["tool"]}], []),
    ("/nodes/0/tool", [{"name": "x", "type": "tool"}], []),
    ("/nodes/0/tool", [TOOL | {"tool": {"type": "mcp", "server": "s"}}], []),
    (
        "/nodes/0/tool",
        [TOOL | {"tool": {"type": "client", "name": "x", "description": "y"}}],
        [],
    ),
    ("/nodes/0/tool/name", [TOOL | {"tool": {"type": "builtin", "name": "x"}}], []),
    ("/nodes/0/agent", [{"name": "x"}], []),
    ("/nodes/0/ask", [{"name": "x", "type": "human", "schema": {}}], []),
    ("/nodes/0/timeout_s", [HUMAN | {"timeout_s": 5}], []),
    ("/nodes/0/schema", [HUMAN | {"schema": {"type": "nothing"}}], []),
    ("/nodes/0/name", [HUMAN | {"name": "item"}], []),
    ("/nodes/0/graph", [{"name": "x", "type": "graph", "graph": "nothing"}], []),
    ("/nodes/0/graph", [{"name": "x", "type": "graph"}], []),
    ("/nodes/0/loop", [{"agent": "a", "loop": {"until": WHEN, "max": 2}}], []),
    ("/nodes/0/for_each/from", [{"agent": "a", "for_each": {"from": "b"}}], []),
    ("/nodes/0/for_each/from", [{"agent": "a", "for_each": {"from": "item"}}], []),
    ("/nodes/0/for_each/max", [{"agent": "a", "for_each": {"from": "run", "max": 1001}}], []),
    ("/nodes/0/for_each", [HUMAN | {"for_each": {"from": "run"}}], []),
    (
        "/nodes/0/for_each",
        [{"agent": "a", "router": True, "for_each": {"from": "run"}}, *"bc"],
        [edge("a", "b"), edge("a", "c")],
    ),
    (
        "/nodes/1/for_each/pointer",
        [HUMAN, {"agent": "a", "for_each": {"from": "ok", "pointer": "/sum"}}],
        [edge("ok", "a")],
    ),
    (
        "/nodes/0/arguments/expression/from",
        [TOOL | {"arguments": {"expression": {"from": "item"}}}],
        [],
    ),
    (
        "/nodes/1/arguments/expression/from",
        ["a", TOOL | {"arguments": {"expression": {"from": "a", "pointer": "/x"}}}],
        [],
    ),
    (
        "/nodes/1/arguments/expression/pointer",
        [HUMAN, TOOL | {"arguments": {"expression": {"from": "ok", "pointer": "/nobody"}}}],
        [edge("ok", "sum")],
    ),
    (
        "/nodes/3",
        [{"agent": "a", "router": True}, "b", "c", {"agent": "d", "join": "all"}],
        [edge("a", "b"), edge("a", "c"), edge("b", "d"), edge("c", "d")],
    ),
]


@pytest.mark.parametrize(("pointer", "nodes", "edges"), REFUSED)
async def test_a_wrong_definition_is_refused_with_its_pointer(
    client: httpx2.AsyncClient, pointer: str, nodes: list[Any], edges: list[dict[str, Any]]
) -> None:
    body = {"nodes": nodes, "edges": edges}
    refused = await client.post("/v1/graphs", json={"name": "g", **body})
    assert refused.status_code == 422, refused.text
    assert pointer in [each["pointer"] for each in refused.json()["errors"]]
    applied = await client.post("/v1/apply", json={"graphs": [{"name": "g", **body}]})
    assert applied.status_code == 422
    assert (await client.get("/v1/graphs/g")).status_code == 404


async def test_the_schema_of_an_agents_answer_is_known(client: httpx2.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "number"}}}
    agent = {"name": "a", "system_message": "x", "output_schema": schema}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    for name, status in (("sum", 201), ("total", 422)):
        when = {"feature": f"output_json.{name}", "op": "gt", "value": 1}
        body = {"name": name, "edges": [edge("a", "b", when=when)]}
        answer = await client.post("/v1/graphs", json=body)
        assert answer.status_code == status, answer.text


async def test_an_unknown_output_and_names_given_twice_are_refused(
    client: httpx2.AsyncClient,
) -> None:
    body = {"name": "g", "nodes": ["a"], "output": "b"}
    refused = await client.post("/v1/graphs", json=body)
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/output")
    twice = await client.post("/v1/graphs", json={"name": "g", "nodes": ["ok", HUMAN]})
    assert (twice.status_code, twice.json()["code"]) == (409, "exists")


async def test_the_example_is_applied(client: httpx2.AsyncClient) -> None:
    path = Path(__file__).parents[2] / "examples/order.yaml"
    applied = await client.post("/v1/apply", json=yaml.safe_load(path.read_text()))
    assert applied.status_code == 200, applied.text
    shown = (await client.get("/v1/graphs/order")).json()
    assert [node["name"] for node in shown["nodes"]] == ["sum", "approve", "letter"]


def inner(name: str, graph: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "graph", "graph": graph, **more}


async def put(client: httpx2.AsyncClient, name: str, *nodes: Any, **more: Any) -> httpx2.Response:
    body = {"nodes": list(nodes), "edges": [], **more}
    return await client.put(f"/v1/graphs/{name}", json=body)


def refused_at(answer: httpx2.Response) -> str:
    assert answer.status_code == 422, answer.text
    pointer: str = answer.json()["errors"][0]["pointer"]
    return pointer


async def test_graphs_contain_others_but_not_one_another(client: httpx2.AsyncClient) -> None:
    for name, *nodes in (("a", "x"), ("b", inner("n", "a")), ("c", inner("n", "b", version=1))):
        assert (await put(client, name, *nodes)).status_code == 201
    shown = (await client.get("/v1/graphs/c")).json()["nodes"][0]
    assert {key: shown[key] for key in ("name", "type", "graph", "version", "agent")} == {
        **inner("n", "b", version=1),
        "agent": None,
    }
    assert refused_at(await put(client, "d", inner("n", "c"))) == "/nodes/0/graph"  # too deep
    assert refused_at(await put(client, "d", inner("n", "a", version=2))) == "/nodes/0/version"
    assert refused_at(await put(client, "a", inner("n", "a"))) == "/nodes/0/graph"
    for within in ("b", "c"):
        circle = await put(client, "a", inner("n", within))
        assert (circle.status_code, circle.json()["code"]) == (409, "cycle"), circle.text
    two = await client.put("/v1/graphs/two", json={"nodes": ["x", "y"], "edges": []})
    assert two.status_code == 201
    assert refused_at(await put(client, "d", inner("n", "two"))) == "/nodes/0/graph"
    unnamed = await put(client, "e", {"type": "graph", "graph": "a"})
    assert unnamed.json()["nodes"][0]["name"] == "a"


async def test_nodes_of_nested_graphs_are_counted_at_each_use(client: httpx2.AsyncClient) -> None:
    def uses(graph: str, times: int) -> list[dict[str, Any]]:
        return [inner(f"n{number}", graph) for number in range(times)]

    def chain(length: int) -> list[dict[str, Any]]:
        return [edge(f"n{number}", f"n{number + 1}") for number in range(length - 1)]

    assert (await put(client, "leaf", "x")).status_code == 201
    large = await put(client, "large", *uses("leaf", 399), edges=chain(399))
    assert large.status_code == 201, large.text  # 399 and 399
    assert (await put(client, "top", *uses("large", 2), edges=chain(2))).status_code == 201
    many = await put(client, "more", *uses("large", 3), edges=chain(3))
    assert refused_at(many) == "/nodes/2/graph"
    assert "2000 nodes" in many.json()["detail"]
    # A graph in it grows after it is stored.
    grown = ["x", *({"agent": "x", "name": f"x{number}"} for number in range(3))]
    edges = [edge("x", f"x{number}") for number in range(3)]
    changed = await put(client, "leaf", *grown, edges=edges, output="x")
    assert changed.status_code == 200, changed.text
    agent = {"name": "x", "system_message": "x"}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    body = {"graph": "top", "mode": "dag", "input": "x"}
    refused = await client.post("/v1/runs", json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["code"] == "too_many_nodes"
    assert refused.json()["errors"][0]["pointer"] == "/graph"


async def test_graphs_of_one_document_contain_others(client: httpx2.AsyncClient) -> None:
    agent = {"name": "x", "system_message": "x"}
    outer = {"name": "outer", "nodes": [inner("n", "inner")], "edges": []}
    leaf = {"name": "inner", "nodes": ["x"], "edges": []}
    applied = await client.post("/v1/apply", json={"agents": [agent], "graphs": [outer, leaf]})
    assert applied.status_code == 200, applied.text
    circle = {"graphs": [outer, leaf | {"nodes": [inner("n", "outer")]}]}
    refused = await client.post("/v1/apply", json=circle)
    assert (refused.status_code, refused.json()["code"]) == (409, "cycle")


async def test_loops_are_bounded_and_compare_what_their_turns_have(
    client: httpx2.AsyncClient,
) -> None:
    assert (await put(client, "ask", HUMAN)).status_code == 201
    when = WHEN
    for until, most, pointer in (
        (when, None, "/nodes/0/loop/max"),
        (when, 101, "/nodes/0/loop/max"),
        ({**when, "feature": "input"}, 2, "/nodes/0/loop/until/feature"),
        ({**when, "feature": "output_json.sum"}, 2, "/nodes/0/loop/until/value"),
        ({**when, "feature": "output_json.total"}, 2, "/nodes/0/loop/until/feature"),
        ({**when, "op": "like"}, 2, "/nodes/0/loop/until/op"),
    ):
        loop = {"until": until} | ({} if most is None else {"max": most})
        refused = await put(client, "g", inner("n", "ask", loop=loop))
        assert pointer in [each["pointer"] for each in refused.json()["errors"]], refused.text
    loop = {"until": when, "max": 3}
    assert (await put(client, "g", inner("n", "ask", loop=loop))).status_code == 201
    shown = (await client.get("/v1/graphs/g")).json()["nodes"][0]
    assert shown["loop"] == {**loop, "on_max": "fail"}


async def test_elements_are_given_back_with_their_defaults(client: httpx2.AsyncClient) -> None:
    each = {"from": "run", "pointer": "/metadata/list"}
    argument = {"expression": {"from": "item", "pointer": "/n"}}
    stored = await put(client, "g", TOOL | {"arguments": argument, "for_each": each})
    assert stored.status_code == 201, stored.text
    shown = stored.json()["nodes"][0]
    assert shown["arguments"] == argument
    assert shown["for_each"] == {
        **each,
        "max": 1000,
        "concurrency": 20,
        "on_error": "fail",
        "spread_above": 50,
    }
