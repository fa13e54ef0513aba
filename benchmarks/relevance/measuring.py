"""Measurements of relevance: memories of the sets' tasks, and what is given for a question."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import isfinite
from uuid import UUID, uuid4

from benchmarks.relevance.sets import Chat, Request, chats, requests
from bottega.clock import utcnow
from bottega.db.connect import connect
from bottega.db.pool import Database
from bottega.engine.retrieval import tells_a_topic
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.episode import Episode, Outcome, Summary
from bottega.memory.episodes.scope import EVERYTHING, MemoryOptions
from bottega.memory.episodes.store import EpisodicMemory, Found
from bottega.memory.text.embeddings import Embedder

_SIX = 6


class Memory:
    """A memory with one embedder."""

    def __init__(self, database: Database, embedder: Embedder) -> None:
        self._database = database
        pool = database.pool
        embedders = Embedders(pool, lambda: embedder, lambda name: None)
        options = MemoryOptions(vector_deadline_ms=60_000)
        self.memory = EpisodicMemory(pool, embedders=embedders, options=options, clock=utcnow)
        self._worker = EmbeddingWorker(pool, embedders)

    async def holding(self, tasks: Iterable[tuple[str, str]]) -> tuple[UUID, list[UUID]]:
        """Store tasks with their answers in a tenant of their own; return its id and theirs."""
        tenant_id = uuid4()
        connection = await connect(self._database.url, role=None)
        insert = "INSERT INTO tenants (id, name) VALUES ($1, $2)"
        await connection.execute(insert, tenant_id, str(tenant_id))
        await connection.close()
        ids = [
            await self.memory.store(tenant_id, _episode(task, answer, number))
            for number, (task, answer) in enumerate(tasks)
        ]
        while isfinite(await self._worker.work.do_due()):
            pass
        return tenant_id, ids

    async def ask(self, tenant_id: UUID, query: str) -> Found:
        return await self.memory.semantic_search(tenant_id, EVERYTHING, query)

    async def given(self, tenant_id: UUID, question: str) -> list[UUID | None]:
        """Return the episodes that a run with a question gets at its start."""
        if not tells_a_topic(question):
            return []
        return [
            hit.episode.id for hit in (await self.ask(tenant_id, question)).hits if hit.relevant
        ]


def _episode(task: str, answer: str, number: int) -> Episode:
    return Episode(
        at=utcnow() - timedelta(hours=number + 1),
        id=uuid4(),
        outcome=Outcome.SUCCESS,
        task={"original_input": task, "goals": [], "constraints": [], "context": {}},
        summary=Summary(task=task, result=answer, errors=""),
        execution={},
        result={"output": answer, "error": None},
        metadata={},
        origin={},
        trust=3,
    )


@dataclass(slots=True)
class Conversations:
    """Record of what is given for chats, and for later requests, beside stored ones.

    Attributes:
        asked: number of messages by kind: ``chat``, ``related``, ``paraphrase``.
        failed: those given anything (chats), or not given the right episode.
    """

    asked: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[str]] = field(default_factory=dict)

    def share(self, kind: str) -> float:
        return len(self.failed.get(kind, ())) / self.asked[kind]

    def note(self, kind: str, text: str, *, failed: bool) -> None:
        self.asked[kind] += 1
        if failed:
            self.failed.setdefault(kind, []).append(text)


async def converse(
    memory: Memory, stored: Sequence[Request], said: Sequence[Chat], into: Conversations
) -> None:
    """Say messages and ask about stored requests, in a tenant of its own."""
    tenant_id, ids = await memory.holding((each.task, each.answer) for each in stored)
    for chat in said:
        given = await memory.given(tenant_id, chat.text)
        into.note("chat", chat.text, failed=bool(given))
    for each, right in zip(stored, ids, strict=True):
        for kind, text in (("related", each.related), ("paraphrase", each.paraphrase)):
            given = await memory.given(tenant_id, text)
            into.note(kind, text, failed=right not in given)


async def large(memory: Memory) -> Conversations:
    """Say all messages beside all requests."""
    found = Conversations()
    await converse(memory, requests(), chats(), found)
    return found


async def small(memory: Memory, languages: Iterable[str] | None = None) -> Conversations:
    """Say each language's messages beside six of its requests: the first and the last six.

    Args:
        languages: all if ``None``.
    """
    found = Conversations()
    for language in languages or dict.fromkeys(chat.language for chat in chats()):
        own = [each for each in requests() if each.language == language]
        said = [each for each in chats() if each.language == language]
        await converse(memory, own[:_SIX], said, found)
        await converse(memory, own[-_SIX:], said, found)
    return found
