"""Semantic pull: the ancestors' publications nearest to an agent's query (spec page 2, G15)."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Protocol

from bottega.agents.messages import SHARED_MEMORY, HumanMessage, StandardMessage, SystemMessage
from bottega.agents.recording import Query
from bottega.agents.sharing import AWARENESS, shared_message
from bottega.errors import InvalidInputError
from bottega.graph.shared_memory import MemoryItem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

logger = logging.getLogger(__name__)

RECALLED = "shared_memory_recalled"

Recalled = tuple[MemoryItem, float]
"""What was recalled, and its cosine with the query, to four places."""

_PLACES = 4


class Embedder(Protocol):
    """As much of an embedder (spec page 4, M18) as recalling takes."""

    async def embed(self, texts: Sequence[str]) -> "Vectors":
        """Vectors of length 1, one row per text, in their order."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A publication's vector: a row of a batch that is embedded, or about to be."""

    content: str
    batch: "asyncio.Task[Vectors]"
    index: int

    def holds(self, content: str) -> bool:
        return self.content == content and not (self.batch.done() and _failed(self.batch))


def _failed(batch: "asyncio.Task[Vectors]") -> bool:
    return batch.cancelled() or batch.exception() is not None


class Recall:
    """Gives agents what their ancestors published nearest to the query.

    One may serve all agents of a graph. It keeps the vector of each source's publication for as
    long as that is the current one, so that only new publications are embedded, once.

    Args:
        k: how many publications a query is given at most.

    Raises:
        InvalidInputError: ``k`` is below 1.
    """

    def __init__(self, embedder: Embedder, k: int) -> None:
        if k < 1:
            raise InvalidInputError(f"k must be at least 1, not {k}")
        self.embedder = embedder
        self.k = k
        self._rows: dict[str, _Row] = {}

    async def inject(self, query: Query) -> list[Recalled]:
        """Put the nearest into the history, after what the agent's predecessors published.

        To be awaited right after that was put there: what is pulled is what stood then. Sources
        that the agent reads directly are left out. If the embedder fails, so is all of it, with
        a warning.

        Returns:
            what was put there, in that order: the graph's, as for the direct ones, so that what
            comes first is read first, and scores that differ by a hair do not change the prompt.
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
        found = {item.source_id: (item, score) for item, score in nearest(items, scores, self.k)}
        recalled = [found[source] for source in graph.get_topological_order(found)]
        history = query.agent.conversation_history
        place = _after_shared(history)
        history[place:place] = [recalled_message(item, score) for item, score in recalled]
        return recalled

    async def _scores(self, text: str, items: Sequence[MemoryItem]) -> list[float]:
        """The cosine of each item with ``text``."""
        # Shielded, since other queries may wait for the same batch.
        vectors = [(await asyncio.shield(row.batch))[row.index] for row in self._rows_of(items)]
        [wanted] = await self._embed([text])
        return [round(float(vector @ wanted), _PLACES) for vector in vectors]

    def _rows_of(self, items: Sequence[MemoryItem]) -> list[_Row]:
        """The items' rows; those that there are none of, or failed, are begun as one batch."""
        rows = self._rows
        missing = [
            item
            for item in items
            if item.source_id not in rows or not rows[item.source_id].holds(item.content)
        ]
        if missing:
            batch = asyncio.create_task(self._embed([item.content for item in missing]))
            batch.add_done_callback(_failed)  # asks for its exception even if nobody else does
            for index, item in enumerate(missing):
                rows[item.source_id] = _Row(item.content, batch, index)
        return [rows[item.source_id] for item in items]

    async def _embed(self, texts: list[str]) -> "Vectors":
        vectors = await self.embedder.embed(texts)
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise ValueError(f"{len(texts)} texts were embedded as shape {vectors.shape}")
        return vectors


def nearest(items: Sequence[MemoryItem], scores: Sequence[float], k: int) -> list[Recalled]:
    """The ``k`` items with the highest scores, highest first; equal ones in the order given.

    An item whose score is no number is left out.
    """
    scored = [pair for pair in zip(items, scores, strict=True) if isfinite(pair[1])]
    return sorted(scored, key=lambda pair: -pair[1])[:k]


def recalled_message(item: MemoryItem, score: float) -> SystemMessage:
    """A recalled publication as the reader's model sees it: like a direct one, but marked."""
    message = shared_message(item)
    marks = {RECALLED: True, "shared_memory_score": score}
    return message.model_copy(update={"metadata": message.metadata | marks})


def _text(query: Query) -> str:
    return next(each.content for each in query.messages if isinstance(each, HumanMessage))


def _after_shared(history: Sequence[StandardMessage]) -> int:
    """The index right after shared context; without any, where that would begin."""
    place = 1 if history and isinstance(history[0], SystemMessage) else 0
    for index, message in enumerate(history):
        if isinstance(message, SystemMessage) and not message.metadata.keys().isdisjoint(
            (AWARENESS, SHARED_MEMORY)
        ):
            place = index + 1
    return place
