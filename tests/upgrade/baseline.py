"""The revision of the baseline, which has a hash of what cannot be applied again."""

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


def revision() -> str:
    """Return the revision of the baseline as it is now.

    The functions' signatures and owners are a part of it, since PostgreSQL cannot replace a
    function by one with another signature or owner. Their bodies are not.
    """
    tables = MODULE.with_suffix(".sql").read_text(encoding="utf-8")
    content = "\n".join([tables, *sorted(signatures())])
    return f"0001_{sha256(content.encode()).hexdigest()[:12]}"


def write_revision() -> None:
    """Write the revision into the module of the baseline."""
    text = MODULE.read_text(encoding="utf-8")
    written = re.sub(r'^revision = ".*"$', f'revision = "{revision()}"', text, flags=re.MULTILINE)
    MODULE.write_text(written, encoding="utf-8")
