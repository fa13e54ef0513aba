"""Scores of the episodes that a query found. Pure.

Cosines and full-text ranks have scales that depend on the embedder and the query. So each is first
normalised to 0 to 1 among the candidates, and so is their combination. Otherwise terms with a fixed
scale, especially recency, would outweigh similarity. ``benchmarks/memory`` compares both methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp, isfinite, log1p, pi
from typing import Literal
from uuid import UUID

Normalisation = Literal["added", "raw"]

_DAY_S = 86_400.0
_ALL_WORDS = 6 / pi**2
"""PostgreSQL's rank of a text with each of the query's words once, at the highest weight."""
_COMPARED = 20
"""Candidates that ``added`` scales to 0 to 1; half of all if that is more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode that a query found.

    Attributes:
        outcome: the effective one, feedback included.
        cosine: of its vector and the query's, -1 to 1; ``None`` if either is missing.
        lexical: rank of its words for the query's, rare ones weigh more, at least 0; ``None`` if
            the query has no words.
        words: those of the query's telling words that it has, the rarest first; ``None`` if none.
        word_share: what these tell, as a share of what all the query's words tell, 0 to 1.
    """

    episode_id: UUID
    at: datetime
    outcome: str
    domain: str | None
    access_count: int
    cosine: float | None
    lexical: float | None
    words: Sequence[str] | None = None
    word_share: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """Weights of the terms, and methods of normalisation.

    Attributes:
        recency_days: age at which recency is 1/e.
        normalisation: of cosines and ranks. ``added``: a cosine becomes its share of the way from
            the lowest cosine to 1, a rank its share of :data:`_ALL_WORDS`; similarity is their sum,
            scaled to 0 for the twentieth and 1 for the best. ``raw``: similarity is the cosine as
            measured, or the rank in place of a missing cosine.
    """

    similarity: float = 0.5
    recency: float = 0.2
    success: float = 0.15
    accesses: float = 0.1
    domain: float = 0.05
    recency_days: float = 30.0
    normalisation: Normalisation = "added"


@dataclass(frozen=True, slots=True)
class Parts:
    """The terms of a score.

    Attributes:
        similarity, recency, success, accesses, domain: weighted; the score is their sum.
        cosine, lexical: as measured.
        cosine_normalised, lexical_normalised: among the candidates, 0 to 1.
        words, word_share: the telling words of both, and the share of what the query's words tell.
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
    words: Sequence[str] = ()
    word_share: float = 0.0


LEAST_WORD_SHARE = 0.34
"""Share of what a query's words tell, above which a common topic is likelier than chance."""


def is_relevant(parts: Parts, floor: float) -> bool:
    """Check if an episode is better than one that was drawn by chance; even the best may not be.

    Args:
        floor: least cosine that is better than chance.
    """
    return parts.word_share >= LEAST_WORD_SHARE or (parts.cosine or -1.0) >= floor


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with its score and terms."""

    candidate: Candidate
    score: float
    parts: Parts


def score(
    candidates: Sequence[Candidate], options: ScoringOptions, now: datetime, domain: str | None
) -> list[Scored]:
    """Return the candidates, best first; equal scores in the order of ids.

    Args:
        domain: of the current task; ``None`` equals no episode's domain.
    """
    cosines = [_finite(candidate.cosine) for candidate in candidates]
    ranks = [_finite(candidate.lexical) for candidate in candidates]
    if options.normalisation == "added":
        near, named = _above_lowest(cosines), [_of_all_words(rank) for rank in ranks]
        similarities = _added(cosines, near, named)
    else:
        near, named = [_within(cosine) for cosine in cosines], [_within(rank) for rank in ranks]
        similarities = [
            rank if cosine is None else near_by
            for cosine, near_by, rank in zip(cosines, near, named, strict=True)
        ]
    recencies = [_recency(candidate.at, now, options.recency_days) for candidate in candidates]
    scored = [
        _scored(candidate, _parts(candidate, options, recency, domain, *measured))
        for candidate, recency, *measured in zip(
            candidates, recencies, similarities, cosines, ranks, near, named, strict=True
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
        words=candidate.words or (),
        word_share=candidate.word_share,
    )


def _added(
    cosines: Sequence[float | None], near: Sequence[float], named: Sequence[float]
) -> list[float]:
    """Return each candidate's similarity from its normalised cosine and rank."""
    sums = _stretched([sum(pair) for pair in zip(near, named, strict=True)])
    return [
        0.0 if cosine is None and rank == 0 else value
        for cosine, rank, value in zip(cosines, named, sums, strict=True)
    ]


def _recency(at: datetime, now: datetime, days: float) -> float:
    """Return 1 for now or a future time, falling with age."""
    return exp(-max((now - at).total_seconds(), 0.0) / _DAY_S / days)


def _finite(value: float | None) -> float | None:
    """Return ``None`` for NaN, PostgreSQL's cosine of a vector of zeros."""
    return value if value is not None and isfinite(value) else None


# --- Normalisation ------------------------------------------------------------------------------


def _above_lowest(cosines: Sequence[float | None]) -> list[float]:
    """Subtract the lowest cosine: that of unrelated texts depends on the embedder."""
    lowest = min((each for each in cosines if each is not None), default=0.0)
    return [
        (each - lowest) / (1.0 - lowest) if each is not None and lowest < 1 else 0.0
        for each in cosines
    ]


def _of_all_words(rank: float | None) -> float:
    return min((rank or 0.0) / _ALL_WORDS, 1.0)


def _within(value: float | None) -> float:
    return min(max(value or 0.0, 0.0), 1.0)


def _stretched(sums: Sequence[float]) -> list[float]:
    """Scale the better sums to 0 to 1, and others to 0; equal sums are all 1."""
    if not sums:
        return []
    better = sorted(sums, reverse=True)[: max(_COMPARED, len(sums) // 2)]
    return [_between(value, better[-1], better[0]) for value in sums]


def _between(value: float, lowest: float, highest: float) -> float:
    if highest == lowest:
        return float(value == highest)
    return max((value - lowest) / (highest - lowest), 0.0)
