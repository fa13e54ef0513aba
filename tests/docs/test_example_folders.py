"""Each folder in examples/: its README's first shell block runs it, and a picture shows it.

Once with the demo model, and once with a server of models at ``OPENAI_BASE_URL``.
"""

import asyncio
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest
import yaml

from bottega.llm.demo_model.rules import Answer, decide, read
from bottega.settings import Settings
from tests.fake_model import FakeModel, text
from tests.mcp_server import tool_server
from tests.service import running

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(page.parent.name for page in EXAMPLES.glob("*/README.md"))
MOST_LINES = 80
LONGEST_S = 45
_CODE = {".py", ".yaml", ".sh", ".js", ".ts", ".html"}
_SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

SHOWN = {
    "coding": ["tool coding-helper: Explains code"],
    "evaluator": ["round 1, draft-writer:", "round 1, draft-reviewer:"],
    "letters": ['"index":4', '"status":"completed"'],
    "research": ["research-lead dispatches market-researcher", "4 completed"],
    "support": ["waits:  shop-cashier", "person: {'decision': 'approve'}", "The guarantee is over"],
}
"""What each prints, with any model."""


async def run_as_its_readme_says(name: str, port: int) -> str:
    """Run the first shell block of a README from the root of the project; return the output."""
    block = _SHELL.findall((EXAMPLES / name / "README.md").read_text())[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "BOTTEGA_URL": f"http://127.0.0.1:{port}", "PATH": path}
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *("sh", "-e", "-c", block), cwd=EXAMPLES.parent, env=environment, stdout=PIPE, stderr=STDOUT
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert time.monotonic() - began < LONGEST_S
    return output


def test_each_folder_is_tried() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()} - {"__pycache__"}
    assert set(SHOWN) == set(FOLDERS) == folders


@pytest.mark.parametrize("name", FOLDERS)
def test_each_is_short_and_has_a_picture(name: str) -> None:
    folder = EXAMPLES / name
    code = [path for path in folder.iterdir() if path.suffix in _CODE]
    assert sum(len(path.read_text().splitlines()) for path in code) <= MOST_LINES
    page = (folder / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (folder / target).exists(), target
    assert "![" in page


@pytest.mark.parametrize("name", FOLDERS)
async def test_it_runs_with_the_demo_model(
    settings: Settings, database_url: str, name: str
) -> None:
    local = settings.model_copy(update={"openai_api_key": None})
    async with running(local, database_url, worker=True) as bottega:
        output = await run_as_its_readme_says(name, bottega.port)
    assert [part for part in SHOWN[name] if part not in output] == [], output


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "evaluator" else pytest.mark.deep) for each in FOLDERS],
)
async def test_it_runs_with_a_server_of_models(
    settings: Settings, database_url: str, name: str
) -> None:
    reviews = iter(("Say what light is.", "DONE"))

    def as_a_model(request: dict[str, Any]) -> Answer:
        is_review = read(request).system.startswith("You review")
        return text(next(reviews)) if is_review else decide(request)

    async with FakeModel(as_a_model) as model:
        other = settings.model_copy(update={"openai_base_url": model.base_url})
        async with running(other, database_url, worker=True) as bottega:
            output = await run_as_its_readme_says(name, bottega.port)
        assert model.requests
    assert [part for part in SHOWN[name] if part not in output] == [], output
    if name == "evaluator":  # the second review is content, so there is no third round
        assert "round 2, draft-reviewer:\nDONE" in output
        assert "round 3" not in output


async def test_the_coding_helper_can_have_the_tools_of_another_server(
    settings: Settings, database_url: str
) -> None:
    local = {"openai_api_key": None, "egress_allow": ["127.0.0.1"]}
    definitions = yaml.safe_load((EXAMPLES / "coding/with_docs.yaml").read_text())
    async with (
        running(settings.model_copy(update=local), database_url, worker=True) as bottega,
        tool_server() as tools,
    ):
        definitions["mcp_servers"][0]["url"] = tools.url  # the test's own: there is no network
        (await bottega.client.post("/v1/apply", json=definitions)).raise_for_status()
        refreshed = await bottega.client.post("/v1/mcp-servers/docs/refresh")
        assert refreshed.status_code == 200, refreshed.text
        wanted = {"agent": "coding-helper", "input": "Use docs__add: 2 and 2"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=wanted)).json()
        assert run["status"] == "completed", run
        assert tools.called == ["add"]
