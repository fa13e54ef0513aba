"""Measures of a ranking with known relevance. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of one ranking, from 0 to 1. Recall counts at most k relevant items."""

    recall5: float
    recall10: float
    ndcg10: float
    any10: float


def measured(ranking: Sequence[int], relevant: AbstractSet[int]) -> Measured:
    """Measure ``ranking`` (item numbers, best first); ``relevant`` must not be empty."""
    gains = [item in relevant for item in ranking[:10]]
    ideal = sum(1 / log2(place + 2) for place in range(min(10, len(relevant))))
    return Measured(
        recall5=sum(gains[:5]) / min(5, len(relevant)),
        recall10=sum(gains) / min(10, len(relevant)),
        ndcg10=sum(gain / log2(place + 2) for place, gain in enumerate(gains)) / ideal,
        any10=float(any(gains)),
    )


def interval(values: Sequence[float], seed: int = 0, rounds: int = 2_000) -> tuple[float, float]:
    """Return the bootstrap 95 % confidence interval of the mean, by percentiles."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (rounds, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def recall_of_exact(found: Sequence[Sequence[int]], exact: NDArray[np.intp]) -> float:
    """Return the share of the exact nearest, shape (queries, k), that an index found."""
    hits = (len(set(row) & set(right.tolist())) for row, right in zip(found, exact, strict=True))
    return sum(hits) / exact.size
