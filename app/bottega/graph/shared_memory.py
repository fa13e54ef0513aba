"""Graph of agents that share answers; networkx is imported when the first graph is made.

An edge ``source -> target`` passes the source's last answer to the target's next query. Agents may
publish and read answers concurrently, in any event loop and any thread.
"""

import functools
import heapq
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from bottega.clock import Clock, utcnow
from bottega.errors import CycleError, InvalidInputError
from bottega.graph.publication import (
    MemoryItem,
    MessageLike,
    PropagationPolicy,
    Publication,
    ToolResultLike,
)


def refuse_cycle(edges: Sequence[tuple[str, str]]) -> None:
    """Check that edges do not form a cycle, in a time linear in the number of edges.

    Raises:
        CycleError: the edges form a cycle. The error's path begins with that edge of the cycle
            which is last in ``edges``.
    """
    import networkx as nx

    graph = nx.DiGraph(edges)
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = [(edge[0], edge[1]) for edge in nx.find_cycle(graph)]
    place = {edge: number for number, edge in enumerate(edges)}
    last = max(range(len(cycle)), key=lambda number: place[cycle[number]])
    path = [source for source, _ in [*cycle[last:], *cycle[:last]]]
    raise CycleError((*path, path[0]))


P = ParamSpec("P")
T = TypeVar("T")


class Locked(Protocol):
    """An object with a lock."""

    _lock: threading.RLock


L = TypeVar("L", bound=Locked)


