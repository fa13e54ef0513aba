"""The teams in examples/ that the console offers as templates: each runs with the demo model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from bottega.settings import Settings
from tests.mcp_server import tool_server
from tests.service import Running, running
from tests.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATES = ("support", "letters", "research", "evaluator", "coding")
PAGE = Path(__file__).parents[2] / "app/bottega/console/js/setup/examples.json"


def template(name: str) -> dict[str, Any]:
    """Return what the console needs of an example: its head, definitions and first run."""
    text = (EXAMPLES / f"{name}.yaml").read_text()
    first, second, *_ = text.splitlines()
    title, about = first.removeprefix("# ").split(": ", 1)
    definitions = yaml.safe_load(text)
    graphs = definitions.get("graphs")
    agent = {"agent": definitions["agents"][-1]["name"]}
    return {
        "id": name,
        "title": title,
        "about": about,
        "ask": second.removeprefix("# Ask: ").replace(" | ", "\n"),
        "batch": title.startswith("Batch"),
        "run": {"mode": "dag", "graph": graphs[-1]["name"]} if graphs else agent,
        "definitions": definitions,
    }


def test_the_console_has_them_as_they_are() -> None:
    made = json.dumps([template(name) for name in TEMPLATES], indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.yaml").read_text().splitlines()) <= 80


async def _end(bottega: Running, path: str) -> dict[str, Any]:
    """Wait until a run or a batch is over; approve what waits meanwhile."""

    async def look() -> dict[str, Any]:
        pending = await bottega.client.get("/v1/interrupts?status=pending")
        for each in pending.json()["items"]:
            decision = {"decision": "approve"}
            await bottega.client.post(f"/v1/interrupts/{each['id']}/resolve", json=decision)
        found: dict[str, Any] = (await bottega.client.get(path)).json()
        return found

    return await until(look, lambda found: found["ended_at"] is not None, within=60)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_it_runs_with_the_demo_model(
    settings: Settings, database_url: str, name: str
) -> None:
    made = template(name)
    local = {"openai_api_key": None, "egress_allow": ["127.0.0.1"]}
    async with (
        running(settings.model_copy(update=local), database_url, worker=True) as bottega,
        tool_server() as tools,
    ):
        client = bottega.client
        for server in made["definitions"].get("mcp_servers", ()):
            server["url"] = tools.url  # the test's own, since there is no network
        applied = await client.post("/v1/apply", json=made["definitions"])
        assert applied.status_code == 200, applied.text
        for server in made["definitions"].get("mcp_servers", ()):
            refreshed = await client.post(f"/v1/mcp-servers/{server['name']}/refresh")
            assert refreshed.status_code == 200, refreshed.text
        if made["batch"]:
            items = [{"input": line} for line in made["ask"].split("\n")]
            started = await client.post("/v1/batches", json={**made["run"], "items": items})
            batch = await _end(bottega, f"/v1/batches/{started.json()['id']}")
            assert batch["counts"]["completed"] == len(items) == 3
            return
        started = await client.post("/v1/runs", json={**made["run"], "input": made["ask"]})
        assert started.status_code == 202, started.text
        run = await _end(bottega, f"/v1/runs/{started.json()['id']}")
        assert run["status"] == "completed", run
        tasks = (await client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
        assert len(tasks) == {"research": 4, "evaluator": 6, "support": 1}.get(name, 0)
        decided = (await client.get("/v1/interrupts?status=resolved")).json()["items"]
        assert len(decided) == (name == "support")
