"""Shared-memory graph. Uses only networkx and the standard library.

An edge ``source -> target`` passes the source's last answer to the target's next query. Agents
publish and pull concurrently, from tasks of any event loop and from any thread.
"""

import heapq
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from math import isfinite
from typing import Any, Self

import networkx as nx

from bottega.clock import Clock, utcnow
from bottega.errors import CycleError, InvalidInputError
from bottega.graph import diagrams
from bottega.graph.cycles import refuse_cycle
from bottega.graph.nodes import Node, locked
from bottega.graph.publication import MemoryItem, PropagationPolicy, Publication
from bottega.graph.rendering import MessageLike, ToolResultLike

__all__ = ["MemoryItem", "PropagationPolicy", "Publication", "SharedMemoryGraph"]


Source = tuple[Node, PropagationPolicy]


class SharedMemoryGraph:
    """A directed acyclic graph of agents that pass on their final answers, and the publications.

    Args:
        ttl_s: seconds until a publication expires; ``None``: never. A node's own ``ttl_s``
            overrides it.
        clock: source of the publications' times.
    """

    def __init__(self, ttl_s: float | None = None, clock: Clock = utcnow) -> None:
        self.ttl_s = _checked_ttl(ttl_s)
        self._clock = clock
        self._graph: nx.DiGraph[str] = nx.DiGraph()
        self._nodes: dict[str, Node] = {}
        self._lock = threading.RLock()
        self._shares = False  # its structure is another graph's too: copy it before a change
        self._forget()

    @locked
    def without_publications(self) -> Self:
        """Return a graph of the same structure, which nothing was published to; O(nodes)."""
        self._ranks()  # once for all copies
        new = copy(self)
        new._shares = self._shares = True
        new._nodes = {name: Node(node.ttl_s) for name, node in self._nodes.items()}
        new._lock = threading.RLock()
        new._sources = {}
        return new

    def _change(self) -> None:
        """Prepare a change of the structure."""
        if self._shares:
            self._graph, self._shares = self._graph.copy(), False
        self._forget()

    def _forget(self) -> None:
        """Clear the caches after a change of the structure."""
        self._rank: dict[str, int] | None = None
        self._sources: dict[str, tuple[Source, ...]] = {}
        self._ancestors: dict[str, frozenset[str]] = {}

    # Structure

    @locked
    def add_agent(self, agent_id: str, ttl_s: float | None = None) -> None:
        """Add a node; for an existing one only update ``ttl_s``, if given."""
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
        """Let ``dst`` read from ``src``; add missing nodes, replace an existing edge's policy.

        Raises:
            CycleError: the edge would close a cycle; nothing was added.
        """
        if src == dst:
            raise CycleError((src, dst))
        if self._may_reach(dst, src):
            raise CycleError((src, *nx.shortest_path(self._graph, dst, src)))
        self._add(src, dst, PropagationPolicy(policy))

    @locked
    def add_edges(self, edges: Sequence[tuple[str, str, PropagationPolicy]]) -> None:
        """Add many edges as :meth:`add_edge` does, with one search for cycles."""
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
        # If a graph is built along its edges, one of these is empty and no search is needed.
        if not self._graph.succ[start] or not self._graph.pred[goal]:
            return False
        return nx.has_path(self._graph, start, goal)

    def has_node(self, agent_id: str) -> bool:
        """Return true if the graph has this agent."""
        return agent_id in self._nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        """All agents, in the order of their addition."""
        return tuple(self._nodes)

    @locked
    def predecessors(self, agent_id: str) -> list[str]:
        """Return the agents that ``agent_id`` reads from directly, in topological order."""
        rank = self._ranks()
        return sorted(self._graph.pred.get(agent_id, ()), key=rank.__getitem__)

    @locked
    def successors(self, agent_id: str) -> list[str]:
        """Return the agents that read directly from ``agent_id``, in topological order."""
        rank = self._ranks()
        return sorted(self._graph.succ.get(agent_id, ()), key=rank.__getitem__)

    @locked
    def ancestors(self, agent_id: str) -> frozenset[str]:
        """Return all agents with a path to ``agent_id``; cached until the structure changes."""
        found = self._ancestors.get(agent_id)
        if found is None:
            known = agent_id in self._nodes
            found = frozenset(nx.ancestors(self._graph, agent_id)) if known else frozenset()
            self._ancestors[agent_id] = found
        return found

    @locked
    def edge_policy(self, src: str, dst: str) -> PropagationPolicy:
        """Return the policy of an edge; raise ``KeyError`` if there is no such edge."""
        policy: PropagationPolicy = self._graph.succ[src][dst]["policy"]
        return policy

    @locked
    def get_edges_for_nodes(self, ids: Iterable[str]) -> list[tuple[str, str]]:
        """Return the edges within ``ids``, by topological order of source, then target."""
        wanted = set(ids)
        return [
            (source, target)
            for source in self.get_topological_order(wanted)
            for target in self.successors(source)
            if target in wanted
        ]

    @locked
    def get_topological_order(self, ids: Iterable[str] | None = None) -> list[str]:
        """Return the agents, each after its ancestors; ties in the order of addition.

        With ``ids``, filters the order of the whole graph: a subgraph would lose the dependencies
        through other nodes. Unknown ids are dropped.
        """
        order = self._ranks()
        if ids is None:
            return list(order)
        wanted = set(ids)
        return [name for name in order if name in wanted]

    def _ranks(self) -> dict[str, int]:
        """Return each node's rank in the topological order; the dict has the same order.

        Kahn's algorithm; of the free nodes it takes the one added first.
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
        """Publish an agent's answer to its readers; an unknown id adds the node.

        Args:
            version: set it to repeat an old publication; it replaces an older version only.
                ``None``: the next version.
            timestamp: of a repeated publication; ``None``: now.
            tool_results: tool results of the answered query; for edges with ``tool_results``.
            messages: messages of that query; for edges with ``full_history``.
        """
        with self._lock:  # held for microseconds, and never across an await
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
            False if the graph does not have the agent, or has this version or a newer one.
        """
        node = self._nodes.get(publication.agent_id)
        if node is None or (
            node.publication is not None and node.publication.version >= publication.version
        ):
            return False
        node.put(publication, self.ttl_s)
        return True

    def publication(self, agent_id: str) -> Publication | None:
        """Return an agent's last publication, expired or not; ``None`` without one."""
        node = self._nodes.get(agent_id)
        return None if node is None else node.publication

    @locked
    def clear_published_data(self) -> None:
        """Delete all publications and versions; keep the structure."""
        for node in self._nodes.values():
            node.put(None, self.ttl_s)

    def pull_for(self, agent_id: str, only: Collection[str] | None = None) -> list[MemoryItem]:
        """Return the direct predecessors' publications, in topological order. O(in-degree).

        Args:
            only: sources to read, even if expired; ``None``: all that have not expired.
        """
        return self._pull(self._direct_sources(agent_id), only)

    @locked
    def pull_for_indirect(
        self, agent_id: str, only: Collection[str] | None = None
    ) -> list[MemoryItem]:
        """Return the final answers of all ancestors of ``agent_id``, by distance, nearest first.

        Ties come in topological order. ``only`` as for :meth:`pull_for`.
        """
        if agent_id not in self._nodes:
            return []
        rank = self._ranks()
        layers = nx.bfs_layers(self._graph.reverse(copy=False), agent_id)
        near = [name for layer in layers for name in sorted(layer, key=rank.__getitem__)]
        final = PropagationPolicy.FINAL_RESPONSE_ONLY
        return self._pull(((self._nodes[name], final) for name in near[1:]), only)

    @locked
    def unpublished_predecessors(self, agent_id: str) -> list[str]:
        """Return the direct predecessors of ``agent_id`` without a publication."""
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
        edges = self._graph.pred.get(agent_id, {})
        sources = tuple(
            (self._nodes[name], edges[name]["policy"]) for name in self.predecessors(agent_id)
        )
        if agent_id in self._nodes:
            self._sources[agent_id] = sources
        return sources

    def _pull(self, sources: Iterable[Source], only: Collection[str] | None) -> list[MemoryItem]:
        items = []
        now: datetime | None = None
        for node, policy in sources:
            published = node.published  # once: another thread may publish now
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
        """Return structure and publications as JSON, for :meth:`from_dict`."""
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
            CycleError: its edges form a cycle.
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
        return diagrams.mermaid(*self._diagram())

    def to_dot(self) -> str:
        """Return a Graphviz digraph that marks the nodes with a publication."""
        return diagrams.dot(*self._diagram())

    @locked
    def _diagram(self) -> tuple[tuple[str, ...], list[diagrams.Edge], frozenset[str]]:
        published = frozenset(n for n, node in self._nodes.items() if node.publication is not None)
        return self.nodes, self._edges(), published

    def _edges(self) -> list[diagrams.Edge]:
        return [
            (source, target, str(self.edge_policy(source, target)))
            for source, target in self.get_edges_for_nodes(self._nodes)
        ]


def _checked_ttl(ttl_s: float | None) -> float | None:
    if ttl_s is not None and not (isfinite(ttl_s) and ttl_s > 0):
        raise InvalidInputError(f"ttl_s must be a positive number of seconds, not {ttl_s}")
    return ttl_s
