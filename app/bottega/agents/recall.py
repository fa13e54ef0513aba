"""Recall of ancestors' publications: those most similar to an agent's query, or all."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from bottega.agents.messages import SHARED_MEMORY, HumanMessage, StandardMessage, SystemMessage
from bottega.agents.query import Query
from bottega.agents.shared_memory import AWARENESS, shared_message
from bottega.errors import InvalidInputError
from bottega.graph.shared_memory import MemoryItem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

logger = logging.getLogger(__name__)

RECALLED = "shared_memory_recalled"

Recalled = tuple[MemoryItem, float]
"""A publication and its cosine with the query, rounded to four places."""

_PLACES = 4


class RecallEmbedder(Protocol):
    """The part of an embedder that :class:`Recall` needs."""

    async def embed(self, texts: Sequence[str]) -> "Vectors":
        """Return vectors of length 1, one row per text, in order."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A publication's vector: one row of a batch, whose embedding may still run."""

    content: str
    batch: "asyncio.Task[Vectors]"
    index: int

    def holds(self, content: str) -> bool:
        return self.content == content and not (self.batch.done() and _failed(self.batch))


def _failed(batch: "asyncio.Task[Vectors]") -> bool:
    return batch.cancelled() or batch.exception() is not None


class Recall:
    """Semantic recall of publications of an agent's indirect ancestors.

    One instance may serve all agents of a graph. It caches the vector of each source's current
    publication, so each publication is embedded once.

    Args:
        embedder: if it has a method ``embed_queries``, that makes the queries' vectors.
        k: maximum number of publications per query.
        floor: least cosine of a publication with the query; below it, none is better than chance.

    Raises:
        InvalidInputError: ``k`` is below 1.
    """

    def __init__(self, embedder: RecallEmbedder, k: int, *, floor: float = -1.0) -> None:
        if k < 1:
            raise InvalidInputError(f"k must be at least 1, not {k}")
        self.embedder = embedder
        self.k = k
        self.floor = floor
        self._rows: dict[str, _Row] = {}

    async def inject(self, query: Query) -> list[Recalled]:
        """Insert the most similar publications into the history, after the direct predecessors'.

        Await it right after :func:`inject_shared_memory`, so that both see the same publications.
        Leaves out sources that the agent reads directly. If the embedder fails, inserts nothing
        and records a warning.

        Returns:
            The inserted publications in the graph's order, not by score: tiny differences of
            scores do not change the prompt.
        """
        graph, agent_id = query.agent.memory_graph, query.agent.agent_id
        if graph is None or agent_id is None:
            return []
        direct = set(graph.predecessors(agent_id))
        pulled = graph.pull_for_indirect(agent_id, query.recorder.sources_of(query))
        items = [item for item in pulled if item.source_id not in direct]
        if not items:
            return []
        try:
            scores = await self._scores(_text(query), items)
        except Exception as error:
            text = f"nothing was recalled for '{agent_id}': {type(error).__name__}: {error}"
            logger.warning(text)
            query.recorder.warning(query, "recall_failed", text)
            return []
        best = nearest(items, scores, self.k)
        found = {item.source_id: (item, score) for item, score in best if score >= self.floor}
        recalled = [found[source] for source in graph.get_topological_order(found)]
        history = query.agent.conversation_history
        place = _after_shared(history)
        history[place:place] = [recalled_message(item, score) for item, score in recalled]
        return recalled

    async def _scores(self, text: str, items: Sequence[MemoryItem]) -> list[float]:
        # Shielded: other queries may wait for the same batch.
        vectors = [(await asyncio.shield(row.batch))[row.index] for row in self._rows_of(items)]
        queries = getattr(self.embedder, "embed_queries", self.embedder.embed)
        [wanted] = _checked(await queries([text]), 1)
        return [round(float(vector @ wanted), _PLACES) for vector in vectors]

    def _rows_of(self, items: Sequence[MemoryItem]) -> list[_Row]:
        """Return the items' rows; start one batch for missing, outdated and failed ones."""
        rows = self._rows
        missing = [
            item
            for item in items
            if item.source_id not in rows or not rows[item.source_id].holds(item.content)
        ]
        if missing:
            batch = asyncio.create_task(self._embed([item.content for item in missing]))
            batch.add_done_callback(_failed)  # retrieves its exception, so that asyncio is silent
            for index, item in enumerate(missing):
                rows[item.source_id] = _Row(item.content, batch, index)
        return [rows[item.source_id] for item in items]

    async def _embed(self, texts: list[str]) -> "Vectors":
        return _checked(await self.embedder.embed(texts), len(texts))


def _checked(vectors: "Vectors", texts: int) -> "Vectors":
    if vectors.ndim != 2 or len(vectors) != texts:
        raise ValueError(f"the embedder returned shape {vectors.shape} for {texts} texts")
    return vectors


class AncestorRecall:
    """Recall of the final answers of all agents upstream of an agent, near or far."""

    async def inject(self, query: Query) -> list[tuple[MemoryItem, float | None]]:
        """Insert them in the graph's order, after the direct predecessors', which it leaves out."""
        graph, agent_id = query.agent.memory_graph, query.agent.agent_id
        if graph is None or agent_id is None:
            return []
        direct = set(graph.predecessors(agent_id))
        pulled = graph.pull_for_indirect(agent_id, query.recorder.sources_of(query))
        found = {item.source_id: item for item in pulled if item.source_id not in direct}
        items = [found[source] for source in graph.get_topological_order(found)]
        history = query.agent.conversation_history
        place = _after_shared(history)
        history[place:place] = [recalled_message(item) for item in items]
        return [(item, None) for item in items]


def nearest(items: Sequence[MemoryItem], scores: Sequence[float], k: int) -> list[Recalled]:
    """Return the ``k`` items with the highest finite scores, highest first; ties keep order."""
    scored = [pair for pair in zip(items, scores, strict=True) if isfinite(pair[1])]
    return sorted(scored, key=lambda pair: -pair[1])[:k]


def recalled_message(item: MemoryItem, score: float | None = None) -> SystemMessage:
    """Render a recalled publication like a direct one, with marks in the metadata."""
    message = shared_message(item)
    marks: dict[str, Any] = {RECALLED: True}
    if score is not None:
        marks["shared_memory_score"] = score
    return message.model_copy(update={"metadata": message.metadata | marks})


def _text(query: Query) -> str:
    return next(each.content for each in query.messages if isinstance(each, HumanMessage))


def _after_shared(history: Sequence[StandardMessage]) -> int:
    """Return the index after the shared context, or after the system message without one."""
    place = 1 if history and isinstance(history[0], SystemMessage) else 0
    for index, message in enumerate(history):
        if isinstance(message, SystemMessage) and not message.metadata.keys().isdisjoint(
            (AWARENESS, SHARED_MEMORY)
        ):
            place = index + 1
    return place
