"""Checks and changes of graphs: nodes, and edges that must not form a cycle."""

from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any

from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.graph.shared_memory import PropagationPolicy, SharedMemoryGraph

MOST_NODES = 500


def to_graph(content: dict[str, Any]) -> SharedMemoryGraph:
    """Build the graph of a definition, without publications.

    Args:
        content: ``{"nodes": [{"agent", "ttl_s"}], "edges": [{"source", "target", "policy"}],
            "ttl_s"}``.

    Raises:
        CycleError: its edges form a cycle.
    """
    graph = SharedMemoryGraph(ttl_s=content["ttl_s"])
    for node in content["nodes"]:
        graph.add_agent(node["agent"], ttl_s=node["ttl_s"])
    graph.add_edges(
        [
            (edge["source"], edge["target"], PropagationPolicy(edge["policy"]))
            for edge in content["edges"]
        ]
    )
    return graph


def normalised(content: dict[str, Any]) -> dict[str, Any]:
    """Return the definition with all nodes listed, including nodes that only edges name.

    Raises:
        CycleError: its edges form a cycle.
        ConflictError: ``exists``: a node or an edge is listed twice.
        InvalidInputError: more than :data:`MOST_NODES` nodes.
    """
    names = [node["agent"] for node in content["nodes"]]
    pairs = [(edge["source"], edge["target"]) for edge in content["edges"]]
    for what, listed in (("node", names), ("edge", [" -> ".join(pair) for pair in pairs])):
        twice = next((item for item, times in Counter(listed).items() if times > 1), None)
        if twice is not None:
            raise ConflictError(f"the graph lists the {what} {twice} twice", code="exists")
    known = set(names)
    ends = dict.fromkeys(end for pair in pairs for end in pair)
    added = [{"agent": name, "ttl_s": None} for name in ends if name not in known]
    if len(names) + len(added) > MOST_NODES:
        raise InvalidInputError(
            f"the graph has {len(names) + len(added)} nodes, with those that only edges name; "
            f"the maximum is {MOST_NODES}: leave some out",
            pointer="/edges",
        )
    if _has_cycle(pairs):
        to_graph(content)  # raises, and names the cycle; to build each graph takes far longer
    return {**content, "nodes": [*content["nodes"], *added]}


def _has_cycle(edges: Iterable[tuple[str, str]]) -> bool:
    """Return true if edges (source, target) form a cycle."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for source, target in edges:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


def with_edge(content: dict[str, Any], edge: dict[str, Any]) -> dict[str, Any]:
    """Return the definition with one more edge.

    Raises:
        CycleError, ConflictError: as :func:`normalised`.
    """
    return normalised({**content, "edges": [*content["edges"], edge]})


def without_edge(content: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    """Return the definition without the edge between two nodes; the nodes stay.

    Raises:
        NotFoundError: there is no such edge.
    """
    kept = [
        edge for edge in content["edges"] if (edge["source"], edge["target"]) != (source, target)
    ]
    if len(kept) == len(content["edges"]):
        raise NotFoundError(f"the graph has no edge {source} -> {target}")
    return {**content, "edges": kept}
