"""The licence, and the notice of what others have made."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VENDORED = sorted((ROOT / "app").rglob("vendor.json"))


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_licence_is_the_published_text() -> None:
    published = distribution("yarl").read_text("licenses/LICENSE")
    assert (ROOT / "LICENSE").read_text() == published


def test_the_project_says_its_licence_and_its_pythons() -> None:
    about = project()
    assert about["license"] == "Apache-2.0"
    assert all((ROOT / name).is_file() for name in about["license-files"])
    assert set(about["license-files"]) == {"LICENSE", "NOTICE"}
    wanted = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert wanted <= set(about["classifiers"])
    assert any(each.startswith("Development Status :: ") for each in about["classifiers"])
    assert not any("License ::" in each for each in about["classifiers"])


@pytest.mark.parametrize("listed", VENDORED, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_notice_names_each_part_that_others_made(listed: Path) -> None:
    notice = (ROOT / "NOTICE").read_text()
    licences = listed.with_name("LICENSES.txt").read_text()
    parts = json.loads(listed.read_text())
    for part in parts:
        title = f"{part['package']} {part['version']}"
        (entry,) = re.findall(rf"^{re.escape(title)} \((.*)\)$", notice, re.MULTILINE)
        assert part["file"] in entry.split(", ")
        assert f"{title}, {part['license']}" in licences
    said = set(re.findall(r"^Copyright .*$", licences, re.MULTILINE))
    assert all(line in notice for line in said)
    lists = {"vendor.json", "LICENSES.txt"}
    assert {part["file"]: part["sha256"] for part in parts} == {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in listed.parent.iterdir()
        if path.name not in lists
    }


@pytest.mark.deep
def test_the_wheel_has_licence_and_notice(tmp_path: Path) -> None:
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT))
    subprocess.run([sys.executable, *command], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("LICENSE", "NOTICE"):
        assert any(each.endswith(f".dist-info/licenses/{name}") for each in names)
    for listed in VENDORED:
        for path in listed.parent.iterdir():
            assert str(path.relative_to(ROOT / "app")) in names


def test_no_page_installs_a_name_that_nobody_owns() -> None:
    folders = [ROOT / name for name in ("docs", "examples", "app")]
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.*"))]
    for page in (page for page in pages if page.suffix in (".md", ".py", ".html", ".mjs")):
        named = re.search(r"pip3? install (-\S+ )*[\"'`]?bottega\b", page.read_text())
        assert named is None, f"{page}: {named}"
