"""Shared-memory graph (spec page 2, G1 to G8). Pure: networkx and the standard library.

An edge ``source -> target`` says that what the source answers last flows into the target's next
query. The structure is built first; publishing and pulling then happen side by side.
"""

import asyncio
import heapq
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from math import isfinite
from typing import Any, Self

import networkx as nx

from bottega.clock import Clock, utcnow
from bottega.errors import CycleError, InvalidInputError
from bottega.graph import diagrams
from bottega.graph.publication import MemoryItem, PropagationPolicy, Publication
from bottega.graph.rendering import MessageLike, ToolResultLike

__all__ = ["MemoryItem", "PropagationPolicy", "Publication", "SharedMemoryGraph"]


class _Node:
    """An agent: its own lifetime for publications, the one that counts, and the last of them."""

    __slots__ = ("items", "lifetime_s", "publication", "ttl_s")

    def __init__(self) -> None:
        self.ttl_s: float | None = None
        self.publication: Publication | None = None
        self.lifetime_s: float | None = None
        self.items: dict[PropagationPolicy, MemoryItem] = {}

    def put(self, publication: Publication | None, default_ttl_s: float | None) -> None:
        self.publication = publication
        self.items = {}
        self.lifetime_s = default_ttl_s if self.ttl_s is None else self.ttl_s

    def item(self, publication: Publication, policy: PropagationPolicy) -> MemoryItem:
        """The publication as a reader along ``policy`` gets it; built once per publication."""
        item = self.items.get(policy)
        if item is None:
            item = self.items[policy] = MemoryItem(
                publication.agent_id,
                publication.text_for(policy),
                publication.timestamp,
                publication.version,
                policy,
            )
        return item


Source = tuple[_Node, PropagationPolicy]


