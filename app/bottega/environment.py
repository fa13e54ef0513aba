"""Removal of quotes and blanks around values in environment variables and ``.env`` files."""

from collections.abc import Mapping
from typing import Any

ENCODING = "utf-8-sig"
"""Encoding of ``.env`` files, which is UTF-8 with or without a byte order mark."""
_QUOTES = "\"'"


def unwrapped(value: str) -> str:
    """Return a value without the blanks, line feeds and quotes around it."""
    value = value.strip()
    while len(value) > 1 and value[0] == value[-1] and value[0] in _QUOTES:
        value = value[1:-1].strip()
    return value


def unwrap_all(*sources: Any) -> None:
    """Remove blanks and quotes around the values in sources of settings; remove empty values."""
    for source in sources:
        found: Mapping[str, str | None] = source.env_vars
        values = {name: unwrapped(value) for name, value in found.items() if value is not None}
        source.env_vars = {name: value for name, value in values.items() if value}
