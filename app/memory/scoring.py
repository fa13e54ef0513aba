"""How well an episode answers a query: the score, and what it is made of (spec page 4, M13). Pure.

What a query found comes here as candidates, each with what was measured of it. Cosines and ranks
of a full-text search are on scales of their own, which change with the embedder and the length of
the query; so each is first put onto 0 to 1 among the candidates. Else the terms that have such a
scale from the start, recency before all, decide what similarity should.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp, isfinite, log1p
from typing import Literal
from uuid import UUID

Normalisation = Literal["minmax", "anchored", "share", "raw"]

_DAY_S = 86_400.0
_LEAST_SPAN = 0.1
"""Of cosines that are ``anchored``: what lies closer together than this is not pulled apart."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode that a query found.

    Attributes:
        outcome: the effective one, feedback included.
        cosine: of its vector and the query's, -1 to 1; ``None`` if one of them is not there yet.
        lexical: rank of its words for the query's, 0 or more; ``None`` if the query has no words.
    """

    episode_id: UUID
    at: datetime
    outcome: str
    domain: str | None
    access_count: int
    cosine: float | None
    lexical: float | None


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """What each term weighs, and how scales are made alike.

    Attributes:
        recency_days: the age at which recency has fallen to 1/e.
        normalisation: how cosines and ranks come onto 0 to 1. ``minmax``: the lowest candidate is
            0, the highest 1. ``anchored``: the same, but cosines that lie close together stay so,
            and ranks keep their zero. ``share``: of the highest. ``raw``: as measured, and a rank
            counts only where there is no cosine.
        normalise_recency: whether recency goes from 0 for the oldest candidate to 1 for the newest.
    """

    similarity: float = 0.5
    recency: float = 0.2
    success: float = 0.15
    accesses: float = 0.1
    domain: float = 0.05
    recency_days: float = 30.0
    normalisation: Normalisation = "minmax"
    normalise_recency: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What a score is made of.

    Attributes:
        similarity, recency, success, accesses, domain: its terms, weighed: they add up to it.
        cosine, lexical: as measured.
        cosine_normalised, lexical_normalised: among the candidates, 0 to 1.
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
    recencies = [_recency(candidate.at, now, options.recency_days) for candidate in candidates]
    if options.normalise_recency:
        recencies = _minmax(recencies)
    scored = [
        _scored(candidate, _parts(candidate, options, recency, domain, *measured))
        for candidate, recency, *measured in zip(
            candidates,
            recencies,
            cosines,
            ranks,
            _where_known(cosines, of_cosines),
            _where_known(ranks, of_ranks),
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
    cosine: float | None,
    rank: float | None,
    cosine_normalised: float,
    rank_normalised: float,
) -> Parts:
    similarity = max(cosine_normalised, rank_normalised)
    if options.normalisation == "raw" and cosine is not None:
        similarity = cosine
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
    )


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


def _minmax(values: Sequence[float], least_span: float = 0.0) -> list[float]:
    """From the highest, which is 1, down. Values that are all alike are all the highest."""
    if not values:
        return []
    highest = max(values)
    span = max(highest - min(values), least_span)
    return [1.0 - (highest - value) / span if span > 0 else 1.0 for value in values]


def _ranks_minmax(ranks: Sequence[float]) -> list[float]:
    """A rank of 0 has no word in common with the query, whatever the others have."""
    return [
        normalised if rank > 0 else 0.0
        for rank, normalised in zip(ranks, _minmax(ranks), strict=True)
    ]


def _anchored(cosines: Sequence[float]) -> list[float]:
    return _minmax(cosines, _LEAST_SPAN)


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
    "minmax": (_minmax, _ranks_minmax),
    "anchored": (_anchored, _share),
    "share": (_share, _share),
    "raw": (_raw, _raw),
}
"""For cosines, and for ranks."""
