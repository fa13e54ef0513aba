"""The decisions in a graph, against an independent interpreter, in every order of ends."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.graph.decisions import (
    EdgeDecided,
    GraphCourse,
    GraphRules,
    MissingArgumentError,
    NodeEnd,
    NodeReady,
    NodeSkipped,
    arguments_of,
)
from tests.examples import examples
from tests.graph_reference import Reference

# --- Random graphs --------------------------------------------------------------------------------

ABOUT: dict[str, Any] = {"input": "x", "metadata": {"n": 2}}
_tests = st.one_of(
    st.builds(
        lambda feature, value: {"feature": feature, "op": "gt", "value": value},
        st.sampled_from(["output_json.n", "metadata.n"]),
        st.integers(0, 4),
    ),
    st.builds(
        lambda value: {"feature": "status", "op": "eq", "value": value},
        st.sampled_from(["completed", "failed"]),
    ),
)
_conditions = st.one_of(_tests, st.builds(lambda test: {"not": test}, _tests))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, NodeEnd], list[int]]:
    """Return a definition, an end for each node, and numbers that choose the order of ends."""
    names = [f"n{number}" for number in range(draw(st.integers(1, 7)))]
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    ends: dict[str, NodeEnd] = {}
    for number, name in enumerate(names):
        targets = [each for each in names[number + 1 :] if draw(st.booleans())]
        node: dict[str, Any] = {"agent": name, "ttl_s": None}
        node |= {"join": draw(st.sampled_from(["any", "all"]))}
        node |= {"on_error": draw(st.sampled_from(["fail", "continue", "continue"]))}
        output: dict[str, Any] | None = {"n": draw(st.integers(0, 4))}
        kind = draw(st.sampled_from(["plain", "when", "else", "router"]))
        if kind == "router" and len(targets) > 1:
            node |= {"router": True}
            output = {"route": draw(st.sampled_from(targets))}
        for index, target in enumerate(targets):
            edge: dict[str, Any] = {"source": name, "target": target}
            if kind == "else" and len(targets) > 1 and index == 0:
                edge["else"] = True
            elif (kind == "else" and len(targets) > 1) or (kind == "when" and draw(st.booleans())):
                edge["when"] = draw(_conditions)
            edges.append(edge)
        nodes.append(node)
        is_failed = draw(st.integers(0, 3)) == 0
        ends[name] = NodeEnd(name, is_failed, "text", None if is_failed else output)
    order = draw(st.lists(st.integers(0, 6), min_size=len(names), max_size=len(names)))
    return {"nodes": nodes, "edges": edges, "ttl_s": None}, ends, order


def run(
    content: Mapping[str, Any], ends: Mapping[str, NodeEnd], order: list[int]
) -> tuple[GraphCourse, list[Any]]:
    """Run a graph whose nodes end in some order."""
    course = GraphCourse(GraphRules.of(content), ABOUT)
    decisions = course.begin()
    running = [each.name for each in decisions if isinstance(each, NodeReady)]
    for number in order:
        if not running:
            break
        found = course.end(ends[running.pop(number % len(running))])
        running += [each.name for each in found if isinstance(each, NodeReady)]
        decisions += found
    return course, decisions


@given(graphs())
@settings(max_examples=examples(400))
def test_decisions_are_those_of_the_reference(
    drawn: tuple[dict[str, Any], dict[str, NodeEnd], list[int]],
) -> None:
    content, ends, order = drawn
    course, decisions = run(content, ends, order)
    statuses, taken = Reference(content, lambda name, *_: ends[name], ABOUT).results()
    assert course.statuses == statuses
    assert course.taken == taken
    edges = [(each.source, each.target) for each in decisions if isinstance(each, EdgeDecided)]
    nodes = [each.name for each in decisions if not isinstance(each, EdgeDecided)]
    assert sorted(edges) == sorted(taken)  # each once
    assert sorted(nodes) == sorted(statuses)
    skipped = {each.name: each for each in decisions if isinstance(each, NodeSkipped)}
    for each in skipped.values():
        assert each.source in each.reason


@given(graphs())
@settings(max_examples=examples(100))
def test_recorded_decisions_hold(
    drawn: tuple[dict[str, Any], dict[str, NodeEnd], list[int]],
) -> None:
    """Check that an attempt which reads other values takes the edges of the one before."""
    content, ends, order = drawn
    first, _ = run(content, ends, order)
    again = GraphCourse(GraphRules.of(content), {}, dict(first.taken))
    waiting = [each.name for each in again.begin() if isinstance(each, NodeReady)]
    while waiting:
        found = again.end(ends[waiting.pop()])
        waiting += [each.name for each in found if isinstance(each, NodeReady)]
    assert (again.taken, again.statuses) == (first.taken, first.statuses)


def test_a_node_of_an_unknown_type_is_refused() -> None:
    for nodes in ([{"name": "x", "type": "wish"}], [{"agent": "x", "type": "wish"}]):
        with pytest.raises(LookupError, match="the node 'x' has the unknown type 'wish'"):
            GraphRules.of({"nodes": nodes, "edges": []})


def test_arguments_refer_to_outputs() -> None:
    outputs = {"run": {"input": "x", "metadata": {"a/b": [1, {"c": 2}]}}, "n": {"list": [5]}}
    given = {
        "fixed": {"from_": 1},
        "deep": {"from": "run", "pointer": "/metadata/a~1b/1/c"},
        "item": {"from": "n", "pointer": "/list/0"},
        "whole": {"from": "n"},
    }
    found = arguments_of(given, outputs)
    assert found == {"fixed": {"from_": 1}, "deep": 2, "item": 5, "whole": {"list": [5]}}
    for pointer in ("/list/1", "/nothing", "/list/x"):
        with pytest.raises(MissingArgumentError, match=pointer):
            arguments_of({"x": {"from": "n", "pointer": pointer}}, outputs)
