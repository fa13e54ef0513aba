"""Texts of others, made safe for a terminal. Pure."""

import re
from typing import Any

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Characters that control a terminal, turn or hide text, or that no encoding has."""

_LONGEST_LINE = 300


def safe(value: Any) -> Any:
    """Replace each unsafe character of a JSON value's texts by one other character.

    Texts keep their length, so that offsets stay right. A carriage return becomes a space.
    """
    match value:
        case str():
            return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", value.replace("\r", " "))
        case dict():
            return {safe(name): safe(each) for name, each in value.items()}
        case list():
            return [safe(each) for each in value]
    return value


def one_line(text: str) -> str:
    """Return a text on one line, cut to 300 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
