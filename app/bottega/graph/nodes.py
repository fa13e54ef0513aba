"""Nodes of the shared-memory graph, and its lock."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from bottega.graph.publication import MemoryItem, PropagationPolicy, Publication

P = ParamSpec("P")
T = TypeVar("T")


class Locked(Protocol):
    """An object with a lock."""

    _lock: threading.RLock


L = TypeVar("L", bound=Locked)


def locked(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Run a short method, which never waits, under its object's lock."""

    @functools.wraps(method)
    def run(self: L, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


@dataclass(frozen=True, slots=True, eq=False)
class _Published:
    """A publication, and how readers of each policy see it."""

    publication: Publication
    items: dict[PropagationPolicy, MemoryItem] = field(default_factory=dict)

    def item(self, policy: PropagationPolicy) -> MemoryItem:
        """Return the publication for readers of a policy; built once."""
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
    """An agent with its last publication, its own TTL, and the TTL in effect (``lifetime_s``)."""

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
