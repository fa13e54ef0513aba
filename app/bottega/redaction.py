"""Removal of secrets from text, in case something external repeats them. Pure."""

import base64
import json
import re
from collections.abc import Iterable
from functools import cached_property
from html import escape
from typing import Any
from urllib.parse import quote, quote_plus

SHORTEST = 8
"""Least length of a secret; a shorter one is part of too many other texts."""
LEFT_OUT = "[secret]"


class Redactor:
    """A filter that replaces secrets in text by ``[secret]``.

    Long words of a secret count too: of ``Bearer abcdefgh`` a server quotes only the second. So do
    the JSON, HTML, URL and base64 forms, and the credentials in ``Basic …``.

    Args:
        secrets: those shorter than :data:`SHORTEST` are ignored.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        words = set[str]().union(*map(_words, secrets))
        forms = set[str]().union(*map(_forms, words))
        self._longest_first = sorted(forms, key=lambda text: (-len(text), text))
        # A form that contains another need not be searched for: the shorter one is found.
        self._marks = [
            text
            for number, text in enumerate(self._longest_first)
            if not any(shorter in text for shorter in self._longest_first[number + 1 :])
        ]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._longest_first)))

    def text(self, text: str) -> str:
        if not self.finds(text):  # the usual case, and much faster
            return text
        return self._pattern.sub(LEFT_OUT, text)

    def finds(self, text: str) -> bool:
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
