"""A URL template; a model's arguments fill its placeholders and change nothing else. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from bottega.errors import InvalidInputError
from bottega.tools.egress import checked_url

_LONGEST = 2000
_ORIGIN = re.compile(r"(https?://[^/?#\\{}@\s]+)(/[^?#]*)?(?:\?([^#]*))?")
_GAP = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]{0,63})\}")
_FIXED_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_FIXED_QUERY = re.compile(r"(?:[A-Za-z0-9._~!$'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")
_DOTS = (".", "..")

Pieces = tuple[str, ...]
"""Fixed text and placeholder names in turn, with fixed text at both ends; or nothing."""


@dataclass(frozen=True, slots=True)
class UrlTemplate:
    """A parsed template such as ``https://host/items/{id}?q={q}``.

    Attributes:
        origin: scheme, host and port, without placeholders.
        segments: segments of the path.
        query: keys and values; a pair is omitted if a placeholder has no argument.
    """

    origin: str
    segments: tuple[Pieces, ...]
    query: tuple[tuple[str, Pieces], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a template.

        Raises:
            InvalidInputError: the template is not valid.
        """
        found = _ORIGIN.fullmatch(text) if len(text) <= _LONGEST else None
        if found is None:
            raise InvalidInputError(
                "the URL must look like https://host/path/{name}?key={name}, with placeholders in "
                f"path and query only, no fragment, and at most {_LONGEST} characters"
            )
        origin, path, query = found[1], found[2] or "/", found[3]
        checked_url(origin)
        segments = tuple(_pieces(segment, _FIXED_PATH) for segment in path[1:].split("/"))
        if any(_is_dots("".join(pieces)) for pieces in segments):  # placeholder names hold no dots
            raise InvalidInputError("the URL's path must not hold the segments '.' and '..'")
        return cls(origin, segments, _pairs(query) if query else ())

    @property
    def path_names(self) -> frozenset[str]:
        return frozenset(name for pieces in self.segments for name in pieces[1::2])

    @property
    def names(self) -> frozenset[str]:
        return self.path_names | {name for _, pieces in self.query for name in pieces[1::2]}

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, _ in self.query)

    def fill(self, arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
        """Return the URL with ``arguments`` in its placeholders and ``extra`` added to its query.

        Arguments cannot change scheme, host, port, the number of path segments and the fixed parts.

        Raises:
            InvalidInputError: an argument does not fit its place.
        """
        path = "/".join(_segment(pieces, arguments) for pieces in self.segments)
        pairs: list[str] = []
        for key, pieces in self.query:
            if not pieces:
                pairs.append(key)
            elif len(pieces) == 3 and pieces[0] == pieces[2] == "":
                pairs += _repeated(key, arguments.get(pieces[1]))
            elif all(arguments.get(name) is not None for name in pieces[1::2]):
                pairs.append(f"{key}={_filled(pieces, arguments)}")
        for name, value in extra.items():
            key = _quoted(name)
            if key in self.keys:
                raise InvalidInputError(f"'{name}' is fixed by the tool's URL")
            pairs += _repeated(key, value)
        return f"{self.origin}/{path}" + (f"?{'&'.join(pairs)}" if pairs else "")


def _pieces(text: str, allowed: re.Pattern[str]) -> Pieces:
    pieces = tuple(_GAP.split(text))
    for fixed in pieces[::2]:
        if not allowed.fullmatch(fixed):
            raise InvalidInputError(
                f"'{fixed[:60]}' in the URL is not a placeholder such as {{name}}, and is "
                "not valid in a URL: percent-encode it"
            )
    return pieces


def _pairs(query: str) -> tuple[tuple[str, Pieces], ...]:
    pairs = []
    for pair in query.split("&"):
        key, equals, value = pair.partition("=")
        if not key or not _FIXED_QUERY.fullmatch(key):
            raise InvalidInputError("the URL's query must look like key=value&key={name}")
        pairs.append((key, _pieces(value, _FIXED_QUERY) if equals else ()))
    return tuple(pairs)


def _segment(pieces: Pieces, arguments: Mapping[str, Any]) -> str:
    for name in pieces[1::2]:
        text = _as_text(name, arguments.get(name))
        if not text:
            raise InvalidInputError(f"'{name}' must not be empty: it is a part of the URL's path")
        # Also for encoded slashes: some servers decode a path before they resolve its dots.
        if any(part in _DOTS for part in re.split(r"[/\\]", text)) or not text.isprintable():
            raise InvalidInputError(f"'{name}' cannot be a part of a URL's path")
    return _filled(pieces, arguments)


def _is_dots(segment: str) -> bool:
    return re.sub("%2e", ".", segment, flags=re.IGNORECASE) in _DOTS


def _filled(pieces: Pieces, arguments: Mapping[str, Any]) -> str:
    return "".join(
        _quoted(_as_text(piece, arguments.get(piece))) if index % 2 else piece
        for index, piece in enumerate(pieces)
    )


def _repeated(key: str, value: Any) -> list[str]:
    """Return a value's query pairs: none for null, one for each item of a list."""
    values = value if isinstance(value, list) else [value]
    return [f"{key}={_quoted(_as_text(key, item))}" for item in values if item is not None]


def _as_text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidInputError(f"'{name}' cannot be written into a URL") from None


def _quoted(text: str) -> str:
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise InvalidInputError("lone surrogates (U+D800 to U+DFFF) are not text") from None
