"""How good a ranking is, when it is known what is relevant. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one ranking, each from 0 to 1. Recall is out of what fits: min(k, how many there are)."""

    recall5: float
    recall10: float
    ndcg10: float
    any10: float


def measured(ranking: Sequence[int], relevant: AbstractSet[int]) -> Measured:
    """``ranking``: item numbers, best first; ``relevant`` holds one at least."""
    gains = [item in relevant for item in ranking[:10]]
    ideal = sum(1 / log2(place + 2) for place in range(min(10, len(relevant))))
    return Measured(
        recall5=sum(gains[:5]) / min(5, len(relevant)),
        recall10=sum(gains) / min(10, len(relevant)),
        ndcg10=sum(gain / log2(place + 2) for place, gain in enumerate(gains)) / ideal,
        any10=float(any(gains)),
    )


def interval(values: Sequence[float], seed: int = 0, rounds: int = 2_000) -> tuple[float, float]:
    """The 95 % confidence interval of the mean: bootstrap over the values, by percentiles."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (rounds, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def recall_of_exact(found: Sequence[Sequence[int]], exact: NDArray[np.intp]) -> float:
    """Which share of the exact nearest, shape (queries, k), an index has found."""
    hits = (len(set(row) & set(right.tolist())) for row, right in zip(found, exact, strict=True))
    return sum(hits) / exact.size
