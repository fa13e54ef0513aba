"""Groups of episodes that are similar enough to be consolidated. Pure.

Vectors alone do not suffice: two tasks that differ in one number have a cosine of 0.997, in a
"not" 0.996, and in two swapped names 1.0. So the tasks must also have the same words in the same
order. Only case, spacing, punctuation, articles and courtesies may differ. In doubt two tasks are
different: keeping both costs some room, merging them wrongly loses information.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from bottega.memory.episodes.consolidation import Closeness

# --- Equal tasks --------------------------------------------------------------------------------


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_QUOTED = re.compile(
    r"(?<!\w)'[^']+'(?!\w)"
    r'|"[^"]+"|`[^`]+`|«[^«»]+»'
    "|\u201c[^\u201c\u201d]+\u201d|\u2018[^\u2018\u2019]+\u2019(?!\\w)"
)
_COMMA = re.compile(r"(?<!\d)[,;]|[,;](?!\d)")
_WORD = re.compile(r"\(*([^\W\d_](?:['-]?[^\W\d_])+)[).,;:!?…]*")
# File names, paths, code, addresses.
_IDENTIFIER = re.compile(r"[/\\_~@]|\w\.\w|\.\w")
_UNIT_AT_MOST = 3  # characters

# Fillers, which may be left out. Articles count as fillers only if the text is clearly in their
# language: in Italian "a" means "to", and "la", "le", "lo", "gli" and "i" are also pronouns.
_COURTESIES = _set("please kindly gentilmente cortesemente")
_PER_COURTESY = _set("favore piacere cortesia")
_ASKING = _set("can could would will")
_ARTICLES_EN = _set("the a an")
_ARTICLES_IT = _set("il un uno una")
_ENGLISH = _set("""
    the an and of to for from with at by is are be it this that not my your our all into
    add analyse analyze build check compare compute create delete describe draft explain find fix
    generate get give list make plan prepare remove review run send show summarise summarize tell
    translate update write
""")
_ITALIAN = _set("""
    il gli di del della dello dei delle degli al alla allo ai alle agli da dal dalla con che e
    un uno una nel nella sul sulla non ed sono questo questa favore piacere cortesia
    aggiungi aggiorna analizza calcola cancella cerca chiedi confronta controlla crea dammi descrivi
    elenca elimina genera invia mostra prepara riassumi rimuovi scrivi spiega traduci trova
""")
# After these words "a" is a name, as in "plan a".
_LETTERED = _set("""
    appendix block building category choice class column company customer exhibit gate grade group
    hepatitis key label level line list method model module node option part person phase plan
    point product project queue room row scenario section series server set site stage step table
    task team test tier type unit user variable variant vendor version vitamin zone
