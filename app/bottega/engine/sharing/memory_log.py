"""Events about shared memory: what agents publish, and what they receive."""

from collections.abc import Sequence
from typing import Any

from bottega.agents.query import Query
from bottega.engine.journal import Journal
from bottega.engine.task_rows import Tasks, name_of
from bottega.events.types import EventType
from bottega.graph.shared_memory import MemoryItem, PropagationPolicy, Publication


class MemoryLog:
    """Writes publications and received context to a run's log.

    Args:
        in_session: the run's session gets the publications, too.
    """

    def __init__(self, journal: Journal, tasks: Tasks, *, in_session: bool) -> None:
        self._journal = journal
        self._tasks = tasks
        self._in_session = in_session
        self._published: dict[Query, Publication] = {}
        self._answers: dict[tuple[str, int], int] = {}

    def published(self, query: Query, publication: Publication) -> None:
        """Keep a query's publication until the query ends."""
        self._published[query] = publication

    def ended(self, query: Query, output: str | None, seq: int | None) -> None:
        """Write the publication of a query that has ended, if there is one.

        It refers to the answer if the text is the same. It differs if a QUERY_END hook changed or
        rejected the answer afterwards.

        Args:
            output, seq: of the answer; ``None``: the query failed.
        """
        published = self._published.pop(query, None)
        if published is None:
            return
        data: dict[str, Any] = {"version": published.version, "content": published.content}
        if seq is not None and published.content == output:
            data = {"version": published.version, "answer_seq": seq}
            self._answers[published.agent_id, published.version] = seq
        if published.metadata:
            data["metadata"] = dict(published.metadata)
        written = self._tasks.add(query, EventType.MEMORY_PUBLISHED, data)
        if not self._in_session or not self._journal.is_new(written):
            return  # a resumed run repeats it; others may have published since
        kept = published.to_dict()
        self._journal.publication(
            agent=published.agent_id,
            version=published.version,
            content=published.content,
            details={key: kept[key] for key in ("tool_results", "messages", "metadata")},
        )

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        """Write the context that a query got from direct predecessors."""
        for item in items:
            edge = [item.source_id, name_of(query.agent)]
            data = {"edge": edge, "policy": item.policy}
            self._tasks.add(query, EventType.MEMORY_INJECTED, self._about(item) | data)

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float | None]]) -> None:
        """Write the context that a query got from further up, with its cosine, if it was asked."""
        for item, score in items:
            data = {} if score is None else {"score": score}
            self._tasks.add(query, EventType.CONTEXT_RECALLED, self._about(item) | data)

    def _about(self, item: MemoryItem) -> dict[str, Any]:
        """Return a memory item with its text, or a reference to it if the log has it."""
        data: dict[str, Any] = {"source": item.source_id, "version": item.version}
        if item.metadata:
            data["metadata"] = dict(item.metadata)
        answer = self._answers.get((item.source_id, item.version))
        if answer is not None and item.policy is PropagationPolicy.FINAL_RESPONSE_ONLY:
            return data | {"answer_seq": answer}
        # It is more than an answer, or comes from an earlier run of the session.
        return data | {"content": item.content}
