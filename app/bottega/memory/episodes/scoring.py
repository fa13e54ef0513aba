"""Scores of the episodes that a query found.

A score is the sum of weighted terms: similarity (of vectors and words), recency, success, accesses
and domain. The ranges of cosines and full-text ranks depend on the embedder and the query. So this
module first scales the candidates' cosines and ranks to the range 0 to 1, and then scales the sum
of both. Otherwise the other terms, especially recency, would outweigh similarity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import exp, isfinite, log1p, pi
from typing import Literal
from uuid import UUID

Normalisation = Literal["added", "raw"]

_ALL_WORDS = 6 / pi**2
"""Rank that PostgreSQL gives a text that has each word of the query once, at the highest weight."""
LEAST_WORDS = 2
"""Number of content words that query and episode must share if only words are compared."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode that a query found.

    Attributes:
        outcome: from feedback or checks if known, otherwise from the run.
        cosine: cosine of the vectors of episode and query, -1 to 1; ``None``: a vector is
            missing.
        lexical: full-text rank of the episode for the query, at least 0; rare words have a higher
            weight; ``None``: the query has no words.
        words: indexes of the query's content words that occur in the episode; if the tenant has 200
            episodes or more, only the indexes of rare words.
    """

    episode_id: UUID
    at: datetime
    outcome: str
    domain: str | None
    access_count: int
    cosine: float | None
    lexical: float | None
    words: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """Weights of a score's terms, and the method of normalisation.

    Attributes:
        normalisation: ``added``: cosines are scaled, 0 for the lowest cosine and 1 for the cosine
            1. Ranks are divided by :data:`_ALL_WORDS`. The similarity is the sum of both values,
            scaled to 1 for the best candidate and 0 for the last of the best 20 (or of the better
            half). ``raw``: the similarity is the unscaled cosine or, without a cosine, the rank.
    """

    similarity: float = 0.5
    recency: float = 0.2
    success: float = 0.15
    accesses: float = 0.1
    domain: float = 0.05
    normalisation: Normalisation = "added"


@dataclass(frozen=True, slots=True)
class Parts:
    """The terms of a score.

    Attributes:
        similarity, recency, success, accesses, domain: weighted terms; their sum is the score.
        cosine, lexical: cosine and full-text rank, unscaled.
        cosine_normalised, lexical_normalised: cosine and rank after scaling, from 0 to 1.
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

    @property
    def score(self) -> float:
        return sum((self.similarity, self.recency, self.success, self.accesses, self.domain))


def is_relevant(
    shared: int, cosine: float | None, floor: float | None, *, by_meaning: bool
) -> bool:
    """Return true if an episode and a query have more in common than two random texts have.

    Agents get only relevant episodes. If vectors that represent meaning were compared, only the
    cosine decides.

    Args:
        shared: number of content words that occur in both the episode and the query.
        cosine: cosine of both vectors; ``None``: vectors were not compared.
        floor: minimum cosine that counts as relevant; ``None``: vectors were not compared.
    """
    is_near = cosine is not None and floor is not None and cosine >= floor
    if by_meaning and cosine is not None:
        return is_near
    return shared >= LEAST_WORDS or (is_near and shared > 0)


def score(
    candidates: Sequence[Candidate], options: ScoringOptions, now: datetime, domain: str | None
) -> list[tuple[Candidate, Parts]]:
    """Return each candidate and the terms of its score, sorted by score (highest first), then id.

    Args:
        domain: domain of the current task; ``None``: unknown, and equal to no episode's domain.
    """
    cosines = [_finite(each.cosine) for each in candidates]
    ranks = [_finite(each.lexical) for each in candidates]
    if options.normalisation == "added":
        near = _above_lowest(cosines)
        shares = [min((rank or 0.0) / _ALL_WORDS, 1.0) for rank in ranks]
        similarities = _stretched([sum(both) for both in zip(near, shares, strict=True)])
    else:
        near, shares = ([_within(each) for each in values] for values in (cosines, ranks))
        similarities = near
    scored = []
    for place, candidate in enumerate(candidates):
        cosine, rank, similarity = cosines[place], ranks[place], similarities[place]
        if cosine is None and (options.normalisation == "raw" or not rank):
            similarity = shares[place]
        age_days = max((now - candidate.at) / timedelta(days=1), 0.0)
        parts = Parts(
            similarity=options.similarity * similarity,
            recency=options.recency * exp(-age_days / 30),
            success=options.success * (candidate.outcome == "SUCCESS"),
            accesses=options.accesses * min(log1p(candidate.access_count) / 10, 1.0),
            domain=options.domain * (domain is not None and candidate.domain == domain),
            cosine=cosine,
            lexical=rank,
            cosine_normalised=near[place],
            lexical_normalised=shares[place],
        )
        scored.append((candidate, parts))
    return sorted(scored, key=lambda pair: (-pair[1].score, pair[0].episode_id))


def _finite(value: float | None) -> float | None:
    """Convert NaN to ``None`` and -0.0 to 0.0; PostgreSQL returns NaN for a zero vector."""
    return value + 0.0 if value is not None and isfinite(value) else None


def _within(value: float | None) -> float:
    return min(max(value or 0.0, 0.0), 1.0)


def _above_lowest(cosines: Sequence[float | None]) -> list[float]:
    """Scale cosines: the lowest becomes 0, and 1 stays 1. The lowest depends on the embedder."""
    lowest = min((each for each in cosines if each is not None), default=0.0)
    return [
        (each - lowest) / (1.0 - lowest) if each is not None and lowest < 1 else 0.0
        for each in cosines
    ]


def _stretched(sums: Sequence[float]) -> list[float]:
    """Scale the best sums to the range 0 to 1; all other sums become 0.

    The best sums are the better half, but at least 20. If they are equal, they become 1."""
    better = sorted(sums, reverse=True)[: max(20, len(sums) // 2)]
    if not better or better[0] == better[-1]:
        return [float(each == better[0]) for each in sums]
    return [max((each - better[-1]) / (better[0] - better[-1]), 0.0) for each in sums]
