"""How well an episode answers a query: the score, and what it is made of (spec page 4, M13). Pure.

What a query found comes here as candidates, each with what was measured of it. Cosines and ranks
of a full-text search are on scales of their own, which change with the embedder and the length of
the query; so each is first put onto 0 to 1 among the candidates, and so is what both come to. Else
the terms that have such a scale from the start, recency before all, decide what similarity should.
``benchmarks/memory`` measures what each way of doing so finds, and decided the default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp, isfinite, log1p, pi
from typing import Literal
from uuid import UUID

Normalisation = Literal["added", "minmax", "share", "raw"]

_DAY_S = 86_400.0
_ALL_WORDS = 6 / pi**2
"""PostgreSQL's rank of a text that has each of the query's words, once, where it counts most."""
_COMPARED = 20
"""So many candidates, or half of them if that is more, share the scale of what was ``added``."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode that a query found.

    Attributes:
        outcome: the effective one, feedback included.
        cosine: of its vector and the query's, -1 to 1; ``None`` if one of them is not there yet.
        lexical: rank of its words for the query's, each weighed by how few episodes have it, 0 or
            more; ``None`` if the query has no words.
        telling: whether it has one of the query's words that few episodes have.
    """

    episode_id: UUID
    at: datetime
    outcome: str
    domain: str | None
    access_count: int
    cosine: float | None
    lexical: float | None
    telling: bool = False


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """What each term weighs, and how scales are made alike.

    Attributes:
        recency_days: the age at which recency has fallen to 1/e.
        normalisation: how cosines and ranks come onto 0 to 1, and what of them is the similarity.
            ``added``: a cosine counts by how far it is above the lowest candidate's on the way to
            1, a rank by the share of the query's words that it stands for; their sums go from 0
            for the twentieth to 1 for the best. Else the higher of the two is the similarity.
            ``minmax``: the lowest candidate is 0, the highest 1. ``share``: of the highest.
            ``raw``: as measured, and a rank counts only where there is no cosine.
        normalise_recency: whether recency goes from 0 for the oldest candidate to 1 for the newest.
    """

    similarity: float = 0.5
    recency: float = 0.2
    success: float = 0.15
    accesses: float = 0.1
    domain: float = 0.05
    recency_days: float = 30.0
    normalisation: Normalisation = "added"
    normalise_recency: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What a score is made of.

    Attributes:
        similarity, recency, success, accesses, domain: its terms, weighed: they add up to it.
        cosine, lexical: as measured.
        cosine_normalised, lexical_normalised: among the candidates, 0 to 1.
        telling: whether the two have a word in common that few episodes have.
    """

    similarity: float
    recency: float
    success: float
    accesses: float
    domain: float
    cosine: float | None
    lexical: float | None
    cosine_normalised: float
    lexical_normalised: float
    telling: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate, its score, and why."""

    candidate: Candidate
    score: float
    parts: Parts


def score(
    candidates: Sequence[Candidate], options: ScoringOptions, now: datetime, domain: str | None
) -> list[Scored]:
    """The candidates, best first; those that score alike in order of their ids.

    Args:
        domain: of the task at hand; ``None`` if it has none, and then no episode has the same.
    """
    cosines = [_finite(candidate.cosine) for candidate in candidates]
    ranks = [_finite(candidate.lexical) for candidate in candidates]
    of_cosines, of_ranks = _NORMALISERS[options.normalisation]
    near, named = _where_known(cosines, of_cosines), _where_known(ranks, of_ranks)
    similarities = _similarities(options.normalisation, cosines, near, named)
    recencies = [_recency(candidate.at, now, options.recency_days) for candidate in candidates]
    if options.normalise_recency:
        recencies = _minmax(recencies)
    scored = [
        _scored(candidate, _parts(candidate, options, recency, domain, *measured))
        for candidate, recency, *measured in zip(
            candidates,
            recencies,
            similarities,
            cosines,
            ranks,
            near,
            named,
            strict=True,
        )
    ]
    return sorted(scored, key=lambda each: (-each.score, each.candidate.episode_id))


def _scored(candidate: Candidate, parts: Parts) -> Scored:
    terms = (parts.similarity, parts.recency, parts.success, parts.accesses, parts.domain)
    return Scored(candidate, sum(terms), parts)


def _parts(
    candidate: Candidate,
    options: ScoringOptions,
    recency: float,
    domain: str | None,
    similarity: float,
    cosine: float | None,
    rank: float | None,
    cosine_normalised: float,
    rank_normalised: float,
) -> Parts:
    accesses = min(log1p(max(candidate.access_count, 0)) / 10, 1.0)
    return Parts(
        similarity=options.similarity * similarity,
        recency=options.recency * recency,
        success=options.success * (candidate.outcome == "SUCCESS"),
        accesses=options.accesses * accesses,
        domain=options.domain * (domain is not None and candidate.domain == domain),
        cosine=cosine,
        lexical=rank,
        cosine_normalised=cosine_normalised,
        lexical_normalised=rank_normalised,
        telling=candidate.telling,
    )


def _similarities(
    how: Normalisation,
    cosines: Sequence[float | None],
    near: Sequence[float],
    named: Sequence[float],
) -> list[float]:
    """Of each candidate, from what was normalised of its cosine and of its rank."""
    if how == "added":
        sums = _stretched([sum(pair) for pair in zip(near, named, strict=True)])
        return [
            0.0 if cosine is None and rank == 0 else value
            for cosine, rank, value in zip(cosines, named, sums, strict=True)
        ]
    if how == "raw":
        return [
            rank if cosine is None else cosine for cosine, rank in zip(cosines, named, strict=True)
        ]
    return [max(pair) for pair in zip(near, named, strict=True)]


def _recency(at: datetime, now: datetime, days: float) -> float:
    """1 now (and for what a clock ahead of ours wrote), falling with age."""
    return exp(-max((now - at).total_seconds(), 0.0) / _DAY_S / days)


def _finite(value: float | None) -> float | None:
    """A vector of zeros has no cosine: PostgreSQL says NaN."""
    return value if value is not None and isfinite(value) else None


# --- Onto one scale -----------------------------------------------------------------------------


def _where_known(
    values: Sequence[float | None], normaliser: Callable[[Sequence[float]], list[float]]
) -> list[float]:
    """What is not known is 0: it speaks neither for a candidate nor against it."""
    known = iter(normaliser([value for value in values if value is not None]))
    return [0.0 if value is None else next(known) for value in values]


def _minmax(values: Sequence[float]) -> list[float]:
    """From the highest, which is 1, down. Values that are all alike are all the highest."""
    if not values:
        return []
    highest = max(values)
    span = highest - min(values)
    return [1.0 - (highest - value) / span if span > 0 else 1.0 for value in values]


def _ranks_minmax(ranks: Sequence[float]) -> list[float]:
    """A rank of 0 has no word in common with the query, whatever the others have."""
    return [
        normalised if rank > 0 else 0.0
        for rank, normalised in zip(ranks, _minmax(ranks), strict=True)
    ]


def _above_lowest(cosines: Sequence[float]) -> list[float]:
    """What unrelated texts have in common differs from embedder to embedder, and says nothing."""
    lowest = min(cosines, default=0.0)
    return [(cosine - lowest) / (1.0 - lowest) if lowest < 1 else 0.0 for cosine in cosines]


def _of_all_words(ranks: Sequence[float]) -> list[float]:
    return [min(rank / _ALL_WORDS, 1.0) for rank in ranks]


def _stretched(sums: Sequence[float]) -> list[float]:
    """The best is 1, those that are not among the better ones are 0. If all are alike, they are
    all the best."""
    if not sums:
        return []
    better = sorted(sums, reverse=True)[: max(_COMPARED, len(sums) // 2)]
    return [_between(value, better[-1], better[0]) for value in sums]


def _between(value: float, lowest: float, highest: float) -> float:
    if highest == lowest:
        return float(value == highest)
    return max((value - lowest) / (highest - lowest), 0.0)


def _share(values: Sequence[float]) -> list[float]:
    """Of the highest; 0 if none is above 0."""
    highest = max(values, default=0.0)
    return [max(value, 0.0) / highest if highest > 0 else 0.0 for value in values]


def _raw(values: Sequence[float]) -> list[float]:
    return [min(max(value, 0.0), 1.0) for value in values]


_NORMALISERS: dict[
    Normalisation,
    tuple[Callable[[Sequence[float]], list[float]], Callable[[Sequence[float]], list[float]]],
] = {
    "added": (_above_lowest, _of_all_words),
    "minmax": (_minmax, _ranks_minmax),
    "share": (_share, _share),
    "raw": (_raw, _raw),
}
"""For cosines, and for ranks."""
