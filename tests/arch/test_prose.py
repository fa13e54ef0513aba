"""The prose lint finds nothing in the repository."""

from pathlib import Path

import pytest

from tests.arch.prose import files, findings, may_have_phrases
from tests.arch.sources import ROOT

PLACES = ["app", "benchmarks", "docs", "migrations", "tests", "CHANGELOG.md", "README.md"]


@pytest.mark.parametrize("place", PLACES)
def test_prose_is_plain(place: str) -> None:
    checked = files(ROOT / place)
    assert checked
    assert [str(finding) for file in checked for finding in findings(file)] == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\n# by\n# lot\n", 2),
        ('x = f"{1} by " f"lot"\n', 1),
        ('x = "by\\nlot"\n', 1),
        ('x = (\n    "by "\n    "lot"\n)\n', 2),
        ('def f():\n    """What it returns."""\n', 2),
        ('def f():\n    """The result."""\n', 2),
    ],
)
def test_a_phrase_is_found_wherever_it_stands(
    source: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.arch.prose.ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [finding.line for finding in findings(file)] == [line]


def test_plain_text_is_not_searched_twice() -> None:
    assert not may_have_phrases('x = "assigned at random"  # with a seed\n')