def locked(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Decorate a method: each call holds the object's lock, so the method must be short."""

    @functools.wraps(method)
    def run(self: L, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


@dataclass(frozen=True, slots=True, eq=False)
class _Published:
    publication: Publication
    items: dict[PropagationPolicy, MemoryItem] = field(default_factory=dict)

    def item(self, policy: PropagationPolicy) -> MemoryItem:
        """Return the publication for readers with this policy; render it only at the first call."""
        item = self.items.get(policy)
        if item is None:
            publication = self.publication
            item = self.items[policy] = MemoryItem(
                publication.agent_id,
                publication.text_for(policy),
                publication.timestamp,
                publication.version,
                policy,
                publication.metadata,
            )
        return item


@dataclass(slots=True, eq=False)
class Node:
    """An agent with its last publication, its TTL, and the effective TTL (``lifetime_s``)."""

    ttl_s: float | None = None
    published: _Published | None = None
    lifetime_s: float | None = None

    @property
    def publication(self) -> Publication | None:
        published = self.published
        return None if published is None else published.publication

    def put(self, publication: Publication | None, default_ttl_s: float | None) -> None:
        self.lifetime_s = default_ttl_s if self.ttl_s is None else self.ttl_s
        self.published = None if publication is None else _Published(publication)


Edge = tuple[str, str, str]
"""An edge as (source, target, policy)."""

_DEFAULT_POLICY = "final_response_only"


def mermaid(
    nodes: Sequence[str],
    edges: Sequence[Edge],
    published: AbstractSet[str],
    labels: Mapping[tuple[str, str], str] = MappingProxyType({}),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a Mermaid flowchart; agents in ``published`` have the class ``published``.

    Args:
        labels: conditions of edges in words, by edge; other edges have none.
        notes: text about a node: what the node runs, how often, and why the node was skipped.
    """
    number = {name: f"n{index}" for index, name in enumerate(nodes)}
    lines = ["flowchart LR"]
    for name, short in number.items():
        label = _as_label(f"{name}: {notes[name]}" if name in notes else name)
        lines.append(f'  {short}["{label}"]' + (":::published" if name in published else ""))
    for source, target, policy in edges:
        condition = labels.get((source, target))
        words = _as_label(_about_edge(policy, condition))
        words = words if condition is None else f'"{words}"'
        arrow = f"-->|{words}|" if words else "-->"
        lines.append(f"  {number[source]} {arrow} {number[target]}")
    lines.append("  classDef published fill:#d6f5d6,stroke:#2e7d32")
    return "\n".join(lines) + "\n"


def _as_label(text: str) -> str:
    # Mermaid has no backslash escapes, so entities replace the characters that would end a label.
    text = text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;")
    return " ".join(text.split())


def dot(
    nodes: Sequence[str],
    edges: Sequence[Edge],
    published: AbstractSet[str],
    labels: Mapping[tuple[str, str], str] = MappingProxyType({}),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a Graphviz digraph; agents in ``published`` are filled; see :func:`mermaid`."""
    lines = ["digraph shared_memory {", "  rankdir=LR;", "  node [shape=box];"]
    for name in nodes:
        look = ["style=filled", 'fillcolor="#d6f5d6"'] if name in published else []
        look += [f"label={_quoted(f'{name}: {notes[name]}')}"] if name in notes else []
        shown = f" [{', '.join(look)}]" if look else ""
        lines.append(f"  {_quoted(name)}{shown};")
    for source, target, policy in edges:
        words = _about_edge(policy, labels.get((source, target)))
        label = f" [label={_quoted(words)}]" if words else ""
        lines.append(f"  {_quoted(source)} -> {_quoted(target)}{label};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _about_edge(policy: str, condition: str | None) -> str:
    words = [] if policy == _DEFAULT_POLICY else [policy]
    return ", ".join([*words, *([] if condition is None else [condition])])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


__all__ = ["MemoryItem", "PropagationPolicy", "Publication", "SharedMemoryGraph"]


Source = tuple[Node, PropagationPolicy]


class SharedMemoryGraph:
    """A directed acyclic graph of agents, with the final answers that the agents pass on.

    Args:
        ttl_s: seconds until a publication expires; ``None``: never. A node's own ``ttl_s``
            overrides this value.
        clock: function that returns the current time, for the times of publications.

    Attributes:
        labels: conditions of edges in words, by edge, for drawings.
        skipped: reason why a node was skipped, by node, for drawings.
        notes: text about what a node runs and how often, by node, for drawings.
        relays: nodes that have no answers, and pass on the publications that they read.
        received: publications from outside the graph, which the nodes without sources read.
    """

    def __init__(self, ttl_s: float | None = None, clock: Clock = utcnow) -> None:
        import networkx as nx

        self.ttl_s = _checked_ttl(ttl_s)
        self._clock = clock
        self._graph: nx.DiGraph[str] = nx.DiGraph()
        self._nodes: dict[str, Node] = {}
        self._lock = threading.RLock()
        self._shares = False  # true: a copy of the graph uses the same structure
        self.relays: frozenset[str] = frozenset()
        self.received: Sequence[MemoryItem] = ()
        self.labels: dict[tuple[str, str], str] = {}
        self.skipped: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._closed: frozenset[tuple[str, str]] = frozenset()
        self._forget()

    @locked
    def without_publications(self) -> Self:
        """Return a copy of the graph without publications; the time grows with the nodes only."""
        self._ranks()  # compute the ranks once for all copies
        new = copy(self)
        new._shares = self._shares = True
        new._nodes = {name: Node(node.ttl_s) for name, node in self._nodes.items()}
        new._lock = threading.RLock()
        new._sources = {}
        return new

    def _change(self) -> None:
        if self._shares:
            self._graph, self._shares = self._graph.copy(), False
        self._forget()

    def _forget(self) -> None:
        self._rank: dict[str, int] | None = None
        self._sources: dict[str, tuple[Source, ...]] = {}
        self._ancestors: dict[str, frozenset[str]] = {}

    # Structure

    @locked
    def add_agent(self, agent_id: str, ttl_s: float | None = None) -> None:
        """Add a node. If the node exists, change its ``ttl_s`` unless ``ttl_s`` is ``None``."""
        _checked_ttl(ttl_s)
        node = self._nodes.get(agent_id)
        if node is None:
            self._change()
            node = self._nodes[agent_id] = Node()
            self._graph.add_node(agent_id)
        if ttl_s is not None:
            node.ttl_s = ttl_s
            node.put(node.publication, self.ttl_s)

    @locked
    def add_edge(
        self,
        src: str,
        dst: str,
        policy: PropagationPolicy | str = PropagationPolicy.FINAL_RESPONSE_ONLY,
    ) -> None:
        """Add an edge and its missing nodes; if the edge exists, change its policy.

        Raises:
            CycleError: the edge would close a cycle; the graph is unchanged.
        """
        if src == dst:
            raise CycleError((src, dst))
        if self._may_reach(dst, src):
            import networkx as nx

            raise CycleError((src, *nx.shortest_path(self._graph, dst, src)))
        self._add(src, dst, PropagationPolicy(policy))

    @locked
    def add_edges(self, edges: Sequence[tuple[str, str, PropagationPolicy]]) -> None:
        """Add many edges as :meth:`add_edge` does, but search only once for cycles."""
        refuse_cycle([*self._graph.edges, *((src, dst) for src, dst, _ in edges)])
        for edge in edges:
            self._add(*edge)

    def _add(self, src: str, dst: str, policy: PropagationPolicy) -> None:
        self.add_agent(src)
        self.add_agent(dst)
        self._change()
        self._graph.add_edge(src, dst, policy=policy)

    def _may_reach(self, start: str, goal: str) -> bool:
        if start not in self._nodes or goal not in self._nodes:
            return False
        # If no edge leaves ``start`` or no edge enters ``goal``, there is no path.
        if not self._graph.succ[start] or not self._graph.pred[goal]:
            return False
        import networkx as nx

        return nx.has_path(self._graph, start, goal)

    def has_node(self, agent_id: str) -> bool:
        """Return true if the graph has this agent."""
        return agent_id in self._nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        """All agents, in the order in which they were added."""
        return tuple(self._nodes)

    @locked
    def predecessors(self, agent_id: str) -> list[str]:
        """Return the agents from which ``agent_id`` reads directly, in topological order."""
        rank = self._ranks()
        return sorted(self._graph.pred.get(agent_id, ()), key=rank.__getitem__)

    @locked
    def successors(self, agent_id: str) -> list[str]:
        """Return the agents that read directly from ``agent_id``, in topological order."""
        rank = self._ranks()
        return sorted(self._graph.succ.get(agent_id, ()), key=rank.__getitem__)

    @locked
    def ancestors(self, agent_id: str) -> frozenset[str]:
        """Return all agents with a path to ``agent_id``; cached until the graph changes."""
        found = self._ancestors.get(agent_id)
        if found is None:
            import networkx as nx

            known = agent_id in self._nodes
            found = frozenset(nx.ancestors(self._graph, agent_id)) if known else frozenset()
            self._ancestors[agent_id] = found
        return found

    @locked
    def edge_policy(self, src: str, dst: str) -> PropagationPolicy:
        """Return the policy of an edge; raise ``KeyError`` if the edge does not exist."""
        policy: PropagationPolicy = self._graph.succ[src][dst]["policy"]
        return policy

    @locked
    def get_edges_for_nodes(self, ids: Iterable[str]) -> list[tuple[str, str]]:
        """Return the edges between ``ids``, sorted by the source's rank, then the target's rank."""
        wanted = set(ids)
        return [
            (source, target)
            for source in self.get_topological_order(wanted)
            for target in self.successors(source)
            if target in wanted
        ]

    @locked
    def get_topological_order(self, ids: Iterable[str] | None = None) -> list[str]:
        """Return the agents, each after its ancestors, and otherwise in the order of addition.

        With ``ids``, the method filters the order of the whole graph, because a subgraph would lose
        dependencies through other nodes. The result omits unknown ids.
        """
        order = self._ranks()
        if ids is None:
            return list(order)
        wanted = set(ids)
        return [name for name in order if name in wanted]

    def _ranks(self) -> dict[str, int]:
        """Return the rank of each node in the topological order; the dict has the same order.

        The method uses Kahn's algorithm; of several free nodes, the node added first comes first.
        """
        if self._rank is None:
            names = list(self._nodes)
            number = {name: index for index, name in enumerate(names)}
            missing = [len(self._graph.pred[name]) for name in names]
            free = [index for index, count in enumerate(missing) if count == 0]
            order: dict[str, int] = {}
            while free:
                name = names[heapq.heappop(free)]
                order[name] = len(order)
                for target in self._graph.succ[name]:
                    index = number[target]
                    missing[index] -= 1
                    if missing[index] == 0:
                        heapq.heappush(free, index)
            self._rank = order
        return self._rank

    # Memory

    async def publish(
        self,
        agent_id: str,
        content: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        timestamp: datetime | None = None,
        tool_results: Iterable[str | ToolResultLike] = (),
        messages: Iterable[str | MessageLike] = (),
    ) -> Publication:
        """Publish an agent's answer for the agent's readers; add an unknown agent as a node.

        Args:
            version: the publication's number, if a resumed run repeats the publication. A stored
                publication with this or a higher number stays. ``None``: the next number.
            timestamp: time of a publication that a resumed run repeats; ``None``: the current time.
            tool_results: tool results of the query, for edges with the policy ``tool_results``.
            messages: messages of the answered query, for edges with the policy ``full_history``.
        """
        with self._lock:  # held for microseconds, and never during an await
            self.add_agent(agent_id)
            node = self._nodes[agent_id]
            last = 0 if node.publication is None else node.publication.version
            publication = Publication(
                agent_id=agent_id,
                content=content,
                version=last + 1 if version is None else version,
                timestamp=timestamp or self._clock(),
                metadata=dict(metadata or {}),
                tool_results=tuple(tool_results),
                messages=tuple(messages),
            )
            if publication.version > last:
                node.put(publication, self.ttl_s)
            return publication

    @locked
    def restore(self, publication: Publication) -> bool:
        """Restore an earlier publication with its version and time.

        Returns:
            False if the graph does not have the agent, or has a publication of the agent with the
            same or a higher version.
        """
        node = self._nodes.get(publication.agent_id)
        if node is None or (
            node.publication is not None and node.publication.version >= publication.version
        ):
            return False
        node.put(publication, self.ttl_s)
        return True

    def publication(self, agent_id: str) -> Publication | None:
        """Return an agent's last publication, even if it has expired; ``None``: no publication."""
        node = self._nodes.get(agent_id)
        return None if node is None else node.publication

    @locked
    def clear_published_data(self) -> None:
        """Delete all publications and their version numbers, but keep nodes and edges."""
        for node in self._nodes.values():
            node.put(None, self.ttl_s)

    @locked
    def close_edge(self, src: str, dst: str) -> None:
        """Stop an edge from passing on answers; the order of the nodes does not change."""
        self._closed |= {(src, dst)}
        self._sources.clear()

    @locked
    def withdraw(self, agent_id: str) -> None:
        """Delete a node's publication, so that no node reads it."""
        self._nodes[agent_id].put(None, self.ttl_s)

    def pull_for(self, agent_id: str, only: Collection[str] | None = None) -> list[MemoryItem]:
        """Return the publications of the direct predecessors, in topological order; O(in-degree).

        Args:
            only: sources to read, even if their publications have expired; ``None``: all sources
                whose publications have not expired.
        """
        items = self._pull(self._direct_sources(agent_id), only)
        if self.received and self._reads_received(agent_id):
            items += [item for item in self.received if only is None or item.source_id in only]
        return items

    def _reads_received(self, agent_id: str) -> bool:
        sources = self._graph.pred.get(agent_id, ())
        return not sources or any(
            name in self.relays and self._reads_received(name)
            for name in sources
            if (name, agent_id) not in self._closed
        )

    @locked
    def pull_for_indirect(
        self, agent_id: str, only: Collection[str] | None = None
    ) -> list[MemoryItem]:
        """Return the final answers of all ancestors of ``agent_id``, the nearest ancestors first.

        Ancestors at the same distance are in topological order. For ``only``, see :meth:`pull_for`.
        """
        if agent_id not in self._nodes:
            return []
        import networkx as nx

        rank = self._ranks()
        layers = nx.bfs_layers(self._graph.reverse(copy=False), agent_id)
        near = [name for layer in layers for name in sorted(layer, key=rank.__getitem__)]
        final = PropagationPolicy.FINAL_RESPONSE_ONLY
        sources = ((self._nodes[name], final) for name in near[1:] if name not in self.relays)
        return self._pull(sources, only)

    @locked
    def unpublished_predecessors(self, agent_id: str) -> list[str]:
        """Return the direct predecessors of ``agent_id`` that have no publication."""
        if all(node.publication is not None for node, _ in self._direct_sources(agent_id)):
            return []
        return [
            name for name in self.predecessors(agent_id) if self._nodes[name].publication is None
        ]

    def _direct_sources(self, agent_id: str) -> tuple[Source, ...]:
        sources = self._sources.get(agent_id)
        return self._find_sources(agent_id) if sources is None else sources

    @locked
    def _find_sources(self, agent_id: str) -> tuple[Source, ...]:
        sources = tuple(
            (self._nodes[name], policy) for name, policy in self._read_by(agent_id).items()
        )
        if agent_id in self._nodes:
            self._sources[agent_id] = sources
        return sources

    def _read_by(self, agent_id: str) -> dict[str, PropagationPolicy]:
        """Return the policies of a node's direct sources by source, in topological order."""
        edges = self._graph.pred.get(agent_id, {})
        found: dict[str, PropagationPolicy] = {}
        for name in self.predecessors(agent_id):
            if (name, agent_id) in self._closed:
                continue
            found |= self._read_by(name) if name in self.relays else {name: edges[name]["policy"]}
        return found

    @locked
    def direct_sources(self, agent_id: str) -> set[str]:
        """Return the nodes that :meth:`pull_for` reads, with or without a publication."""
        return set(self._read_by(agent_id))

    def _pull(self, sources: Iterable[Source], only: Collection[str] | None) -> list[MemoryItem]:
        items = []
        now: datetime | None = None
        for node, policy in sources:
            published = node.published  # read once, because another thread may publish at any time
            if published is None:
                continue
            publication = published.publication
            if only is not None:
                if publication.agent_id not in only:
                    continue
            elif node.lifetime_s is not None:
                if now is None:
                    now = self._clock()
                if (now - publication.timestamp).total_seconds() > node.lifetime_s:
                    continue
            items.append(published.items.get(policy) or published.item(policy))
        return items

    # Serialisation

    @locked
    def to_dict(self) -> dict[str, Any]:
        """Return nodes, edges and publications as JSON that :meth:`from_dict` reads."""
        return {
            "ttl_s": self.ttl_s,
            "nodes": [
                {
                    "id": name,
                    "ttl_s": node.ttl_s,
                    "published": None if node.publication is None else node.publication.to_dict(),
                }
                for name, node in self._nodes.items()
            ],
            "edges": [
                {"source": source, "target": target, "policy": policy}
                for source, target, policy in self._edges()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, clock: Clock = utcnow) -> Self:
        """Build a graph from the result of :meth:`to_dict`.

        Raises:
            CycleError: the edges form a cycle.
        """
        graph = cls(ttl_s=data.get("ttl_s"), clock=clock)
        for node in data["nodes"]:
            graph.add_agent(node["id"], node.get("ttl_s"))
            if published := node.get("published"):
                graph.restore(Publication.from_dict(node["id"], published))
        for edge in data["edges"]:
            graph.add_edge(edge["source"], edge["target"], edge["policy"])
        return graph

    def to_mermaid(self) -> str:
        """Return a Mermaid flowchart that marks the nodes with a publication."""
        return mermaid(*self._diagram(), self.labels, self._about_nodes())

    def to_dot(self) -> str:
        """Return a Graphviz digraph that marks the nodes with a publication."""
        return dot(*self._diagram(), self.labels, self._about_nodes())

    def _about_nodes(self) -> dict[str, str]:
        found = dict(self.notes)
        for name, reason in self.skipped.items():
            note = f"{found[name]}; " if name in found else ""
            found[name] = f"{note}skipped: {reason}"
        return found

    @locked
    def _diagram(self) -> tuple[tuple[str, ...], list[Edge], frozenset[str]]:
        published = frozenset(n for n, node in self._nodes.items() if node.publication is not None)
        return self.nodes, self._edges(), published

    def _edges(self) -> list[Edge]:
        return [
            (source, target, str(self.edge_policy(source, target)))
            for source, target in self.get_edges_for_nodes(self._nodes)
        ]


def _checked_ttl(ttl_s: float | None) -> float | None:
    if ttl_s is not None and not (isfinite(ttl_s) and ttl_s > 0):
        raise InvalidInputError(f"ttl_s must be a positive number of seconds, not {ttl_s}")
    return ttl_s
