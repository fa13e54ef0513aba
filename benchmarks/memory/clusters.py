"""Vectors that lie in clusters, as those of real texts do, and what is nearest among them.

A vector is its cluster's centre, plus what tells it from its neighbours (in 32 directions that all
share, as real ones have few that matter), plus a little in all directions. Kept as float16, as the
database keeps them.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bottega.memory.embeddings import DIMENSION

Halves = NDArray[np.float16]
Floats = NDArray[np.float32]

_BATCH = 20_000
_SHARED = 32


@dataclass(frozen=True)
class Clusters:
    """Where the clusters lie. The same seed gives the same ones.

    Attributes:
        centres: shape (c, d). directions: shape (32, d).
    """

    centres: Floats
    directions: Floats

    @classmethod
    def drawn(cls, count: int, seed: int) -> "Clusters":
        random = np.random.default_rng(seed)
        scale = DIMENSION**-0.5
        return cls(
            random.normal(scale=scale, size=(count, DIMENSION)).astype(np.float32),
            random.normal(scale=scale, size=(_SHARED, DIMENSION)).astype(np.float32),
        )

    def vectors(self, count: int, seed: int) -> Halves:
        """Shape (count, d), each of length 1."""
        made = np.empty((count, DIMENSION), np.float16)
        for start in range(0, count, _BATCH):
            size = min(_BATCH, count - start)
            random = np.random.default_rng((seed, start))
            rows = self.centres[random.integers(len(self.centres), size=size)]
            within = random.normal(scale=0.15, size=(size, _SHARED)).astype(np.float32)
            rows = rows + within @ self.directions
            rows += random.normal(scale=0.3 * DIMENSION**-0.5, size=rows.shape).astype(np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            made[start : start + size] = rows
        return made


def cosines(vectors: Halves, queries: Floats) -> Floats:
    """Of all with all, shape (queries, vectors)."""
    found = np.empty((len(queries), len(vectors)), np.float32)
    for start in range(0, len(vectors), _BATCH):
        part = vectors[start : start + _BATCH].astype(np.float32)
        found[:, start : start + _BATCH] = queries @ part.T
    return found


def nearest(all_cosines: Floats, eligible: NDArray[np.bool_], k: int) -> NDArray[np.intp]:
    """The exact ``k`` nearest of those that are eligible (shape of the cosines), best first."""
    masked = np.where(eligible, all_cosines, -np.inf)
    some = np.argpartition(masked, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(masked, some, axis=1), axis=1)
    return cast("NDArray[np.intp]", np.take_along_axis(some, order, axis=1))
