"""Embedders for comparison with the built-in one: some useless, some better than any real one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from bottega.llm.builtin_embedder import DIMENSION, words
from bottega.memory.text.embeddings import Vectors

About = Mapping[str, tuple[str | None, str | None]]


def _unit(vectors: NDArray[np.float64]) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return cast("Vectors", (vectors / np.maximum(lengths, 1e-9)).astype(np.float32))


def _direction(name: str) -> NDArray[np.float64]:
    """Return a random direction for a name, of length about 1."""
    drawn = np.random.default_rng(crc32(name.encode())).normal(size=DIMENSION)
    return cast("NDArray[np.float64]", drawn / np.sqrt(DIMENSION))


@dataclass(frozen=True)
class Noise:
    """A random direction per text, without meaning."""

    name: str = "noise"
    dimension: int = DIMENSION

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return _unit(np.array([_direction(text) for text in texts]).reshape(-1, DIMENSION))


@dataclass(frozen=True)
class Buckets:
    """Counts of words in 16 buckets: nearly meaningless, with high cosines of most texts."""

    name: str = "buckets"
    dimension: int = DIMENSION

    async def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), DIMENSION))
        for row, text in zip(vectors, texts, strict=True):
            for word, count in words(text).items():
                row[crc32(word.encode()) % 16] += count
        return _unit(vectors)


@dataclass(frozen=True)
class Understanding:
    """Vectors of the meaning that the generator gave a text: intent, entity and ``noise``.

    ``narrow`` is the weight of a direction common to all texts; as in many real models, it raises
    all cosines. Tickets' numbers and errors have no meaning here, as in most real models.
    """

    about: About
    name: str
    noise: float
    narrow: float = 0.6
    dimension: int = DIMENSION

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return _unit(np.array([self._vector(text) for text in texts]).reshape(-1, DIMENSION))

    def _vector(self, text: str) -> NDArray[np.float64]:
        intent, entity = self.about.get(text, (None, None))
        vector = self.narrow * _direction("") + self.noise * _direction(text)
        if intent is not None:
            vector += 0.6 * _direction(intent)
        if entity is not None:
            vector += 0.45 * _direction(entity)
        return vector
