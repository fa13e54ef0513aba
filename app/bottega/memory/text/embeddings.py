"""Embeddings: vectors of texts, whose cosine measures how similar the texts are."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""Shape (n, d): one row of length 1 per text. So two rows' cosine is their dot product."""


def packed_vectors(vectors: Vectors) -> list[bytes]:
    """Convert each vector to one byte per number, like the SQL function ``packed_vector``."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    shares = np.divide(vectors, largest, out=np.zeros_like(vectors), where=largest > 0)
    return [row.tobytes() for row in (128 + np.rint(127 * shares)).astype(np.uint8)]


class Embedder(Protocol):
    """Embedder of texts. Only vectors of embedders with the same name are compared."""

    @property
    def name(self) -> str:
        """Name and version of the embedder; a new name is necessary if the vectors change."""

    @property
    def dimension(self) -> int:
        """Number ``d`` of dimensions of the vectors."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``, in the order of the texts; shape (n, d).

        Raises:
            UnavailableError, ModelError: the embedder failed, temporarily or permanently.
        """


class Chance(NamedTuple):
    """Limits of one embedder's cosines that separate relevant texts from unrelated texts.

    Attributes:
        floor: minimum cosine that counts as relevant while no background of the tenant's texts is
            measured.
        tail: cosines of unrelated texts are at most this number of deviations above the median.
        alike: upper limit of a measured minimum cosine. A text with at least this cosine may help
            even if most of the tenant's texts are similar.
    """

    floor: float
    tail: float
    alike: float


class Background(NamedTuple):
    """Measured cosines of a tenant's unrelated texts.

    Texts of the same kind and language are similar, even if their topics differ. So a query's
    cosine with an unrelated text is about the query's cosine with the mean of the tenant's texts. A
    text has the query's topic only if the text's cosine is higher.

    Attributes:
        mean: mean of the vectors of the tenant's texts, shape (d,).
        median: median, over queries and unrelated texts, of the query's cosine with the text minus
            the query's cosine with the mean.
        deviation: the median minus the 15.87th percentile; related texts are rare in this range.
    """

    mean: NDArray[np.float32]
    median: float
    deviation: float


_CHANCE = Chance(0.4, 7.0, 0.9)  # for a hosted model whose tail is unknown


def chance(embedder: Embedder) -> Chance:
    """Return the embedder's :class:`Chance`; by default, the values for a hosted model."""
    return Chance(*getattr(embedder, "chance", _CHANCE))


class Floor(NamedTuple):
    """Minimum cosine at which a stored text is relevant for a query.

    Attributes:
        alone: minimum cosine if query and text have fewer than two content words in common.
        with_words: minimum cosine if query and text have at least two content words in common.
    """

    alone: float
    with_words: float


def floor_of(embedder: Embedder, query: NDArray[np.float32], measured: Background | None) -> Floor:
    """Return the minimum cosines that count as relevant for a query.

    Args:
        query: the query's vector, shape (d,).
        measured: background of the texts; ``None``: the embedder's :class:`Chance` decides. For an
            embedder without a ``Chance``, only almost equal texts are relevant, because cosines of
            unrelated texts are near 0 for some models, and near 0.85 for other models.
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

    The function compares the cosines of each text with the mean of all other texts, because a later
    query is not part of the mean either.

    Args:
        queries: vectors of some of the texts, which were embedded as queries; shape (m, d).
        stored: vectors of the texts; shape (n, d), at least two rows.
        others: true where a query and a stored vector are of different texts; shape (m, n).
    """
    means = others @ stored / others.sum(axis=1, keepdims=True)
    cosines = queries @ stored.T - (queries * means).sum(axis=1, keepdims=True)
    low, median = np.percentile(cosines[others], (15.87, 50))
    return Background(stored.mean(axis=0), float(median), float(median - low))


def is_ready(embedder: Embedder) -> bool:
    """Return true if an embedder can embed a query now, without first loading a model."""
    ready: Callable[[], bool] | None = getattr(embedder, "is_ready", None)
    return ready is None or ready()


def compared_by(embedder: Embedder) -> Literal["meaning", "spelling"]:
    compared: Literal["meaning", "spelling"] = getattr(embedder, "compares", "meaning")
    return compared


async def embed_queries(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    embed = getattr(embedder, "embed_queries", embedder.embed)
    vectors: Vectors = await embed(texts)
    return vectors
