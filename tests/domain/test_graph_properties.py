"""Properties of every graph."""

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.definitions.graphs import normalised, to_graph
from bottega.errors import CycleError
from bottega.graph.shared_memory import PropagationPolicy, SharedMemoryGraph
from tests.examples import examples

NAMES = "abcdefgh"
names = st.sampled_from(NAMES)
edges = st.lists(st.tuples(names, names, st.sampled_from(PropagationPolicy)), max_size=25)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("edge"), names, names, st.sampled_from(PropagationPolicy)),
        st.tuples(st.just("agent"), names),
        st.tuples(st.just("publish"), names, st.text(max_size=5)),
    ),
    max_size=40,
)


def at() -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC)


def built(wanted: list[Any]) -> SharedMemoryGraph:
    """Build the graph that a list of edits makes, without cycles."""
    graph = SharedMemoryGraph(clock=at)

    async def act() -> None:
        for kind, *details in wanted:
            if kind == "publish":
                await graph.publish(*details, tool_results=[f"of {details[0]}"], messages=["m"])
            elif kind == "agent":
                graph.add_agent(*details)
            else:
                try:
                    graph.add_edge(*details)
                except CycleError:
                    continue

    asyncio.run(act())
    return graph


@given(edges)
def test_edges_keep_it_acyclic_and_every_refusal_names_a_real_cycle(
    wanted: list[tuple[str, str, PropagationPolicy]],
) -> None:
    graph = SharedMemoryGraph()
    model: nx.DiGraph[str] = nx.DiGraph()
    for source, target, policy in wanted:
        trial = model.copy()
        trial.add_edge(source, target)
        if nx.is_directed_acyclic_graph(trial):
            graph.add_edge(source, target, policy)
            model = trial
            continue
        with pytest.raises(CycleError) as caught:
            graph.add_edge(source, target, policy)
        path = caught.value.path
        assert path[0] == path[-1] == source
        assert path[1] == target
        assert all(trial.has_edge(*pair) for pair in pairwise(path))
    assert set(graph.get_edges_for_nodes(NAMES)) == set(model.edges)


@given(acts)
def test_order_always_takes_the_free_node_that_was_inserted_first(
    wanted: list[Any],
) -> None:
    graph = built(wanted)
    links = graph.get_edges_for_nodes(NAMES)
    left, order = list(graph.nodes), []
    while left:
        free = next(name for name in left if not any(t == name and s in left for s, t in links))
        order.append(free)
        left.remove(free)
    assert graph.get_topological_order() == order


@given(acts, acts)
def test_pull_equals_a_scan_of_all_edges(first: list[Any], second: list[Any]) -> None:
    graph = built(first)
    for name in NAMES:
        graph.pull_for(name)  # its cached order must not go stale
    for kind, *details in second:
        if kind == "agent":
            graph.add_agent(*details)
        elif kind == "edge":
            try:
                graph.add_edge(*details)
            except CycleError:
                continue
    for name in NAMES:
        expected = []
        for source in graph.get_topological_order():
            publication = graph.publication(source)
            if (source, name) in graph.get_edges_for_nodes(NAMES) and publication is not None:
                policy = graph.edge_policy(source, name)
                expected.append((source, publication.version, policy, publication.text_for(policy)))
        got = graph.pull_for(name)
        assert [(i.source_id, i.version, i.policy, i.content) for i in got] == expected


@given(acts)
def test_indirect_pull_finds_all_ancestors_by_distance(wanted: list[Any]) -> None:
    graph = built(wanted)
    links: nx.DiGraph[str] = nx.DiGraph(graph.get_edges_for_nodes(NAMES))
    links.add_nodes_from(graph.nodes)
    for name in graph.nodes:
        distance = nx.single_source_shortest_path_length(links.reverse(), name)
        got = [item.source_id for item in graph.pull_for_indirect(name)]
        assert set(got) == {
            other for other in nx.ancestors(links, name) if graph.publication(other) is not None
        }
        assert len(got) == len(set(got))
        assert [distance[each] for each in got] == sorted(distance[each] for each in got)


@given(acts)
@settings(max_examples=examples(50))
def test_to_dict_and_back_loses_nothing(wanted: list[Any]) -> None:
    graph = built(wanted)
    again = SharedMemoryGraph.from_dict(graph.to_dict(), clock=at)
    assert again.to_dict() == graph.to_dict()
    assert again.get_topological_order() == graph.get_topological_order()
    for name in NAMES:
        assert again.pull_for(name) == graph.pull_for(name)
        assert again.pull_for_indirect(name) == graph.pull_for_indirect(name)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), unique=True))
def test_a_definition_is_refused_if_and_only_if_its_graph_has_a_cycle(
    edges: list[tuple[str, str]],
) -> None:
    policy = "final_response_only"
    listed = [{"source": a, "target": b, "policy": policy} for a, b in edges]
    content = {"nodes": [], "edges": listed, "ttl_s": None}
    try:
        to_graph(content)
    except CycleError:
        with pytest.raises(CycleError):
            normalised(content)
    else:
        assert normalised(content)["edges"] == listed
