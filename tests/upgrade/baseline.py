"""The frozen baseline, and the functions' signatures and owners: only a migration changes these."""

import re
from hashlib import sha256

from bottega.db import migrate

MODULE = migrate.migrations_folder() / "versions" / "0001_baseline.py"
_SIGNATURE = re.compile(
    r"^(?:-- owner: (?P<owner>\w+), execute: [^\n]*\n)?"
    r"CREATE OR REPLACE FUNCTION (?P<head>.*?)\$\$",
    re.MULTILINE | re.DOTALL,
)


def signatures() -> list[str]:
    """Return each function's owner, name, arguments, result and options, without its body."""
    return [
        f"{match['owner'] or 'migrator'} {match['head']}"
        for text in migrate.texts().values()
        for match in _SIGNATURE.finditer(text)
    ]


def tables_hash() -> str:
    """Return the hash of the baseline's tables, indexes and constraints."""
    return _hash(_tables())


def revision() -> str:
    """Return the revision that the baseline would have with the functions of now.

    The functions' signatures and owners are a part of it, since PostgreSQL cannot replace a
    function by one with another signature or owner. Their bodies are not.
    """
    return f"0001_{_hash(chr(10).join([_tables(), *sorted(signatures())]))}"


def _tables() -> str:
    return MODULE.with_suffix(".sql").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]
