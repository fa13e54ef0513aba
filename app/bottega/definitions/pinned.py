"""Pinned definitions of runs; a worker caches them, because a version never changes."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID

import asyncpg
from cachetools import LRUCache
from pydantic_core import from_json

from bottega import metrics
from bottega.definitions.graphs import GraphRef, expanded

_READ = "SELECT * FROM pinned_definitions($1, $2, $3, $4)"


class Pin(NamedTuple):
    """Name and version of an agent, a graph, a provider or an MCP server."""

    tenant_id: UUID
    kind: Literal["agent", "graph", "provider", "mcp_server"]
    name: str
    version: int


class PinnedModels(Protocol):
    """The model servers that a run uses or, if the run has ended, has used.

    Attributes:
        tenant: the tenant's name.
        pins: versions of definitions that the run uses.
        providers: definitions of the pinned providers of the tenant, by name.
        operators: names of the pinned providers of the operator.
    """

    @property
    def tenant_id(self) -> UUID: ...
    @property
    def tenant(self) -> str: ...
    @property
    def pins(self) -> Sequence[Pin]: ...
    @property
    def providers(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def operators(self) -> frozenset[str]: ...


def pins_of(tenant_id: UUID, pinned: Mapping[str, Any]) -> Iterator[Pin]:
    """Yield a run's pins from the column ``pinned`` of the run's row."""
    for name, version in (pinned.get("agents") or {}).items():
        yield Pin(tenant_id, "agent", name, version)
    for name, version in (pinned.get("providers") or {}).items():
        yield Pin(tenant_id, "provider", name, version)
    for name, version in (pinned.get("mcp_servers") or {}).items():
        yield Pin(tenant_id, "mcp_server", name, version)
    if graph := pinned.get("graph"):
        yield Pin(tenant_id, "graph", graph["name"], graph["version"])
        for name, versions in graph.get("below", {}).items():
            yield from (Pin(tenant_id, "graph", name, version) for version in versions)


def draft_of(pinned: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return {agent's name: definition} from the run of a draft; ``{}`` for other runs."""
    draft = pinned.get("draft")
    return {} if draft is None else {draft["agent"]: draft["definition"]}


def pinned_graph(
    tenant_id: UUID, pinned: Mapping[str, Any], definitions: Mapping[Pin, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the definition of a run's graph, with the definitions of its sub-graphs.

    The result is ``None`` if the run has no graph, or ``definitions`` does not have the graph.
    """
    if (graph := pinned.get("graph")) is None:
        return None
    below = graph.get("below", {})

    def definition_of(ref: GraphRef) -> Mapping[str, Any]:
        name, version = ref
        return definitions[Pin(tenant_id, "graph", name, version or below[name][0])]

    definition = definitions.get(Pin(tenant_id, "graph", graph["name"], graph["version"]))
    return None if definition is None else expanded(definition, definition_of)


class PinnedDefinitions:
    """Cache of definitions by version, which drops the least recently used definitions first."""

    def __init__(self, pool: asyncpg.Pool, characters: int = 16_000_000) -> None:
        """Create an empty cache.

        Args:
            characters: maximum number of characters of the cached definitions as JSON.
        """
        self._pool = pool
        self._cache: LRUCache[Pin, tuple[dict[str, Any], int]] = LRUCache(
            characters, getsizeof=lambda entry: entry[1]
        )

    async def get(self, pins: Set[Pin]) -> Mapping[Pin, dict[str, Any]]:
        """Return the existing definitions of pins; read all uncached definitions in one query."""
        found = {}
        for pin in pins & self._cache.keys():
            found[pin] = self._cache[pin][0]
        if found:
            metrics.cache_hits.labels("definitions").inc(len(found))
        if missing := list(pins - found.keys()):
            rows = await self._pool.fetch(_READ, *map(list, zip(*missing, strict=True)))
            for row in rows:
                if (text := row["definition"]) is not None:
                    pin = missing[row["number"] - 1]
                    found[pin] = from_json(text)
                    with suppress(ValueError):  # the definition is too long for the cache
                        self._cache[pin] = found[pin], len(text)
        return found
