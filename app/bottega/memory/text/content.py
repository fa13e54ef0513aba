"""Content words of a text, which are the words that show the text's topic.

All words are content words except the stop words of the text's language (package ``stopwordsiso``),
and polite words and modal verbs of any language (``courtesy.txt``).
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 64

# Scripts without spaces between words: Thai to Burmese, Khmer, kana, and Han.
_HIRAGANA = "\u3040-\u309f"
_UNSPACED = (
    f"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{_HIRAGANA}\u30a0-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Matches letters of a script without spaces, or a word, including its punctuation inside.
_TOKEN = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+(?:[-./:@,'\u2019]+[^\W{_UNSPACED}]+)*")
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}]")
_JOINT = re.compile(r"[\W_]+")
_KANA = re.compile(f"[{_HIRAGANA}\u30a0-\u30ff]")
_GRAMMAR = re.compile(f"[{_HIRAGANA}]+")
_THAI = re.compile("[\u0e00-\u0e7f]")
_HUMPS = re.compile("[A-Z]?[a-z0-9]+(?:[A-Z][a-z0-9]+){2,}")
_CAPITALS = re.compile("[A-Z]{6,}")
_ACCENT = re.compile("[\u0300-\u036f]+")


class ContentWord(NamedTuple):
    """A word as the text spells it, or two letters of a script without spaces.

    Attributes:
        counts: weight of the word: 2 for an identifier, an error code or a number of three digits
            or more; 0 for each word of a text without content words; otherwise 1.
        run: number of the sequence without spaces that contains the two letters; 0 for a word
            that has spaces around it.
        place: index of the first of the two letters in the sequence.
    """

    text: str
    counts: int = 1
    run: int = 0
    place: int = 0


@dataclass(frozen=True, slots=True)
class ContentWords:
    """The distinct content words of a text, at most :data:`MOST_WORDS`.

    If a text has no content words, the object contains all words of the text, with weight 0, so
    that a search can use the words.
    """

    words: Sequence[ContentWord]

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]

    def some(self, places: Collection[int]) -> list[str]:
        """Return the words with the indexes ``places``, in order, except words of weight 0."""
        return [self.words[at].text for at in sorted(places) if self.words[at].counts]

    def count(self, some: Collection[int] | None = None) -> int:
        """Return the sum of the weights of all words, or of the words with the indexes ``some``.

        In scripts without spaces, two letters count as one word, and hiragana do not count, because
        hiragana mostly express grammar.
        """
        words = [word for place, word in enumerate(self.words) if some is None or place in some]
        letters = {
            (word.run, word.place + part): letter
            for word in words
            if word.run
            for part, letter in enumerate(word.text)
        }
        spaced = sum(word.counts for word in words if not word.run)
        return spaced + sum(size // 2 for size in _lengths(letters.items()))


def _lengths(letters: Iterable[tuple[tuple[int, int], str]]) -> Iterable[int]:
    size, before = 0, (0, 0)
    for at, letter in sorted(letters):
        if at != (before[0], before[1] + 1):
            yield size
            size = 0
        size += not _GRAMMAR.match(letter)
        before = at
    yield size


def content_words(text: str) -> ContentWords:
    """Return the content words of a text's first 4,000 characters, in the order of the text."""
    tokens = _TOKEN.findall(text[:4_000].replace("\x00", " "))
    parts = [part for token in tokens for part in _JOINT.split(token) if part]
    ignored = _ignored([word for word in map(_folded, parts) if len(word) > 1])
    cuts = _cuts(_language(text))
    words: dict[str, ContentWord] = {}
    for run, token in enumerate(tokens, 1):
        for word in _content_of(token, run, ignored, cuts):
            words.setdefault(_folded(word.text), word)
    if not words:
        words = {part: ContentWord(part, 0) for part in parts}
    # Identifiers show the topic best; long words show it better than short words.
    most = sorted(words.values(), key=lambda word: (-word.counts, -len(word.text)))[:MOST_WORDS]
    kept = set(most)
    return ContentWords([word for word in words.values() if word in kept])


