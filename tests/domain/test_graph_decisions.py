"""The decisions in a graph, against an independent interpreter, in every order of ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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

# --- The reference interpreter: it asks backwards, node by node, and knows no order ---------------


@dataclass(frozen=True)
class Reference:
    """The results of a run by the definition of D1, for given ends of the nodes."""

    content: Mapping[str, Any]
    ends: Mapping[str, NodeEnd]

    def results(self) -> tuple[dict[str, str], dict[tuple[str, str], bool]]:
        nodes = {node.get("name") or node["agent"]: node for node in self.content["nodes"]}
        edges = self.content["edges"]

        def is_fatal(name: str) -> bool:
            return status(name) == "failed" and nodes[name].get("on_error") != "continue"

        @cache
        def is_doomed(name: str) -> bool:
            """Return true if something upstream failed and ends the run."""
            sources = [edge["source"] for edge in edges if edge["target"] == name]
            return any(is_fatal(each) or is_doomed(each) for each in sources)

        @cache
        def status(name: str) -> str:
            into = [edge for edge in edges if edge["target"] == name]
            if into:
                flows = [is_taken(edge["source"], name) for edge in into]
                wanted = all(flows) if nodes[name].get("join") == "all" else any(flows)
                if not wanted or is_doomed(name):
                    return "skipped"
            return "failed" if self.ends[name].is_failed else "completed"

        @cache
        def is_taken(source: str, target: str) -> bool:
            found = status(source)
            if found == "skipped" or is_fatal(source):
                return False
            out = [edge for edge in edges if edge["source"] == source]
            own = next(edge for edge in out if edge["target"] == target)
            if nodes[source].get("router") and found == "completed":
                return bool(self.ends[source].output_json["route"] == target)
            if own.get("else"):
                return not any(is_taken(source, each["target"]) for each in out if each is not own)
            if "when" in own:
                return self.value_of(own["when"], source)
            return True

        return (
            {name: status(name) for name in nodes},
            {(e["source"], e["target"]): is_taken(e["source"], e["target"]) for e in edges},
        )

    def value_of(self, when: Mapping[str, Any], source: str) -> bool:
        """Return a condition of the few forms that the graphs below have."""
        if "not" in when:
            return not self.value_of(when["not"], source)
        end = self.ends[source]
        if when["feature"] == "status":
            return bool(("failed" if end.is_failed else "completed") == when["value"])
        if when["feature"] == "metadata.n":
            return bool(ABOUT["metadata"]["n"] > when["value"])
        number = (end.output_json or {}).get("n")
        return number is not None and bool(number > when["value"])


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
    statuses, taken = Reference(content, ends).results()
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
