"""The SQL functions, triggers and policies: files in ``sql/`` that ``migrate`` applies.

Each file is safe to apply again. A file's hash is stored when it is applied, so that ``migrate``
applies the changed ones and a start compares them all.

A line ``-- owner: ROLE, execute: ROLE, ROLE`` above a function gives it to an owner and lets only
those roles call it. The owner ``migrator`` stands for the login that migrates; a function without
such a line belongs to that login, and every role may call it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

_FOLDER = Path(__file__).with_name("sql")
_CLOSED_FUNCTION = re.compile(
    r"^-- owner: (?P<owner>\w+), execute: (?P<users>\w+(?:, \w+)*)\n"
    r"(?P<create>CREATE OR REPLACE FUNCTION (?P<name>\w+).*?\$\$;)$",
    re.MULTILINE | re.DOTALL,
)
_SIGNATURE = re.compile(
    r"^(?:-- owner: (?P<owner>\w+), execute: [^\n]*\n)?"
    r"CREATE OR REPLACE FUNCTION (?P<head>.*?)\$\$",
    re.MULTILINE | re.DOTALL,
)


@cache
def texts() -> Mapping[str, str]:
    """Return the files by name, in the order to apply them: first the roles."""
    paths = sorted(_FOLDER.glob("*.sql"), key=lambda path: (path.stem != "policies", path.stem))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@cache
def hashes() -> Mapping[str, str]:
    """Return each file's hash by its name."""
    return {name: sha256(text.encode()).hexdigest() for name, text in texts().items()}


def signatures() -> list[str]:
    """Return each function's owner, name, arguments, result and options, without its body."""
    return [
        f"{match['owner'] or 'migrator'} {match['head']}"
        for text in texts().values()
        for match in _SIGNATURE.finditer(text)
    ]


def script(names: Iterable[str]) -> str:
    """Return the SQL that applies some files."""
    # Functions call each other: their bodies are not checked while some are missing.
    return "\n".join(
        ["SET LOCAL check_function_bodies = off;", *(_with_owners(texts()[name]) for name in names)]
    )


def _with_owners(text: str) -> str:
    """Expand the lines ``-- owner: ..., execute: ...`` into SQL."""
    closed = [_close(match) for match in _CLOSED_FUNCTION.finditer(text)]
    if not closed:
        return text
    return "\n".join(
        [
            # Without this privilege a role cannot own a function in the schema.
            "GRANT CREATE ON SCHEMA public TO bottega_system;",
            _CLOSED_FUNCTION.sub(_create, text),
            *closed,
            "REVOKE CREATE ON SCHEMA public FROM bottega_system;",
        ]
    )


def _create(match: re.Match[str]) -> str:
    """Create a function as its owner, who alone may replace it later.

    Every role may call it until the end of the file, since the owner of a table must be able to
    call the functions of its triggers when they are created.
    """
    grant = f"GRANT EXECUTE ON FUNCTION {match['name']} TO public;"
    return _as_owner(match["owner"], f"{match['create']}\n{grant}")


def _close(match: re.Match[str]) -> str:
    name, users = match["name"], match["users"]
    all_roles = "public, bottega_app, bottega_maintenance"
    return _as_owner(
        match["owner"],
        f"REVOKE ALL ON FUNCTION {name} FROM {all_roles};\n"
        f"GRANT EXECUTE ON FUNCTION {name} TO {users};",
    )


def _as_owner(owner: str, sql: str) -> str:
    return sql if owner == "migrator" else f"SET LOCAL ROLE {owner};\n{sql}\nRESET ROLE;"