class SharedMemoryGraph:
    """Who passes final answers on to whom, and what was published so far.

    Args:
        ttl_s: seconds after which a publication is no longer pulled; ``None`` keeps it for ever.
            A node's own ``ttl_s`` goes first.
        clock: where publications get their time from.
    """

    def __init__(self, ttl_s: float | None = None, clock: Clock = utcnow) -> None:
        self.ttl_s = _checked_ttl(ttl_s)
        self._clock = clock
        self._graph: nx.DiGraph[str] = nx.DiGraph()
        self._nodes: dict[str, _Node] = {}
        self._lock = asyncio.Lock()
        self._forget()

    def _forget(self) -> None:
        """Drop what was derived from the structure, since that has changed."""
        self._rank: dict[str, int] | None = None
        self._sources: dict[str, tuple[Source, ...]] = {}
        self._ancestors: dict[str, frozenset[str]] = {}

    # Structure

    def add_agent(self, agent_id: str, ttl_s: float | None = None) -> None:
        """Add a node; one that exists stays as it is, but for a ``ttl_s`` given now."""
        _checked_ttl(ttl_s)
        node = self._nodes.get(agent_id)
        if node is None:
            node = self._nodes[agent_id] = _Node()
            self._graph.add_node(agent_id)
            self._forget()
        if ttl_s is not None:
            node.ttl_s = ttl_s
            node.put(node.publication, self.ttl_s)

    def add_edge(
        self,
        src: str,
        dst: str,
        policy: PropagationPolicy | str = PropagationPolicy.FINAL_RESPONSE_ONLY,
    ) -> None:
        """Let ``dst`` read what ``src`` publishes. Adds missing nodes; sets an edge's policy anew.

        Raises:
            CycleError: the edge would close a circle; nothing was added.
        """
        policy = PropagationPolicy(policy)
        if src == dst:
            raise CycleError((src, dst))
        if self._may_reach(dst, src):
            raise CycleError((src, *nx.shortest_path(self._graph, dst, src)))
        self.add_agent(src)
        self.add_agent(dst)
        self._graph.add_edge(src, dst, policy=policy)
        self._forget()

    def _may_reach(self, start: str, goal: str) -> bool:
        if start not in self._nodes or goal not in self._nodes:
            return False
        # Most graphs are built along their edges: then one of these is empty and no search runs.
        if not self._graph.succ[start] or not self._graph.pred[goal]:
            return False
        return nx.has_path(self._graph, start, goal)

    def has_node(self, agent_id: str) -> bool:
        """Whether the graph has this agent."""
        return agent_id in self._nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        """All agents, in the order in which they were added."""
        return tuple(self._nodes)

    def predecessors(self, agent_id: str) -> list[str]:
        """The agents that ``agent_id`` reads from directly, in topological order."""
        rank = self._ranks()
        return sorted(self._graph.pred.get(agent_id, ()), key=rank.__getitem__)

    def successors(self, agent_id: str) -> list[str]:
        """The agents that read directly from ``agent_id``, in topological order."""
        rank = self._ranks()
        return sorted(self._graph.succ.get(agent_id, ()), key=rank.__getitem__)

    def ancestors(self, agent_id: str) -> frozenset[str]:
        """All agents from which a path leads to ``agent_id``; kept until the structure changes."""
        found = self._ancestors.get(agent_id)
        if found is None:
            known = agent_id in self._nodes
            found = frozenset(nx.ancestors(self._graph, agent_id)) if known else frozenset()
            self._ancestors[agent_id] = found
        return found

    def edge_policy(self, src: str, dst: str) -> PropagationPolicy:
        """The policy of an edge.

        Raises:
            KeyError: there is no such edge.
        """
        policy: PropagationPolicy = self._graph.succ[src][dst]["policy"]
        return policy

    def get_edges_for_nodes(self, ids: Iterable[str]) -> list[tuple[str, str]]:
        """The edges with both ends in ``ids``, by topological order of source, then target."""
        wanted = set(ids)
        return [
            (source, target)
            for source in self.get_topological_order(wanted)
            for target in self.successors(source)
            if target in wanted
        ]

    def get_topological_order(self, ids: Iterable[str] | None = None) -> list[str]:
        """The agents, each after all it depends on; ties by order of insertion.

        With ``ids`` the whole graph's order, filtered: the subgraph of ``ids`` would lose what
        binds two of them through a node left out. Unknown ids are dropped.
        """
        order = self._ranks()
        if ids is None:
            return list(order)
        wanted = set(ids)
        return [name for name in order if name in wanted]

    def _ranks(self) -> dict[str, int]:
        """Each node's place in the topological order, the dict itself being in that order.

        Kahn's algorithm that always takes the free node inserted first.
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
        """Make ``content`` what readers of this agent get from now on; an unknown id adds the node.

        Args:
            version: of what is published again; readers keep what is newer. Else it is the next.
            timestamp: of what is published again; ``None`` is now.
            tool_results: of the query that was answered; for edges with ``tool_results``.
            messages: of that query; for edges with ``full_history``.
        """
        async with self._lock:
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

    def restore(self, publication: Publication) -> bool:
        """Put back what an agent published earlier, with its version and time.

        Returns:
            whether it was taken: not if the graph has no such agent, or has as new a version.
        """
        node = self._nodes.get(publication.agent_id)
        if node is None or (
            node.publication is not None and node.publication.version >= publication.version
        ):
            return False
        node.put(publication, self.ttl_s)
        return True

    def publication(self, agent_id: str) -> Publication | None:
        """What an agent published last, expired or not; ``None`` if nothing or unknown."""
        node = self._nodes.get(agent_id)
        return None if node is None else node.publication

    def clear_published_data(self) -> None:
        """Forget everything published, versions included; the structure stays."""
        for node in self._nodes.values():
            node.put(None, self.ttl_s)

    def pull_for(self, agent_id: str, only: Collection[str] | None = None) -> list[MemoryItem]:
        """What the agent's direct predecessors published, in topological order. O(in-degree).

        Those that published nothing, or too long ago, are left out; unknown ids give ``[]``.

        Args:
            only: the sources to take, however old; ``None`` takes all that have not expired.
        """
        return self._pull(self._direct_sources(agent_id), only)

    def pull_for_indirect(
        self, agent_id: str, only: Collection[str] | None = None
    ) -> list[MemoryItem]:
        """The final answers of all ancestors of ``agent_id``, nearest first, each once.

        Equally near ones come in topological order. ``only`` as for :meth:`pull_for`.
        """
        if agent_id not in self._nodes:
            return []
        rank = self._ranks()
        layers = nx.bfs_layers(self._graph.reverse(copy=False), agent_id)
        near = [name for layer in layers for name in sorted(layer, key=rank.__getitem__)]
        final = PropagationPolicy.FINAL_RESPONSE_ONLY
        return self._pull(((self._nodes[name], final) for name in near[1:]), only)

    def unpublished_predecessors(self, agent_id: str) -> list[str]:
        """The direct predecessors of ``agent_id`` that have published nothing yet."""
        if all(node.publication is not None for node, _ in self._direct_sources(agent_id)):
            return []
        return [
            name for name in self.predecessors(agent_id) if self._nodes[name].publication is None
        ]

    def _direct_sources(self, agent_id: str) -> tuple[Source, ...]:
        sources = self._sources.get(agent_id)
        if sources is None:
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
            publication = node.publication
            if publication is None:
                continue
            if only is not None:
                if publication.agent_id not in only:
                    continue
            elif node.lifetime_s is not None:
                if now is None:
                    now = self._clock()
                if (now - publication.timestamp).total_seconds() > node.lifetime_s:
                    continue
            items.append(node.items.get(policy) or node.item(publication, policy))
        return items

    # Forms

    def to_dict(self) -> dict[str, Any]:
        """Structure and published memory as JSON; :meth:`from_dict` takes it back."""
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
        """A graph of its own with the structure and memory of :meth:`to_dict`.

        Raises:
            CycleError: its edges close a circle.
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
        """The graph as a Mermaid flowchart; nodes that have published are marked."""
        return diagrams.mermaid(*self._drawn())

    def to_dot(self) -> str:
        """The graph as a Graphviz digraph; nodes that have published are marked."""
        return diagrams.dot(*self._drawn())

    def _drawn(self) -> tuple[tuple[str, ...], list[diagrams.Edge], frozenset[str]]:
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
