"""Removal of secrets from text, in case something external repeats them. Pure."""

import base64
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from html import escape
from typing import Any
from urllib.parse import quote, quote_plus

SHORTEST = 8
"""Least length of a secret; a shorter one is part of too many other texts."""
LEFT_OUT = "[secret]"
_MOST_LEARNED = 1000


class Redactor:
    """A filter that replaces secrets in text by ``[secret]``.

    Long words of a secret count too: of ``Bearer abcdefgh`` a server quotes only the second. So do
    the JSON, HTML, URL and base64 forms, and the credentials in ``Basic …``.

    Args:
        secrets: those shorter than :data:`SHORTEST` are ignored.
        beside: removes its secrets, too.
        most_learned: later ones that are kept.
    """

    def __init__(
        self,
        secrets: Iterable[str],
        *,
        beside: "Redactor | None" = None,
        most_learned: int = _MOST_LEARNED,
    ) -> None:
        self._beside = beside
        self._most_learned = most_learned
        self._marks_of = {secret: _marks(secret) for secret in secrets}
        self._learned: OrderedDict[str, None] = OrderedDict()
        self._marks = _joined(self._marks_of)

    def learn(self, secrets: Iterable[str]) -> None:
        """Remove these, too, from now on. The ones that were learned first may be forgotten."""
        is_new = False
        for secret in secrets:
            if secret in self._learned:
                self._learned.move_to_end(secret)
            elif secret not in self._marks_of:
                self._learned[secret] = None
                self._marks_of[secret] = _marks(secret)
                is_new = True
        if is_new:
            while len(self._learned) > self._most_learned:
                del self._marks_of[self._learned.popitem(last=False)[0]]
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
        if not self._holds(text):  # the usual case, and much faster
            return text
        return self._pattern.sub(LEFT_OUT, text)

    def finds(self, text: str) -> bool:
        return self._holds(text) or (self._beside is not None and self._beside.finds(text))

    def _holds(self, text: str) -> bool:
        return any(mark in text for mark in self._marks)

    def value(self, value: Any) -> Any:
        """Return a JSON value without secrets. The caller must bound its depth."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def _all_forms(secret: str) -> set[str]:
    return set[str]().union(*map(_forms, _words(secret)))


def _marks(secret: str) -> tuple[str, ...]:
    """Return the forms of a secret that contain no other: where one is not, no form is."""
    forms = sorted(_all_forms(secret), key=len)
    return tuple(
        text
        for number, text in enumerate(forms)
        if not any(shorter in text for shorter in forms[:number])
    )


def _joined(marks_of: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark for marks in marks_of.values() for mark in marks))


def _words(secret: str) -> set[str]:
    """Return a secret, its words, and its decoded ``Basic`` credentials."""
    words = {secret, *secret.split()}
    for word in tuple(words):
        if secret.lower().startswith("basic "):
            words |= _decoded(word)
    return {word for word in words if len(word) >= SHORTEST}


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
    """Return the base64 forms of a text, for each of the three offsets at which it may start.

    The characters at both ends are left out, since they depend on the neighbouring text.
    """
    forms = set()
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(offset) + text).rstrip(b"=").decode()
        whole = encoded[first : -1 if (offset + len(text)) % 3 else None]
        forms |= {whole, whole.translate(str.maketrans("+/", "-_"))}
    return forms
