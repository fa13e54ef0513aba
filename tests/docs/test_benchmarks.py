"""Benchmarks that the docs name exist, and have the options that the docs show."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"python -m (benchmarks[.\w]*)([^`\n]*(?:\n(?!\n)[^`\n]*)?)`")


def commands() -> Iterator[tuple[str, str]]:
    """Yield each benchmark that a page shows, and what stands behind its name."""
    for page in [ROOT / "README.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/**/*.md")]:
        yield from COMMAND.findall(page.read_text())


@pytest.mark.parametrize(("module", "options"), sorted(set(commands())))
def test_shown_benchmark_exists_with_its_options(module: str, options: str) -> None:
    path = ROOT / module.replace(".", "/")
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    assert '__name__ == "__main__"' in source
    assert [option for option in re.findall(r"--[\w-]+", options) if option not in source] == []


def test_each_command_of_benchmarks_is_listed() -> None:
    shown = (ROOT / "docs/contributing.md").read_text()
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    parts = {"benchmarks.model", "benchmarks.tenants.questions"}  # processes of others
    parts |= {"benchmarks.peers.model", "benchmarks.peers.work", "benchmarks.skeleton"}
    assert {name for name in names if name not in shown} == parts