def _content_of(
    token: str, run: int, ignored: Collection[str], cuts: Collection[str]
) -> Iterator[ContentWord]:
    if _UNSPACED_LETTER.match(token):
        for start, letters in _runs(token, cuts):
            for place, pair in enumerate(map("".join, pairwise(letters)), start):
                if not _GRAMMAR.fullmatch(pair):
                    yield ContentWord(pair, 1, run, place)
    elif _is_code(token):
        yield ContentWord(token, 2)
    else:
        for part in _JOINT.split(token):
            word = _folded(part)
            if len(word) > 1 and word not in ignored:
                yield ContentWord(part)


def _is_code(token: str) -> bool:
    """Return true for an identifier, an error code, or a number of three digits or more."""
    if any(map(str.isdigit, token)):
        return sum(map(str.isalnum, token)) >= 3
    return bool("_" in token.strip("_") or _HUMPS.fullmatch(token) or _CAPITALS.fullmatch(token))


def _folded(text: str) -> str:
    text = text.casefold()
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", _ACCENT.sub("", unicodedata.normalize("NFKD", text)))


# --- Words that are not content ------------------------------------------------------------------


def _ignored(words: Collection[str]) -> frozenset[str]:
    """Return the words that are not content words in the text's language.

    The text's language is the language with the most stop words in the text; several languages may
    have equally many. If a text of several words has no two stop words of the same language, a word
    of more than three letters is ignored only if it is an English stop word (*todo*, a Spanish stop
    word, is not ignored).
    """
    by_language: dict[str, set[str]] = {}
    for word in words:
        for language in _languages(word):
            by_language.setdefault(language, set()).add(word)
    most = max(map(len, by_language.values()), default=0)
    languages = frozenset().union(*(each for each in by_language.values() if len(each) == most))
    if most > 1 or len(set(words)) == 1:
        return languages
    english = by_language.get("en", ())
    return frozenset(word for word in languages if word in english or len(word) <= 3)


@lru_cache(maxsize=16_384)
def _languages(word: str) -> frozenset[str]:
    begin = (f"{word[:size]}*" for size in range(2, len(word) + 1))
    empty: frozenset[str] = frozenset()
    words = _telling_nothing()
    return empty.union(*(words.get(each, empty) for each in (word, *begin)))


@cache
def _telling_nothing() -> dict[str, frozenset[str]]:
    import stopwordsiso  # imported late, because the import reads the whole word list in 10 ms

    found: dict[str, set[str]] = {}
    for language in stopwordsiso.langs():
        for word in stopwordsiso.stopwords(language):
            for part in _JOINT.split(_folded(word)):
                found.setdefault(part, set()).add(language)
    for language, words in _courtesies().items():
        for word in words:
            found.setdefault(word, set()).add(language)
    return {word: frozenset(languages) for word, languages in found.items() if len(word) > 1}


@cache
def _courtesies() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    language = ""
    for line in Path(__file__).with_name("courtesy.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            language = line[1:-1]
        elif not line.startswith("#"):
            found.setdefault(language, set()).update(line.split())
    return {language: frozenset(words) for language, words in found.items()}


# --- Scripts without spaces ----------------------------------------------------------------------


def _language(text: str) -> str:
    if _KANA.search(text):
        return "ja"
    return "th" if _THAI.search(text) else "zh"


@cache
def _cuts(language: str) -> frozenset[str]:
    import stopwordsiso

    long = {word for word in stopwordsiso.stopwords(language) if len(word) > 1}
    return frozenset(long | _courtesies().get(language, frozenset()))


def _runs(token: str, cuts: Collection[str]) -> Iterator[tuple[int, str]]:
    index = start = 0
    while index < len(token):
        sizes = range(min(8, len(token) - index), 0, -1)
        size = next((size for size in sizes if token[index : index + size] in cuts), 0)
        if size:
            yield start, token[start:index]
            start = index + size
        index += size or 1
    yield start, token[start:]
