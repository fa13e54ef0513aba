"""The programs in examples/ run."""

import json
import os
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

import bottega.agents
from tests.fake_model import FakeModel, calls, text

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as server:
        yield server


async def test_team_hands_on_its_answers(model: FakeModel) -> None:
    def decide(request: dict[str, Any]) -> Any:
        system = request["messages"][0]["content"]
        if not system.startswith("You coordinate"):
            return text(system.split()[3])
        if request["messages"][-1]["role"] == "tool":
            return text("a plan")
        names = ("requirements", "designer", "implementer")
        return calls(*((name, {"query": "go"}) for name in names))

    model.decide = decide
    environment = {**os.environ, "OPENAI_BASE_URL": model.base_url}
    environment.pop("OPENAI_API_KEY", None)  # the address alone is enough
    program = EXAMPLES / "team.py"
    process = await create_subprocess_exec(
        sys.executable, program, env=environment, stdout=PIPE, stderr=STDOUT
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    begun = [line for line in output.splitlines() if line.endswith(" begins")]
    assert begun == ["requirements begins", "designer begins", "implementer begins"]
    assert output.splitlines()[-3:] == [
        "a plan",
        "the implementer can read requirements, version 1",
        "the implementer can read designer, version 1",
    ]


async def test_application_streams_an_answer(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "web_application", raising=False)
    app = import_module("web_application").app
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://app")
    async with app.router.lifespan_context(app), client:
        for _ in range(2):  # each request has a history of its own
            model.script(calls(("calculator", {"left": 17, "right": 23})), text("391"))
            answer = await client.get("/ask?question=17*23", headers={"X-User": "ada"})
            told = [
                json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"
            ]
            assert told[0] == "calculator"
            assert "".join(told[1:-1]) == "391"
            assert told[-1] == {"text": "391", "error": None}
        assert (await client.get("/ask?question=", headers={"X-User": "ada"})).status_code == 422
    assert len(model.requests) == 4
    assert [len(request["messages"]) for request in model.requests] == [2, 4, 2, 4]
    assert model.requests[1]["messages"][-1]["content"] == "391, for ada"


def test_library_page_has_a_table_of_every_public_name() -> None:
    page = (ROOT / "docs/guides/agents-in-python.md").read_text()
    table = page.partition("## All names")[2]
    names = [name for line in table.splitlines() if line.startswith("| `") for name in _names(line)]
    assert sorted(names) == sorted(bottega.agents.__all__)


def _names(line: str) -> list[str]:
    """Return the names in the first cell of a table's row."""
    return line.split("|")[1].replace("`", "").replace(",", " ").split()
