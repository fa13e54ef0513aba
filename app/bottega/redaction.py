"""Removal of secrets from texts, because answers of servers and programs may contain secrets.

A secret must not be a word that Bottega itself uses in responses, events or log lines.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, time
from functools import cache, cached_property
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from bottega.errors import UnavailableError

_TEXT = re.compile(r"""["']([A-Za-z][A-Za-z0-9_.:/-]{7,})["']""", re.ASCII)
_NAME = re.compile(r"\b([A-Za-z][A-Za-z0-9_]{7,})\s*[=:]", re.ASCII)
_COLUMN = re.compile(r"\b([a-z][a-z0-9_]{7,})\b", re.ASCII)
_IN = {"*.py": (_TEXT, _NAME), "*.sql": (_TEXT, _COLUMN)}
_JOINT = re.compile(r"[.:/-]")
_FOLDER = Path(__file__).parent
_DATES = (datetime.fromisoformat, date.fromisoformat)
_DATE = re.compile(
    r"(?:[a-z]{3,9},? )?(?:\d{1,2} [a-z]{3,9}|[a-z]{3,9} \d{1,2},?)(?: \d{4})?(?: [\d:]+)?", re.I
)
_NUMBERS = re.compile(
    r"(\d{1,4}([/.-])\d{1,3}(?:\2\d{2,4})?)(?:,?[T ][\d:.]+ ?(?:Z|[ap]m)?)?", re.I | re.ASCII
)
_ORDERS = ("%d-%m-%Y", "%m-%d-%Y", "%Y-%m-%d", "%Y-%j", "%d-%m-%y", "%m-%d-%y")
_EPOCH = re.compile(r"\d{10}(?:\d{3})?(?:\.\d{1,9})?", re.ASCII)
_ZONE = re.compile(
    r"(?: ?\[?(?:[A-Z]\w+(?:/[A-Z][\w+-]+)+|[A-Z]{2,5})\]?| [+-]\d\d:?\d\d)$", re.ASCII
)


def is_word(text: str) -> bool:
    """Return true if a text is a word that Bottega uses (upper or lower case), a date or a time."""
    return text.casefold() in read_words() or is_time(text)


def is_time(text: str) -> bool:
    """Return true if a text is a date or time: in words, in digits, or in seconds since 1970.

    A number counts as (milli)seconds since 1970 only if it has enough digits for a time after 2001.
    """
    if _EPOCH.fullmatch(text):
        return True
    text = _ZONE.sub("", text) if ":" in text else text
    for parse in (*_DATES, time.fromisoformat) if ":" in text else _DATES:
        try:
            parse(text)
        except ValueError:
            continue
        return True
    return _DATE.fullmatch(text) is not None or _is_numeric_date(text)


def _is_numeric_date(text: str) -> bool:
    match = _NUMBERS.fullmatch(text)
    if match is None:
        return False
    day = match[1].replace(match[2], "-")
    for order in _ORDERS:
        try:
            datetime.strptime(day, order)  # noqa: DTZ007 - only read
        except ValueError:
            continue
        return True
    return False


@cache
def read_words() -> frozenset[str]:
    """Return the names and the one-word string literals in Bottega's source code.

    They include all names that responses, events and log lines use: statuses, event types, roles,
    fields and columns. The first call takes 0.1 s; a service makes this call at its start.

    Raises:
        UnavailableError: ``no_sources``: the source code is not installed.
    """
    words: set[str] = set()
    for suffix, patterns in _IN.items():
        paths = [*_FOLDER.rglob(suffix)]
        if not paths:
            raise UnavailableError(
                f"{_FOLDER} has no {suffix} files, so the words that must not be secrets are "
                "unknown: install Bottega again, with its sources",
                code="no_sources",
            )
        for path in paths:
            text = path.read_text(encoding="utf-8")
            for word in {each for pattern in patterns for each in pattern.findall(text)}:
                words.update((word.casefold(), *_JOINT.split(word.casefold())))
    return frozenset(words)


SHORTEST = 8
"""Minimum number of characters of a secret; a shorter text occurs too often by chance."""
LEFT_OUT = "[secret]"


class Redactor:
    """A filter that replaces secrets in texts by ``[secret]``.

    The filter also removes the JSON, HTML, URL and base64 forms of a secret, and the credentials in
    ``Basic …``. It even removes each single long word of a secret, because a server may quote only
    the second word of ``Bearer abcdefgh``.

    Args:
        secrets: the secrets to remove; secrets shorter than :data:`SHORTEST` are ignored.
        beside: a second redactor, whose secrets are also removed. For example, a call's redactor
            also uses the tenant's redactor.
    """

    def __init__(self, secrets: Iterable[str] = (), *, beside: "Redactor | None" = None) -> None:
        self._beside = beside
        self._marks_of: dict[str, tuple[str, ...]] = {}
        self.keep(secrets)

    def keep(self, secrets: Iterable[str]) -> None:
        """Replace the list of secrets."""
        known = self._marks_of
        self._marks_of = {each: known.get(each) or _marks(each) for each in secrets}
        self._marks = _joined(self._marks_of)
        self.__dict__.pop("_pattern", None)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        forms = {form for secret in self._marks_of for form in _all_forms(secret)}
        longest_first = sorted(forms, key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, longest_first)))

    def text(self, text: str) -> str:
        if self._beside is not None:
            text = self._beside.text(text)
        if not self._holds(text):  # the usual case: skip the slow pattern
            return text
        return self._pattern.sub(LEFT_OUT, text)

    def finds(self, text: str) -> bool:
        return self._holds(text) or (self._beside is not None and self._beside.finds(text))

    def _holds(self, text: str) -> bool:
        return any(mark in text for mark in self._marks)

    def value(self, value: Any) -> Any:
        """Return JSON from outside, after the removal of secrets from its values and keys.

        If two keys become equal, one of them gets a number. The caller must limit the depth of the
        JSON. If the JSON contains no secret (the usual case), the method returns the same object.
        """
        return self._cleaned(value) if self.knows_any and self._is_in(value) else value

    @property
    def knows_any(self) -> bool:
        """True if there is a secret to remove."""
        return bool(self._marks) or (self._beside is not None and self._beside.knows_any)

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            keys = self._keys(value)
            items = zip(keys, value.values(), strict=True)
            return {key: self._cleaned(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self._cleaned(item) for item in value]
        return value

    def _keys(self, keys: Collection[str]) -> list[str]:
        clean = [key if not self.finds(key) or is_word(key) else self.text(key) for key in keys]
        taken = {key for key, text in zip(keys, clean, strict=True) if key == text}
        numbers: Counter[str] = Counter()
        for at, (key, text) in enumerate(zip(keys, clean, strict=True)):
            if key == text:
                continue
            while clean[at] in taken:
                numbers[text] += 1
                clean[at] = f"{text} ({numbers[text] + 1})"
            taken.add(clean[at])
        return clean

    def record(self, record: Any) -> Any:
        """Return a record of this service, after the removal of secrets from its texts.

        Keys, names, ids, times and Bottega's words do not change. The caller must limit the depth
        of the record. If the record contains no secret (the usual case), the method returns the
        same object.
        """
        return self._record(record, "") if self._is_in(record) else record

    def _is_in(self, value: Any) -> bool:
        return self.finds("\n".join(_texts(value)))

    def _record(self, value: Any, name: str) -> Any:
        if name in _FROM_OUTSIDE:
            return self.value(value)
        if isinstance(value, str):
            return value if not self.finds(value) or _is_ours(name, value) else self.text(value)
        if isinstance(value, dict):
            return {key: self._record(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._record(item, name) for item in value]
        return value


_FROM_OUTSIDE = frozenset(
    (
        *("answer", "arguments", "content", "input", "metadata", "output", "output_json"),
        *("prompt", "question", "result", "schema", "text"),
    )
)
"""Fields of this service's records whose text or JSON is from outside."""
_NAMES = frozenset(
    ("agent", "graph", "id", "logger", "model", "name", "provider", "tenant", "tool", "user")
)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item


def _is_ours(name: str, text: str) -> bool:
    """Return true if a field's text is a name, an id, a date, a time, or a word of Bottega."""
    return name in _NAMES or name.endswith("_id") or bool(_UUID.fullmatch(text)) or is_word(text)


def is_vocabulary(secret: str) -> bool:
    """Return true if a secret, without a scheme such as ``Bearer``, is a word of Bottega."""
    scheme, _, credential = secret.rpartition(" ")
    return is_word(secret) or (len(scheme.split()) == 1 and is_word(credential))


def _all_forms(secret: str) -> set[str]:
    return set[str]().union(*map(_forms, _words(secret)))


def _marks(secret: str) -> tuple[str, ...]:
    """Return the shortest forms of a secret. Each form of the secret contains one of them."""
    forms = sorted(_all_forms(secret), key=len)
    return tuple(
        text
        for number, text in enumerate(forms)
        if not any(shorter in text for shorter in forms[:number])
    )


def _joined(marks_of: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark for marks in marks_of.values() for mark in marks))


def _words(secret: str) -> set[str]:
    """Return a secret, its long words, and the credentials in ``Basic …``."""
    words = {secret, *secret.split()}
    for word in tuple(words):
        if secret.lower().startswith("basic "):
            words |= _decoded(word)
    long = {word for word in words if len(word) >= SHORTEST}
    return {word for word in long if word == secret or not is_word(word)}


def _decoded(word: str) -> set[str]:
    try:
        text = base64.b64decode(word, validate=True).decode()
    except ValueError:
        return set()
    return {text, text.partition(":")[2]}


def _forms(text: str) -> set[str]:
    in_json = json.dumps(text)[1:-1]
    in_urls = {quote(text, safe=""), quote(text), quote_plus(text)}
    forms = {text, in_json, in_json.replace("/", r"\/"), escape(text)}
    forms |= in_urls | {re.sub("%..", lambda code: code[0].lower(), form) for form in in_urls}
    return forms | _in_base64(text.encode("utf-8", "surrogatepass"))


def _in_base64(text: bytes) -> set[str]:
    """Return the base64 forms of a text that is a part of an encoded text.

    There are three forms, because the part may begin at any byte of a group of 3 bytes. The forms
    omit the characters at both ends, because these depend on the rest of the encoded text.
    """
    forms = set()
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(offset) + text).rstrip(b"=").decode()
        whole = encoded[first : -1 if (offset + len(text)) % 3 else None]
        forms |= {whole, whole.translate(str.maketrans("+/", "-_"))}
    return forms
