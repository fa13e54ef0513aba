"""Embeddings: texts as vectors whose cosine measures similarity. Pure."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""Shape (n, d): one row of length 1 per text. So two rows' cosine is their dot product."""


def packed_vectors(vectors: Vectors) -> list[bytes]:
    """Convert each row to one byte per number, like the SQL function ``packed_vector``."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    shares = np.divide(vectors, largest, out=np.zeros_like(vectors), where=largest > 0)
    return [row.tobytes() for row in (128 + np.rint(127 * shares)).astype(np.uint8)]


class Embedder(Protocol):
    """Embedder of texts. Only vectors of embedders with the same name are compared."""

    @property
    def name(self) -> str:
        """Name and version of the embedder, which must change whenever its vectors change."""

    @property
    def dimension(self) -> int:
        """The number ``d`` of columns."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts`` in the same order; shape (0, d) for no texts.

        Raises:
            UnavailableError, ModelError: the embedder failed, temporarily or permanently.
        """


class Chance(NamedTuple):
    """Numbers about an embedder's cosines for texts that have nothing in common.

    Attributes:
        floor: minimum cosine that counts as relevant before a tenant's own texts are measured.
        tail: number of deviations above the median within which unrelated texts stay.
        alike: upper bound of every floor. Texts with at least this cosine may help each other even
            if most of the tenant's texts are similar.
    """

    floor: float
    tail: float
    alike: float


class Background(NamedTuple):
    """Measured background of a tenant's texts.

    Texts of the same kind and language are similar. So a query's cosines with a tenant's texts are
    about as high as the query's cosine with the mean of these texts. A text has the query's topic
    only if its cosine is higher.

    Attributes:
        mean: mean of the vectors, shape (d,).
        median: the median, over unrelated pairs, of the cosine minus the cosine with the mean.
        deviation: deviation of the lower half of these numbers, which related pairs do not change.
    """

    mean: NDArray[np.float32]
    median: float
    deviation: float


_CHANCE = Chance(0.4, 7.0, 0.9)  # for a hosted model whose tail is unknown


def chance(embedder: Embedder) -> Chance:
    """Return an embedder's own numbers; without these, the numbers of a common hosted model."""
    return Chance(*getattr(embedder, "chance", _CHANCE))


class Floor(NamedTuple):
    """Minimum cosine at which a stored text is relevant for a query.

    Attributes:
        alone: minimum if query and text have fewer than two content words in common.
        with_words: minimum if query and text have at least two content words in common.
    """

    alone: float
    with_words: float


def floor_of(embedder: Embedder, query: NDArray[np.float32], measured: Background | None) -> Floor:
    """Return the minimum cosines that count as relevant for a query.

    Args:
        query: the query's vector, shape (d,).
        measured: background of the texts; ``None``: the result is based on the embedder's own
            numbers. If the embedder has no numbers, only almost equal texts are relevant, because
            the cosines of unrelated texts are near 0 with some models and near 0.85 with others.
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

    A text's cosines are compared with a mean without this text, because the mean does not contain a
    query either.

    Args:
        queries: vectors of some of the texts, embedded like queries; shape (m, d).
        stored: vectors of the texts; shape (n, d), at least two rows.
        others: an array that is false for a text paired with itself; shape (m, n).
    """
    means = others @ stored / others.sum(axis=1, keepdims=True)
    cosines = queries @ stored.T - (queries * means).sum(axis=1, keepdims=True)
    low, median = np.percentile(cosines[others], (15.87, 50))
    return Background(stored.mean(axis=0), float(median), float(median - low))


def is_ready(embedder: Embedder) -> bool:
    """Return true if an embedder can embed a query now; some embedders must first load a model."""
    ready: Callable[[], bool] | None = getattr(embedder, "is_ready", None)
    return ready is None or ready()


def compared_by(embedder: Embedder) -> Literal["meaning", "spelling"]:
    compared: Literal["meaning", "spelling"] = getattr(embedder, "compares", "meaning")
    return compared


async def embed_queries(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """Return the vectors of queries; some embedders treat queries and stored texts differently."""
    embed = getattr(embedder, "embed_queries", embedder.embed)
    vectors: Vectors = await embed(texts)
    return vectors
