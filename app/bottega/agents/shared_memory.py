"""Shared memory of a query: publications of other agents, and the query's own publication."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol
from unicodedata import normalize

from bottega.agents.messages import (
    SHARED_MEMORY,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolStatus,
)
from bottega.agents.query import Query
from bottega.errors import InvalidInputError
from bottega.graph.shared_memory import MemoryItem, SharedMemoryGraph

AWARENESS = "orchestrator_awareness"

_SHORT = 8
# Lower-case letters of other scripts, each with the similar letter from a to f.
_LOOK_ALIKES = tuple(zip("αаɑεеєσсᴄԁдɗβьвƀƒғϝꞙ", "aaaeeecccdddbbbbffff", strict=True))
_ALL_BUT_HEX = {code: None for code in range(128) if chr(code) not in "0123456789abcdef"}


def inject_shared_memory(query: Query) -> None:
    """Put the predecessors' publications into the history; replace older ones.

    The function runs once per query, before the first model call. The publications follow the
    agent's system message and :func:`awareness_message`, in the graph's order.
    """
    query.memory_pulled = True
    agent = query.agent
    graph, agent_id = agent.memory_graph, agent.agent_id
    if graph is None or agent_id is None:
        return
    history = agent.conversation_history
    if any(_is_shared(message) for message in history):
        history[:] = [message for message in history if not _is_shared(message)]
    items = graph.pull_for(agent_id, query.recorder.sources_of(query))
    if items:
        place = _after_own(history, agent.system_message)
        history[place:place] = [shared_message(item) for item in items]
        query.recorder.injected(query, items)
    if query.parent is not None and (missing := graph.unpublished_predecessors(agent_id)):
        query.recorder.warning(
            query,
            "predecessor_not_published",
            f"'{agent_id}' starts although these predecessors have not published yet: "
            f"{', '.join(missing)}",
        )


def shared_message(item: MemoryItem) -> SystemMessage:
    """Render a publication for a prompt, in a fence that marks it as data, not instructions."""
    mark = fence(item.content)
    return SystemMessage(
        content=(
            f"Shared context from {item.source_id}:\n"
            f"<shared-context-{mark}>{item.content}</shared-context-{mark}>"
        ),
        metadata={
            SHARED_MEMORY: True,
            "shared_memory_source": item.source_id,
            "shared_memory_version": item.version,
        },
    )


def fence(content: str) -> str:
    """Return a mark that does not occur in ``content``; equal content gives equal marks."""
    digest = sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return unheld(digest, content)


def unheld(digest: str, content: str) -> str:
    """Return the shortest prefix of ``digest`` that does not occur in ``content``.

    The search ignores case, and all characters of ``content`` that are not hexadecimal digits.
    Variants and look-alikes of a letter count as this letter.
    """
    plain = content
    if not plain.isascii():
        plain = normalize("NFKD", plain).casefold()
        for letter, meant in _LOOK_ALIKES:  # str.translate is much slower
            plain = plain.replace(letter, meant)
        plain = plain.encode("ascii", "ignore").decode()
    plain = plain.lower().translate(_ALL_BUT_HEX)
    length = _SHORT
    while digest[:length] in plain and length < len(digest):
        length += 1
    return digest[:length]


async def publish_answer(
    query: Query,
    content: str,
    *,
    before: Iterable[StandardMessage],
    withheld: Iterable[StandardMessage],
) -> None:
    """Publish an accepted answer, unless it is empty or the agent is not a node of the graph.

    Args:
        before: the history before the query.
        withheld: messages of the query that the publication omits: rejected answers, and the answer
            itself.
    """
    agent = query.agent
    graph, agent_id = agent.memory_graph, agent.agent_id
    if graph is None or agent_id is None or not graph.has_node(agent_id) or not content.strip():
        return
    hidden = {id(message) for message in (*before, *withheld)}
    publication = await graph.publish(
        agent_id,
        content,
        _metadata(query),
        version=query.recorder.version_of(query),
        timestamp=query.recorder.published_at(query),
        tool_results=query.tool_results,
        messages=[
            message
            for message in agent.conversation_history
            if id(message) not in hidden and not _is_shared(message)
        ],
    )
    query.recorder.published(query, publication)


def _metadata(query: Query) -> dict[str, Any]:
    """Merge the annotations of tools (in call order), then of hooks; later values win."""
    metadata: dict[str, Any] = {}
    for result in query.tool_results:
        if result.status is ToolStatus.SUCCESS:
            metadata |= result.annotations
    return metadata | query.annotations


def _is_shared(message: StandardMessage) -> bool:
    return isinstance(message, SystemMessage) and SHARED_MEMORY in message.metadata


def _after_own(history: list[StandardMessage], own: SystemMessage) -> int:
    place = 0
    for index, message in enumerate(history):
        if message is own or (isinstance(message, SystemMessage) and AWARENESS in message.metadata):
            place = index + 1
    return place


def awareness_message(
    graph: SharedMemoryGraph, tool_names: Mapping[str, str]
) -> SystemMessage | None:
    """Render the dependencies between sub-agents, or return ``None`` without dependencies.

    Args:
        tool_names: tool name by the sub-agent's name in the graph.
    """
    edges = graph.get_edges_for_nodes(tool_names)
    if not edges:
        return None
    order = graph.get_topological_order(tool_names)
    lines = [
        "You are coordinating sub-agents with dependencies.",
        "",
        "Dependency order (call upstream before downstream):",
        *(f"  {tool_names[source]} -> {tool_names[target]}" for source, target in edges),
        "",
        f"Recommended execution order: {', '.join(tool_names[name] for name in order)}",
        "",
        "Guideline: do not call an agent before its prerequisites have been executed.",
    ]
    return SystemMessage(content="\n".join(lines), metadata={AWARENESS: True})


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

logger = logging.getLogger(__name__)

RECALLED = "shared_memory_recalled"

Recalled = tuple[MemoryItem, float]
"""A publication and its cosine with the query, rounded to four places."""


class RecallEmbedder(Protocol):
    """The part of an embedder that :class:`Recall` needs."""

    async def embed(self, texts: Sequence[str]) -> "Vectors":
        """Return vectors of length 1, one row per text, in order."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Place of a publication's vector: a row of a batch, which may not be computed yet."""

    content: str
    batch: "asyncio.Task[Vectors]"
    index: int

    def holds(self, content: str) -> bool:
        return self.content == content and not (self.batch.done() and _failed(self.batch))


