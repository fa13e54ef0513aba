"""Embeddings: texts as vectors whose cosine measures similarity. Pure."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""Shape (n, d), one row of length 1 per text: the cosine of two is their dot product."""


def packed_vectors(vectors: Vectors) -> list[bytes]:
    """Return each row as a byte per number, as SQL's ``packed_vector`` does."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    shares = np.divide(vectors, largest, out=np.zeros_like(vectors), where=largest > 0)
    return [row.tobytes() for row in (128 + np.rint(127 * shares)).astype(np.uint8)]


class Embedder(Protocol):
    """Embedder of texts. Only vectors of embedders with the same name are compared."""

    @property
    def name(self) -> str:
        """Name and version; it must change whenever the vectors change."""

    @property
    def dimension(self) -> int:
        """The length of a row, ``d``."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``, in their order; shape (0, d) for none.

        Raises:
            UnavailableError, ModelError: temporary or permanent failure.
        """


class Chance(NamedTuple):
    """Cosines of texts that have nothing in common, as an embedder makes them.

    Attributes:
        floor: least cosine that is better than chance, before a tenant's own texts are known.
        tail: deviations above the median that unrelated texts of a tenant do not exceed.
        alike: no floor is higher: texts so near may help each other even where most are alike.
    """

    floor: float
    tail: float
    alike: float


class Background(NamedTuple):
    """Measured background of a tenant's texts.

    A query's cosines with them are about as high as the cosine with their mean: texts of one kind
    and one language are alike. What is above that says that two texts have a topic in common.

    Attributes:
        mean: of the vectors, shape (d,).
        median: of the cosines of unrelated pairs, each without that with the mean.
        deviation: of their lower half, which related pairs among them do not change.
    """

    mean: NDArray[np.float32]
    median: float
    deviation: float


_CHANCE = Chance(0.4, 7.0, 0.9)  # for a hosted model, whose tail is unknown


def chance(embedder: Embedder) -> Chance:
    """Return what an embedder ships; that of a common hosted model if it ships nothing."""
    return Chance(*getattr(embedder, "chance", _CHANCE))


class Floor(NamedTuple):
    """Least cosine of a query and a stored text that is better than chance.

    Attributes:
        alone: if no words say that they have a topic in common.
        with_words: if they share two content words.
    """

    alone: float
    with_words: float


def floor_of(embedder: Embedder, query: NDArray[np.float32], measured: Background | None) -> Floor:
    """Return the least cosine that is better than chance for a query.

    Args:
        query: its vector, shape (d,).
        measured: background of the texts; ``None``: use what the embedder ships. If it ships
            nothing, texts are related that are all but equal: cosines of unrelated texts are near 0
            with some models, and near 0.85 with others.
    """
    shipped = chance(embedder)
    if measured is None or measured.mean.shape != query.shape:
        alone = shipped.floor if hasattr(embedder, "chance") else shipped.alike
        return Floor(alone, shipped.floor / 3)
    mean, median, deviation = measured
    level = float(query @ mean) + median
    alone = min(max(level + shipped.tail * deviation, 0.2), shipped.alike)
    return Floor(alone, min(level + 4 / 3 * deviation, alone))


def measured_background(queries: Vectors, stored: Vectors, others: NDArray[np.bool_]) -> Background:
    """Measure the background of stored texts.

    A text is no part of the mean that its cosines are compared with, as a query is none.

    Args:
        queries: vectors of some of the texts, as queries; shape (m, d).
        stored: vectors of the texts, shape (n, d), at least two.
        others: false for pairs of a text with itself, shape (m, n).
    """
    means = others @ stored / others.sum(axis=1, keepdims=True)
    cosines = queries @ stored.T - (queries * means).sum(axis=1, keepdims=True)
    low, median = np.percentile(cosines[others], (15.87, 50))
    return Background(stored.mean(axis=0), float(median), float(median - low))


def is_ready(embedder: Embedder) -> bool:
    """Return true if an embedder can answer a query now; some load their model first."""
    ready: Callable[[], bool] | None = getattr(embedder, "is_ready", None)
    return ready is None or ready()


def compared_by(embedder: Embedder) -> Literal["meaning", "spelling"]:
    compared: Literal["meaning", "spelling"] = getattr(embedder, "compares", "meaning")
    return compared


async def embed_queries(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """Return the vectors of queries; some embedders tell them from stored texts."""
    embed = getattr(embedder, "embed_queries", embedder.embed)
    vectors: Vectors = await embed(texts)
    return vectors
