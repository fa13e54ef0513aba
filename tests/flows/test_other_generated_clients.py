"""Clients that @hey-api/openapi-ts and openapi-generator make of the server's own document.

They need Node.js, Java, and the registries of npm and PyPI. Without them the tests are skipped,
unless `JUDGES=required`.
"""

import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest

from tests.fake_model import FakeModel, text
from tests.judges import needed
from tests.service import Running

SOURCES = Path(__file__).parents[1] / "contract" / "generators"
GENERATOR = "openapi-generator-cli==7.26.0"
KNOWN = (
    "OpenAPI 3.1 support is still in beta",
    # of a $ref beside other keywords, which OpenAPI 3.1 allows
    "Illegal schema found with $ref combined with other properties",
    "Failed to get the schema name: null",
    # of a field that may be a text or a list
    "Validation 'maxLength' has no effect on schema 'object'",
    # the parameters `from` and `with`, in Python
    "From (reserved word) cannot be used as model name. Renamed to ModelFrom",
    "With (reserved word) cannot be used as model name. Renamed to ModelWith",
    # of a field that must be null
    "Error in generating `example` for the property",
    "Codegen property is null (e.g. map/dict of undefined type). Default to typing.Any",
)
"""Warnings of openapi-generator about what it does not know of OpenAPI 3.1."""

pytestmark = pytest.mark.deep


def needs(*programs: str) -> None:
    """Skip the test if a program is missing."""
    for program in programs:
        needed(shutil.which(program), f"there is no {program}")


async def output_of(*command: Any, cwd: Path) -> str:
    """Run a command in a folder; return what it prints."""
    process = await asyncio.create_subprocess_exec(*command, cwd=cwd, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def document(bottega: Running, folder: Path) -> None:
    """Copy the sources and the server's document to a folder."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    found = await bottega.client.get("/openapi.json")
    (folder / "openapi.json").write_text(found.text)


def check(printed: str) -> None:
    """Check what a pipeline printed."""
    assert json.loads(printed.splitlines()[-1]) == {
        "edges": 1,
        "status": "completed",
        "output": "Built.",
        "seqs": [1, 2, 3],
        "missing": "not_found",
    }


def access(guest: Running) -> tuple[str, str]:
    """Return the server's address, and the key."""
    key = guest.headers["Authorization"].removeprefix("Bearer ")
    return f"http://127.0.0.1:{guest.port}", key


async def test_openapi_ts_makes_a_client(
    guest: Running, guest_model: FakeModel, tmp_path: Path
) -> None:
    needs("node", "npm")
    await document(guest, tmp_path)
    await output_of("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=tmp_path)
    generator = tmp_path / "node_modules/@hey-api/openapi-ts/bin/run.js"
    made = await output_of("node", generator, "-i", "openapi.json", "-o", "made", cwd=tmp_path)
    assert "warn" not in made.lower()
    await output_of("node", tmp_path / "node_modules/typescript/bin/tsc", "-p", ".", cwd=tmp_path)
    guest_model.script(text("Planned."), text("Built."))
    check(await output_of("node", "out/pipeline.js", *access(guest), cwd=tmp_path))


async def test_openapi_generator_makes_a_client(
    guest: Running, guest_model: FakeModel, tmp_path: Path
) -> None:
    needs("java")
    await document(guest, tmp_path)
    install = ("-m", "pip", "install", "-q", "--target", "tool", "--no-deps", GENERATOR)
    await output_of(sys.executable, *install, cwd=tmp_path)
    jar = tmp_path / "tool/openapi_generator_cli/openapi-generator.jar"
    options = ("-g", "python", "-i", "openapi.json", "-o", "client", "--package-name", "made")
    made = await output_of("java", "-jar", jar, "generate", *options, cwd=tmp_path)
    told = [each for each in made.splitlines() if " WARN " in each or " ERROR " in each]
    assert [each for each in told if not any(known in each for known in KNOWN)] == []
    (tmp_path / "client/made").rename(tmp_path / "made")
    await output_of(sys.executable, "-m", "compileall", "-q", "made", cwd=tmp_path)
    guest_model.script(text("Planned."), text("Built."))
    check(await output_of(sys.executable, "pipeline.py", *access(guest), cwd=tmp_path))
