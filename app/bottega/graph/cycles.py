"""Search for a cycle among many edges at once."""

from collections.abc import Sequence

import networkx as nx

from bottega.errors import CycleError


def refuse_cycle(edges: Sequence[tuple[str, str]]) -> None:
    """Check that edges form no cycle, in time linear in their number.

    Raises:
        CycleError: they do; the path begins with the cycle's last edge.
    """
    graph = nx.DiGraph(edges)
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = [(edge[0], edge[1]) for edge in nx.find_cycle(graph)]
    place = {edge: number for number, edge in enumerate(edges)}
    last = max(range(len(cycle)), key=lambda number: place[cycle[number]])
    path = [source for source, _ in [*cycle[last:], *cycle[:last]]]
    raise CycleError((*path, path[0]))
