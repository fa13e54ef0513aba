"""Rules about the SQL functions: whole, documented, each in one file."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "app/bottega/db/sql").glob("*.sql"))
FUNCTION = re.compile(
    r"(?P<comment>(?:^--[^\n]*\n)*)"
    r"^CREATE OR REPLACE FUNCTION (?P<name>\w+)(?P<body>.*?\$\$;)$",
    re.MULTILINE | re.DOTALL,
)
OWNER = "-- owner: "


def test_migrations_create_no_functions() -> None:
    files = [path for path in (ROOT / "migrations").rglob("*") if path.suffix in (".py", ".sql")]
    assert len(files) >= 3
    assert [path.name for path in files if re.search(r"\bFUNCTION\b", path.read_text())] == []


def test_each_function_is_defined_in_one_file() -> None:
    names = [match["name"] for path in FILES for match in FUNCTION.finditer(path.read_text())]
    assert len(names) >= 90
    assert [name for name, count in Counter(names).items() if count > 1] == []
    # No definition escapes the pattern.
    texts = "\n".join(path.read_text() for path in FILES)
    assert len(re.findall(r"^ *CREATE (?:OR REPLACE )?FUNCTION", texts, re.MULTILINE)) == len(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_short_and_its_functions_are_documented(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    assert [line for line in text.splitlines() if len(line) > 100] == []
    for match in FUNCTION.finditer(text):
        lines = match["comment"].splitlines()
        described = [line for line in lines if not line.startswith(OWNER)]
        assert 1 <= len(described) <= 3, match["name"]
        # A function that runs with its owner's rights names its owner, and its callers.
        assert ("SECURITY DEFINER" in match["body"]) == (lines[-1].startswith(OWNER)), match["name"]
