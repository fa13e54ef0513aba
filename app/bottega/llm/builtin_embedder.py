"""The built-in embedder, which needs no model and no network. Pure.

The embedder compares spelling, not meaning: two texts are similar if they share words or parts of
words. A hash maps each feature to an index of the vector, so no vocabulary is needed (Weinberger
et al. 2009, *Feature Hashing for Large Scale Multitask Learning*).
"""

import asyncio
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import log, sqrt
from struct import pack
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""Shape (n, 768), one row of length 1 per text."""

DIMENSION = 768
MAX_CHARACTERS = 32_768
"""Maximum number of characters of a text: about the 8,000 tokens that hosted models accept."""

_BATCH = 4

# Feature weights are integers. Sums of integers are exact in any order, so every machine computes
# the same bits. A change of a weight changes the vectors, so the embedder's name must change, too.
_NAME = "builtin-1"
_STEM = 64
_GRAMS = 96
_STOP_WORD = 8
_CODE = 4  # size of a character in UTF-32, and of a packed feature, in bytes
_COUNTED = 64
_TERM_FREQUENCY = [0] + [round(16 * (1 + log(count))) for count in range(1, _COUNTED + 1)]
_PLACE_BITS = 10

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    a about above after again all also am an and any are as at be because been before being below
    between both but by can could did do does doing don down during each few for from further had
    has have having he her here hers him his how i if in into is it its itself just me more most my
    no nor not now of off on once only or other our out over own same she should so some such than
    that the their them then there these they this those through to too under until up us very was
    we were what when where which while who whom why will with would you your s t ll re ve
    ad agli ai al alla alle allo anche avere aveva c che chi ci come con cui d da dagli dai dal
    dalla dalle dallo de degli dei del della delle dello di dopo dove e ed era erano essere fa fra
    gli ha hanno ho il io l la le lei li lo loro lui ma mi mio ne negli nei nel nella nelle nello
    noi non nostro o ogni oppure per perche piu poi prima puo quale quali quando quanto quella
    quelle quelli quello questa queste questi questo qui se sei senza si sia siamo sono sopra sotto
    su sua sue sugli sui sul sulla sulle sullo suo suoi tra tu tua tuo tutti tutto un una uno va vi
    voi
    """,
    )
)
_SUFFIX = re.compile(
    "(?:azion[ei]|zion[ei]|ations?|ments?|ament[eio]|ment[eio]|ings?|ness|ies|e[ds]|ers?|ly|s"
    "|[aeiou]+)$"
)
_SHORTEST_STEM = 3
_LONGEST_SUFFIX = 6

# A Han character is treated as a word: it has a meaning, and no spaces separate it from others.
_HAN = "\u2e80-\u2fdf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_HAN}]|[^\W_{_HAN}]{{1,40}}")
_ACCENT = re.compile("[\u0300-\u036f]+")


class BuiltinEmbedder:
    """Embedder that hashes words and character n-grams. Every machine computes identical vectors.

    - The features of a word are the word's stem, and the word's n-grams of 3 and 4 characters. The
      n-grams contain marks for the start and the end of the word. The sum of the n-grams' squared
      weights is about the same for every word.
    - A stop word (English or Italian) has a low weight and no n-grams.
    - If a word occurs n times, its features' weights are multiplied by 1 + ln n.
    - Each number of a vector is replaced by its signed square root, so that strong features do not
      hide weak features.
    - Case, accents and Unicode compatibility forms make no difference.
    - A text without letters and digits has a fixed vector.
    """

    name = _NAME
    dimension = DIMENSION
    compares = "spelling"
    chance = (0.42, 11.5, 0.42)  # see bottega.memory.text.embeddings.Chance

    def __init__(self) -> None:
        self._features = lru_cache(maxsize=16_384)(features)

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``, shape (n, 768). Other asyncio tasks run between batches.

        The vector depends only on the first 32,768 characters of a text. The method raises no
        errors.
        """
        vectors = np.empty((len(texts), DIMENSION), np.float32)
        for start in range(0, len(texts), _BATCH):
            if start:
                await asyncio.sleep(0)
            batch = slice(start, start + _BATCH)
            vectors[batch] = self._vectors([words(text) for text in texts[batch]])
        return vectors

    def _vectors(self, bags: Sequence[Counter[str]]) -> Vectors:
        found = [self._features(word) for word in chain.from_iterable(bags)]
        packed = np.frombuffer(b"".join(found), np.dtype("<i4"))
        sizes = np.array([len(each) // _CODE for each in found], np.intp)
        counts = chain.from_iterable(bag.values() for bag in bags)
        times = np.array([_TERM_FREQUENCY[min(n, _COUNTED)] for n in counts], np.intp)
        rows = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
        sums = np.bincount(
            np.repeat(rows * DIMENSION, sizes) + (packed & (1 << _PLACE_BITS) - 1),
            weights=(packed >> _PLACE_BITS) * np.repeat(times, sizes),
            minlength=len(bags) * DIMENSION,
        )
        return _levelled(np.asarray(sums, np.float64).reshape(len(bags), DIMENSION))


def _levelled(sums: NDArray[np.float64]) -> Vectors:
    sizes = np.abs(sums)
    totals = sizes.sum(axis=1, keepdims=True)
    blank = totals[:, 0] == 0  # the text has no words, or the words' weights cancel each other
    sums[blank, 0] = sizes[blank, 0] = totals[blank] = 1
    vectors: Vectors = np.copysign(np.sqrt(sizes / totals), sums).astype(np.float32)
    return vectors


def words(text: str) -> Counter[str]:
    """Count the words of a text in normalised spelling."""
    text = text[:MAX_CHARACTERS]
    if not text.isascii():
        text = _ACCENT.sub("", unicodedata.normalize("NFKD", text))
        text = unicodedata.normalize("NFKC", text)
    return Counter(_WORD.findall(text.casefold()))


def features(word: str) -> bytes:
    """Return a word's features; each is a little-endian int32: index + 1,024 * signed weight."""
    if word in _STOP_WORDS:
        return _packed([_code(f"={word}")], [_STOP_WORD])
    marked = _code(f"<{word}>")
    grams = [
        marked[start : start + length]
        for length in (3 * _CODE, 4 * _CODE)
        for start in range(0, len(marked) - length + 1, _CODE)
    ]
    weight = round(_GRAMS / sqrt(len(grams)))
    return _packed([_code(f"={stem(word)}"), *grams], [_STEM] + [weight] * len(grams))


def stem(word: str) -> str:
    """Return a word without its English or Italian ending. The rule is simple and may be wrong."""
    ending = _SUFFIX.search(word, max(_SHORTEST_STEM, len(word) - _LONGEST_SUFFIX))
    return word[: ending.start()] if ending else word


def _code(text: str) -> bytes:
    return text.encode("utf-32-le", "surrogatepass")


def _packed(names: Sequence[bytes], weights: Sequence[int]) -> bytes:
    """Pack features in the form that :func:`features` returns.

    The CRC of a feature's name determines the feature's index and sign. Similar names have related
    CRCs, so each CRC is multiplied by an odd number. The product's high bits depend on all bits
    of the CRC (Knuth's multiplicative hashing).
    """
    values = []
    for name, weight in zip(names, weights, strict=True):
        checksum = crc32(name)
        place = (checksum * 0x9E3779B1 & 0xFFFFFFFF) * DIMENSION >> 32
        values.append(place + ((weight if checksum & 1 else -weight) << _PLACE_BITS))
    return pack(f"<{len(values)}i", *values)
