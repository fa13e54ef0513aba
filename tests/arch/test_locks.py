"""Lock files: what the image installs is what the project asks for."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKED = re.compile(r"^([a-z0-9.-]+)==(\S+) \\\n    --hash=", re.MULTILINE)


@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("requirements.lock", PROJECT["dependencies"]),
        ("requirements-embed.lock", EXTRAS["embed"]),
        ("requirements-otel.lock", EXTRAS["otel"]),
        ("requirements-dev.lock", EXTRAS["dev"]),
    ],
)
def test_a_lock_file_has_what_is_asked_for(lock: str, wanted: list[str]) -> None:
    """Check it with ``requirements.lock``, beside which the locks of extras are installed."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.lock", lock)]
    locked = dict(LOCKED.findall("\n".join(texts)))
    requirements = [Requirement(each) for each in wanted]
    assert not [
        str(each)
        for each in requirements
        if each.marker is None or each.marker.evaluate()
        if (found := locked.get(each.name.lower())) is None or found not in each.specifier
    ]


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-otel.lock"])
def test_the_tests_run_with_the_versions_of_the_image(lock: str) -> None:
    tested, installed = (
        dict(LOCKED.findall((ROOT / name).read_text(encoding="utf-8")))
        for name in ("requirements-dev.lock", lock)
    )
    assert {name: tested[name] for name in installed} == installed


@pytest.mark.parametrize("lock", ["requirements-embed.lock", "requirements-otel.lock"])
def test_the_image_installs_the_extras_it_names(lock: str) -> None:
    assert f"-r {lock}" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
