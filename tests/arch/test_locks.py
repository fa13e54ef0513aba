"""Lock files: what the image installs is what the project asks for."""

import re
import subprocess
import sys
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
        *((f"requirements-{extra}.lock", EXTRAS[extra]) for extra in EXTRAS),
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


@pytest.mark.parametrize(
    "lock", [f"requirements{extra}.lock" for extra in ("", "-embedded", "-nats", "-otel")]
)
def test_the_tests_run_with_the_versions_of_the_image(lock: str) -> None:
    tested, installed = (
        dict(LOCKED.findall((ROOT / name).read_text(encoding="utf-8")))
        for name in ("requirements-dev.lock", lock)
    )
    assert {name: tested[name] for name in installed} == installed


@pytest.mark.parametrize(
    "lock", [f"requirements-{extra}.lock" for extra in ("embed", "nats", "otel")]
)
def test_the_image_installs_the_extras_it_names(lock: str) -> None:
    assert f"-r {lock}" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_only_the_extra_embedded_has_a_database() -> None:
    server = re.compile(r"pgserver|postgres", re.IGNORECASE)
    assert [each for each in EXTRAS["embedded"] if server.search(each)]
    assert not [each for each in PROJECT["dependencies"] if server.search(each)]
    locked = dict(LOCKED.findall((ROOT / "requirements.lock").read_text(encoding="utf-8")))
    assert not [name for name in locked if server.search(name)]
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "-r requirements-embedded.lock" not in image


def test_what_is_declared_is_what_is_imported() -> None:
    """Check what the gate checks, too; each exception has its reason beside it."""
    command = [str(Path(sys.executable).with_name("deptry")), "app", "--no-ansi"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.deptry")[2]
    ignored = re.findall(r"^(.*)\nDEP\d+ = ", settings, re.MULTILINE)
    assert ignored
    assert all(line.startswith("# ") for line in ignored)
