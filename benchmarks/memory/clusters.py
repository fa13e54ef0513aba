"""Vectors in clusters, like those of real texts, and their exact nearest neighbours.

A vector is its cluster's centre, plus an offset in 32 shared directions (real vectors also vary in
few), plus a little noise in all directions. Stored as float16, as in the database.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bottega.llm.builtin_embedder import DIMENSION

Halves = NDArray[np.float16]
Floats = NDArray[np.float32]

_BATCH = 20_000
_SHARED = 32


@dataclass(frozen=True)
class Clusters:
    """Positions of the clusters, determined by the seed.

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
        """Draw vectors of shape (count, d), each of length 1."""
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
    """Return the cosines of all pairs, shape (queries, vectors)."""
    found = np.empty((len(queries), len(vectors)), np.float32)
    for start in range(0, len(vectors), _BATCH):
        part = vectors[start : start + _BATCH].astype(np.float32)
        found[:, start : start + _BATCH] = queries @ part.T
    return found


def nearest(all_cosines: Floats, eligible: NDArray[np.bool_], k: int) -> NDArray[np.intp]:
    """Return the exact ``k`` nearest eligible vectors (shape of the cosines), best first."""
    masked = np.where(eligible, all_cosines, -np.inf)
    some = np.argpartition(masked, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(masked, some, axis=1), axis=1)
    return cast("NDArray[np.intp]", np.take_along_axis(some, order, axis=1))
