"""Vectors of real texts, by the built-in embedder.

A file has a text per line, for instance the summaries of all packages of a registry. If there are
fewer than needed, they are repeated with a little noise, as tasks that come again in other words.
"""

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.memory.clusters import Floats, Halves
from bottega.llm.builtin_embedder import DIMENSION, BuiltinEmbedder

_BATCH = 5_000
_NOISE = 0.2


async def vectors_of(path: Path, count: int, queries: int) -> tuple[Halves, Floats]:
    """Return vectors of a file's texts to store, and of others to ask for; the same ones each time.

    Raises:
        SystemExit: the file has too few texts.
    """
    with path.open(errors="replace") as lines:
        texts = list(dict.fromkeys(text for line in lines if len(text := line.strip()) > 25))
    Random(1).shuffle(texts)
    if len(texts) < 2 * queries:
        raise SystemExit(f"{path} has only {len(texts)} different lines of more than 25 characters")
    asked = await _embedded(texts[:queries])
    known = await _embedded(texts[queries : queries + count])
    print(f"{len(known):,} different texts")
    return np.concatenate([known, *_repeated(known, count - len(known))]), asked.astype(np.float32)


async def _embedded(texts: list[str]) -> Halves:
    embedder, left = BuiltinEmbedder(), iter(texts)
    parts = []
    while batch := list(islice(left, _BATCH)):
        parts.append((await embedder.embed(batch)).astype(np.float16))
    return np.concatenate(parts)


def _repeated(known: Halves, count: int) -> list[Halves]:
    """Return so many vectors near known ones, of length 1."""
    parts = []
    for start in range(0, count, _BATCH):
        random = np.random.default_rng((7, start))
        some = known[random.integers(len(known), size=min(_BATCH, count - start))]
        rows = some + random.normal(scale=_NOISE * DIMENSION**-0.5, size=some.shape)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        parts.append(rows.astype(np.float16))
    return parts
