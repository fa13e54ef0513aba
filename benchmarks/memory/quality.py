"""Quality of search by words, by vectors, and by both.

Each question goes through the service's own search and scoring on the embedded PostgreSQL. One
retrieval gives the candidates, which every variant of scoring then ranks. Choose parameters on one
seed, and report on another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import asyncpg

from benchmarks.memory import stage
from benchmarks.memory.corpus import CLASSES, Corpus, Query, corpus
from benchmarks.memory.embedders import Buckets, Noise, Understanding
from benchmarks.memory.measures import Measured, interval, measured
from bottega.db.engine import acting_as
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.episodes import search
from bottega.memory.episodes.episode import EpisodeFilter, Outcome, StorageState, ended_before
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.scoring import Candidate, Normalisation, ScoringOptions, score
from bottega.memory.text.content import content_words
from bottega.memory.text.embeddings import Embedder, Vectors

AGED_BEFORE = ended_before(StorageState.AGED, stage.NOW)
Retrieved = list[tuple[Query, list[Candidate]]]


def embedders(made: Corpus) -> list[Embedder]:
    """Return the built-in embedder, two useless ones, and three that know the corpus."""
    return [
        BuiltinEmbedder(),
        Noise(),
        Buckets(),
        Understanding(made.about, "fair", noise=1.3),
        Understanding(made.about, "good", noise=1.0),
        Understanding(made.about, "good, narrow", noise=1.0, narrow=2.0),
    ]


async def retrieve(
    pool: asyncpg.Pool,
    queries: Sequence[Query],
    vectors: Vectors | None,
    embedder: str | None,
    *,
    words: bool = True,
) -> Retrieved:
    """Retrieve the candidates of each question.

    Args:
        vectors: vectors of the questions, shape (n, d); ``None``: search by words only.
        words: search by words, too.
    """
    found: Retrieved = []
    for place, query in enumerate(queries):
        where = EpisodeFilter(
            domain=query.domain, outcomes=(Outcome.FAILURE,) if query.failures_only else ()
        )
        async with acting_as(pool, stage.TENANT) as connection:
            candidates = await search.candidates(
                connection,
                EVERYTHING,
                content_words(query.text if words else ""),
                None if vectors is None else vectors[place],
                embedder=embedder,
                aged_before=AGED_BEFORE,
                where=where,
            )
        found.append((query, candidates))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: the variant's name, and each question's class and measures."""

    name: str
    each: Sequence[tuple[str, Measured]]

    def mean(self, field: str, name: str | None = None) -> float:
        values: list[float] = [getattr(m, field) for of, m in self.each if name in (None, of)]
        return sum(values) / len(values)


def ranked(name: str, retrieved: Retrieved, options: ScoringOptions) -> Row:
    each = []
    for query, candidates in retrieved:
        best = score(candidates, options, stage.NOW, query.domain)[:10]
        ranking = [stage.number(candidate.episode_id) for candidate, _ in best]
        each.append((query.name, measured(ranking, query.relevant)))
    return Row(name, each)


def variants() -> list[tuple[str, ScoringOptions]]:
    """Return similarity alone, and then the whole formula, with all normalisations."""
    named = [(f"{how}, alone", alone(ScoringOptions(normalisation=how))) for how in _ways()]
    return named + [(how, ScoringOptions(normalisation=how)) for how in _ways()]


def alone(options: ScoringOptions) -> ScoringOptions:
    return replace(options, recency=0.0, success=0.0, accesses=0.0, domain=0.0)


def _ways() -> tuple[Normalisation, ...]:
    return get_args(Normalisation)


async def measure(seed: int, size: int, per_class: int) -> dict[str, list[Row]]:
    """Return the tables of one corpus, by embedder."""
    made = corpus(seed, size, per_class)
    async with stage.database() as opened:
        return await tables(opened.pool, made, embedders(made))


async def tables(
    pool: asyncpg.Pool, made: Corpus, compared: Sequence[Embedder]
) -> dict[str, list[Row]]:
    texts = [query.text for query in made.queries]
    default = ScoringOptions()
    found: dict[str, list[Row]] = {}
    await stage.store(pool, made.episodes)
    by_words = await retrieve(pool, made.queries, None, None)
    for embedder in compared:
        await stage.embed(pool, made.episodes, embedder)
        vectors = await embedder.embed(texts)
        both = await retrieve(pool, made.queries, vectors, embedder.name)
        near = await retrieve(pool, made.queries, vectors, embedder.name, words=False)
        found[embedder.name] = [
            ranked("lexical", by_words, default),
            ranked("vector", near, default),
            ranked("hybrid", both, default),
            ranked("lexical, similarity alone", by_words, alone(default)),
            ranked("vector, similarity alone", near, alone(default)),
            *(ranked(f"hybrid {name}", both, options) for name, options in variants()),
        ]
    return found


def show(found: dict[str, list[Row]]) -> None:
    """Print, per embedder, each variant overall, and the default by class."""
    for embedder, rows in found.items():
        print(f"\nembedder: {embedder}")
        print(f"{'':34} recall@5  @10  any@10  NDCG@10 (95 %)     " + " ".join(
            f"{name[:6]:>6}" for name in CLASSES
        ))  # fmt: skip
        for row in rows:
            low, high = interval([m.ndcg10 for _, m in row.each])
            per_class = " ".join(f"{row.mean('ndcg10', name) * 100:6.1f}" for name in CLASSES)
            print(
                f"{row.name:34} {row.mean('recall5') * 100:8.1f} {row.mean('recall10') * 100:4.1f}"
                f" {row.mean('any10') * 100:7.1f} {row.mean('ndcg10') * 100:8.1f}"
                f" ({low * 100:.1f} to {high * 100:.1f})   {per_class}"
            )
    print("\nrecall@5 / recall@10 / NDCG@10 by class, scored as by default")
    for embedder in [name for name in ("builtin-1", "fair") if name in found]:
        print(f"{embedder:12} " + " ".join(f"{row.name:>16}" for row in found[embedder][:3]))
        for name in CLASSES:
            cells = (
                "/".join(
                    f"{row.mean(f, name) * 100:.0f}" for f in ("recall5", "recall10", "ndcg10")
                )
                for row in found[embedder][:3]
            )
            print(f"  {name:10} " + " ".join(f"{cell:>16}" for cell in cells))