def _failed(batch: "asyncio.Task[Vectors]") -> bool:
    return batch.cancelled() or batch.exception() is not None


class Recall:
    """Semantic recall of publications of an agent's indirect ancestors.

    One instance may serve all agents of a graph. The recall caches the vector of each source's
    current publication, so each publication is embedded once.

    Args:
        embedder: computes the vectors of publications and queries. If the embedder has a method
            ``embed_queries``, this method computes the vectors of queries.
        k: maximum number of publications per query.
        floor: minimum cosine of a publication with the query. A lower cosine may be a coincidence.

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
        """Insert the most similar publications after the direct predecessors' publications.

        Await this method right after :func:`inject_shared_memory`, so that both functions see the
        same publications. The search omits sources that the agent reads directly. If the embedder
        fails, the method inserts nothing and records a warning.

        Returns:
            The inserted publications in the graph's order, so that tiny differences of scores do
            not change the prompt.
        """
        graph, agent_id = query.agent.memory_graph, query.agent.agent_id
        if graph is None or agent_id is None:
            return []
        direct = graph.direct_sources(agent_id)
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
        # Shield the batch, because other queries may have begun to wait for the same batch.
        vectors = [(await asyncio.shield(row.batch))[row.index] for row in self._rows_of(items)]
        queries = getattr(self.embedder, "embed_queries", self.embedder.embed)
        [wanted] = _checked(await queries([text]), 1)
        return [round(float(vector @ wanted), 4) for vector in vectors]

    def _rows_of(self, items: Sequence[MemoryItem]) -> list[_Row]:
        """Return the items' rows; start one batch for missing, outdated and failed rows."""
        rows = self._rows
        missing = [
            item
            for item in items
            if item.source_id not in rows or not rows[item.source_id].holds(item.content)
        ]
        if missing:
            batch = asyncio.create_task(self._embed([item.content for item in missing]))
            batch.add_done_callback(_failed)  # retrieves the exception, so asyncio does not log it
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
    """Recall that adds the final answers of all indirect ancestors, without a search."""

    async def inject(self, query: Query) -> list[tuple[MemoryItem, float | None]]:
        """Insert the answers, in the graph's order, after the direct predecessors' publications."""
        graph, agent_id = query.agent.memory_graph, query.agent.agent_id
        if graph is None or agent_id is None:
            return []
        direct = graph.direct_sources(agent_id)
        pulled = graph.pull_for_indirect(agent_id, query.recorder.sources_of(query))
        found = {item.source_id: item for item in pulled if item.source_id not in direct}
        items = [found[source] for source in graph.get_topological_order(found)]
        history = query.agent.conversation_history
        place = _after_shared(history)
        history[place:place] = [recalled_message(item) for item in items]
        return [(item, None) for item in items]


def nearest(items: Sequence[MemoryItem], scores: Sequence[float], k: int) -> list[Recalled]:
    """Return the ``k`` items with the highest finite scores, highest first."""
    scored = [pair for pair in zip(items, scores, strict=True) if isfinite(pair[1])]
    return sorted(scored, key=lambda pair: -pair[1])[:k]


def recalled_message(item: MemoryItem, score: float | None = None) -> SystemMessage:
    """Render a publication as :func:`shared_message` does; mark the metadata as recalled."""
    message = shared_message(item)
    marks: dict[str, Any] = {RECALLED: True}
    if score is not None:
        marks["shared_memory_score"] = score
    return message.model_copy(update={"metadata": message.metadata | marks})


def _text(query: Query) -> str:
    return next(each.content for each in query.messages if isinstance(each, HumanMessage))


def _after_shared(history: Sequence[StandardMessage]) -> int:
    place = 1 if history and isinstance(history[0], SystemMessage) else 0
    for index, message in enumerate(history):
        if isinstance(message, SystemMessage) and not message.metadata.keys().isdisjoint(
            (AWARENESS, SHARED_MEMORY)
        ):
            place = index + 1
    return place