""")
# Different words in capitals, unless the whole text is in capitals: IT is not it.
_ACRONYMS = _set("it us who may am pm me ai")
# Not a unit, even after a number.
_JOINING = _ENGLISH | _ITALIAN | _ACRONYMS | _set("in on or as vs per")


def task_key(task: Mapping[str, Any], whole_input: Any = None) -> bytes | None:
    """Return a digest of 16 bytes that is equal for equally worded tasks only.

    Args:
        task: as stored in an episode; all members count except ``complexity``.
        whole_input: the full input, if ``task`` holds a shortened one.

    Returns:
        ``None`` if the input has no words: such a task equals no other.
    """
    rest = {name: part for name, part in task.items() if name != "complexity"}
    asked = rest.pop("original_input", None) if whole_input is None else whole_input
    rest.pop("original_input", None)
    tokens = said(asked) if isinstance(asked, str) else [_json(asked)]
    if not asked or not any(each.isalnum() for token in tokens for each in token):
        return None
    return blake2b(_json([tokens, rest]).encode(), digest_size=16).digest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def said(text: str) -> list[str]:
    """Split a text into normalised words and signs, in order, without fillers.

    Quoted text stays as it is, for any kind of quotes. File names and other identifiers keep their
    case, as do units after a number. Number words and look-alike letters are not unified.
    """
    text = unicodedata.normalize("NFC", text)
    shouted = not any(map(str.islower, text))
    tokens: list[str] = []
    end = 0
    for quoted in _QUOTED.finditer(text):
        tokens += _words(text[end : quoted.start()], shouted)
        tokens.append(f'"{" ".join(quoted.group()[1:-1].split())}"')
        end = quoted.end()
    return _without_fillers(tokens + _words(text[end:], shouted))


def _words(text: str, shouted: bool) -> list[str]:
    """Split a text without quotes into words."""
    words: list[str] = []
    for part in _COMMA.sub(" ", text.replace("\u2019", "'")).split():
        word = _bare(part)
        if not word:
            continue
        low = word.lower()
        counted = bool(words) and words[-1][-1].isdigit() and len(word) <= _UNIT_AT_MOST
        if (counted and low not in _JOINING) or word[0].isdigit() or _IDENTIFIER.search(word):
            words.append(word)
        elif word.isupper() and not shouted and (low in _ACRONYMS or (low in _FILLERS and words)):
            words.append("^" + low)
        else:
            words.append(low)
    return words


def _bare(part: str) -> str:
    """Strip the punctuation of a sentence from a word; keep signs that may have a meaning."""
    if part in ("\N{EM DASH}", "…", ":"):
        return ""
    if word := _WORD.fullmatch(part):
        return word.group(1)
    bare = part.rstrip(",;:?…") or part
    ended = bare.rstrip(".")
    return ended if ended and (ended[-1].isalnum() or ended[-1] in ")%!") else bare


_FILLERS = _COURTESIES | _ARTICLES_EN | _ARTICLES_IT


def _without_fillers(words: Sequence[str]) -> list[str]:
    known = set(words)
    english, italian = len(known & _ENGLISH), len(known & _ITALIAN)
    articles: frozenset[str] = frozenset(("the",))
    if english > italian:
        articles = _ARTICLES_EN
    elif italian > english:
        articles = _ARTICLES_IT
    kept: list[str] = []
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        courtesy = word in _COURTESIES or (
            (word == "per" and after in _PER_COURTESY)
            or (word in _PER_COURTESY and before == "per")
        )
        if not courtesy and (word not in articles or not after or before in _LETTERED):
            kept.append(word)
    return kept[2:] if len(kept) > 2 and kept[0] in _ASKING and kept[1] == "you" else kept


# --- Groups to consolidate ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimilarityCandidate:
    """Episode that may be merged with others.

    Attributes:
        alike: values that must be equal in all members of a group.
        whole: its vector, of length 1.
    """

    id: UUID
    at: datetime
    alike: tuple[object, ...]
    whole: NDArray[np.float32]


def groups(
    candidates: Sequence[SimilarityCandidate], closeness: Closeness = Closeness()
) -> list[list[SimilarityCandidate]]:
    """Return groups of two or more episodes in which each is close to each other.

    Complete linkage: joins the two closest groups while their two farthest members are close
    enough. The order of ``candidates`` does not matter. A block of more than ``closeness.most``
    candidates is split by age, and each part is compared separately.
    """
    found: list[list[SimilarityCandidate]] = []
    blocks: dict[tuple[object, ...], list[SimilarityCandidate]] = {}
    for candidate in sorted(candidates, key=lambda each: (each.at, each.id)):
        blocks.setdefault(candidate.alike, []).append(candidate)
    for block in blocks.values():
        for start in range(0, len(block), closeness.most):
            found += _linked(block[start : start + closeness.most], closeness)
    return found


def _linked(
    block: Sequence[SimilarityCandidate], closeness: Closeness
) -> list[list[SimilarityCandidate]]:
    """Group episodes with equal ``alike``, given from old to new."""
    if len(block) < 2:
        return []
    vectors = np.stack([each.whole for each in block]).astype(np.float64)
    near = vectors @ vectors.T
    times = np.array([each.at.timestamp() for each in block])
    near[np.abs(times[:, None] - times) > closeness.window.total_seconds()] = -np.inf
    np.fill_diagonal(near, -np.inf)
    members = {place: [place] for place in range(len(block))}
    while True:
        one, other = sorted(divmod(int(near.argmax()), len(block)))
        if near[one, other] <= closeness.cosine:
            return [[block[each] for each in sorted(of)] for of in members.values() if len(of) > 1]
        members[one] += members.pop(other)
        near[one] = near[:, one] = np.minimum(near[one], near[other])
        near[one, one] = -np.inf
        near[other] = near[:, other] = -np.inf
