"""Intervals of means and rates over clusters (tasks, games), by the bootstrap."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From sums over clusters, shape (rounds, columns), to one value a round."""

_ROUNDS = 10_000
_SEED = 1


def interval(
    clusters: Sequence[Sequence[float]], statistic: Statistic
) -> tuple[float, float, float]:
    """Return a statistic and its 95 % interval.

    Args:
        clusters: a row of numbers for each cluster.
        statistic: of the sums of these rows. Each round sums as many clusters as there are, drawn
            with replacement.
    """
    rows = np.asarray(clusters, dtype=np.float64)
    drawn = np.random.default_rng(_SEED).multinomial(
        len(rows), np.full(len(rows), 1 / len(rows)), size=_ROUNDS
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        (value,) = statistic(rows.sum(axis=0)[None])
        low, high = np.nanpercentile(statistic(drawn @ rows), (2.5, 97.5))
    return float(value), float(low), float(high)


def of_mean(values: Sequence[float]) -> str:
    """Return the mean of one number a cluster, with its interval, as a text."""
    return stated([(value, 1) for value in values], _ratio)


def stated(clusters: Sequence[Sequence[float]], statistic: Statistic) -> str:
    value, low, high = interval(clusters, statistic)
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return sums[:, 0] / sums[:, 1]
