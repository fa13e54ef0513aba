"""``bottega apply`` and ``bottega export``, on files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.test_apply import TEAM
from tests.flows.test_daily_commands import ended
from tests.service import Running
from tests.tenants import holder

TOOLS: list[dict[str, Any]] = [
    {"type": "builtin", "name": "calculator", "approval": "always"},
    {"type": "client", "name": "locate", "description": "Says where the user is."},
    {
        "type": "http",
        "name": "stock",
        "description": "Says what is in stock.",
        "method": "GET",
        "url": "https://stock.example.com/items/{item}",
        "headers": {"x-shop": "1"},
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
    {"type": "mcp", "server": "docs"},
]


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.mark.deep
async def test_files_are_applied_once_and_shown(bottega: Running, tmp_path: Path) -> None:
    team, more = tmp_path / "team.yaml", tmp_path / "more.json"
    team.write_text(yaml.safe_dump({key: TEAM[key] for key in ("agents", "graphs")}))
    more.write_text(json.dumps({key: TEAM[key] for key in ("mcp_servers", "schedules")}))
    tried = await ended(bottega, "apply", str(team), str(more), "--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert "dry run" in tried.stdout
    made = await ended(bottega, "apply", str(team), str(more))
    assert made.stdout.splitlines()[:2] == ["+ mcp_server docs", "+ agent writer"]
    assert made.stdout.splitlines()[-1] == "5 created"
    again = await ended(bottega, "apply", str(team), str(more))
    assert again.stdout.splitlines() == ["5 unchanged"]
    assert (await ended(bottega, "apply", str(team), str(more), "--check")).returncode == 0
    team.write_text("agents:\n- {name: writer, system_message: z, metadata: {team: a}}\n")
    for _ in range(2):
        assert (await ended(bottega, "apply", str(team), "--check")).returncode == 1
    changed = (await ended(bottega, "apply", str(team))).stdout.splitlines()
    assert changed[0] == "~ agent writer"
    more.write_text("schedules:\n- {name: odd, cron: 0 3 * * *, run: {agent: nobody, input: x}}\n")
    said = f"{more}, schedules[0] at run/agent: there is no agent 'nobody'"
    for option in ((), ("--check",)):
        refused = await ended(bottega, "apply", str(team), str(more), *option)
        assert refused.returncode == 1
        assert said in refused.stderr
    warned = await ended(bottega, "apply", str(team), str(more), "--allow-missing")
    assert f"warning: {said}" in warned.stderr
    assert [each.strip() for each in changed if each.strip()[:2] in ("-s", "+s")] == [
        "-system_message: y",
        "+system_message: z",
    ]


@pytest.mark.deep
async def test_a_refusal_names_the_file_and_the_place(bottega: Running, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("agents:\n- {name: a, system_message: x}\n")
    bad.write_text("agents:\n- {name: b, system_message: x, max_iterations: 0}\n")
    refused = await ended(bottega, "apply", str(good), str(bad))
    assert refused.returncode == 1
    assert f"{bad}, agents[0] at max_iterations: " in refused.stderr
    for text, said in (
        ("a: [", "is not valid YAML"),
        ("- a", "no lists"),
        ("agents: 1", "no lists"),
        ("agent: []", "an unknown section 'agent'"),
        ("agents: [{name: a, system_message: 2026-01-01}]", "a date without quotes"),
        ("agents: " + "[" * 3000, "no"),
    ):
        bad.write_text(text)
        wrong = await ended(bottega, "apply", str(bad))
        assert (wrong.returncode, said in wrong.stderr.replace("\n", " ")) == (2, True), wrong
    missing = await ended(bottega, "apply", str(tmp_path / "none.yaml"))
    assert missing.returncode == 2
    assert (await ended(bottega, "apply", str(good), "--prune")).returncode == 2


async def test_an_exported_tenant_is_made_again_elsewhere(
    bottega: Running, shared_url: str, tmp_path: Path
) -> None:
    odd = "One.\r\nTwo \u200f\u05d0, Donau\u00addampf\ufeff."
    agent = TEAM["agents"][0] | {"tools": TOOLS, "params": {"temperature": 0.5}}
    agent["system_message"] = odd
    agent["success_check"] = [{"type": "contains", "value": "Done"}]
    body = TEAM | {"agents": [agent, TEAM["agents"][1]]}
    answer = await bottega.client.post("/v1/apply", json=body)
    assert answer.status_code == 200, answer.text
    exported = await ended(bottega, "export")
    assert exported.returncode == 0, exported.stderr
    found = yaml.safe_load(exported.stdout)
    assert [each["name"] for each in found["agents"]] == ["lead", "writer"]
    assert found["agents"][1] == TEAM["agents"][1]
    assert found["agents"][0]["system_message"] == odd
    path = tmp_path / "all.yaml"
    path.write_text(exported.stdout)
    again = await ended(bottega, "apply", str(path))
    assert again.stdout == "6 unchanged\n", again.stderr
    other = await holder(shared_url, "other-of-export")
    made = await ended(bottega, "apply", str(path), BOTTEGA_KEY=other.key)
    assert made.stdout.splitlines()[-1] == "6 created"
    there = await ended(bottega, "export", "--json", BOTTEGA_KEY=other.key)
    assert json.loads(there.stdout) == found
