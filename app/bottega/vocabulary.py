"""Words of this service, which no secret may be: names in its answers, events and log lines."""

import re
from datetime import date, datetime, time
from functools import cache
from pathlib import Path

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
    """Return whether a text is a word of this service, in any case, or a date or time."""
    return text.casefold() in read_words() or is_time(text)


def is_time(text: str) -> bool:
    """Return whether a text is a date or time, with a zone or without: for people, ISO, or epoch.

    Seconds or milliseconds since 1970 count from 2001 on: earlier ones have fewer digits.
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
    """Return the names and one-word texts in the service's own code.

    Whatever an answer, an event or a log line calls something, the code has it: statuses, types of
    events, roles, fields, columns. The first call takes 0.1 s: a service makes it at its start.

    Raises:
        UnavailableError: ``no_sources``.
    """
    words: set[str] = set()
    for suffix, patterns in _IN.items():
        paths = [*_FOLDER.rglob(suffix)]
        if not paths:
            raise UnavailableError(
                f"{_FOLDER} has no {suffix}, and their words may be no secrets: install Bottega "
                "again, with its sources",
                code="no_sources",
            )
        for path in paths:
            text = path.read_text(encoding="utf-8")
            for word in {each for pattern in patterns for each in pattern.findall(text)}:
                words.update((word.casefold(), *_JOINT.split(word.casefold())))
    return frozenset(words)
