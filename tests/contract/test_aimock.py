"""Agents on `aimock`, a server of five vendors' APIs that reads requests and writes answers itself.

It runs in Node.js: `npm ci --prefix tests/contract/node` installs it. Without it the tests are
skipped, unless `JUDGES=required`.
"""

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bottega.agents import BaseAgent, ModelParams, tool
from bottega.agents.provider import DialectName
from bottega.llm.provider import open_provider
from bottega.llm.server import ServerSpec
from bottega.settings import Settings
from tests.judges import needed
from tests.service import running

SCRIPT = Path(__file__).parent / "node" / "node_modules" / "@copilotkit" / "aimock" / "dist/cli.js"
DOORS: Mapping[str, tuple[DialectName, str, str]] = {
    "OpenAI": ("chat", "/v1", "gpt-5-mini"),
    "Responses": ("responses", "/v1", "gpt-5-mini"),
    "Anthropic": ("anthropic", "", "claude-sonnet-5"),
    "Gemini": ("gemini", "/v1beta", "gemini-3-flash"),
    "Ollama": ("chat", "/v1", "qwen3:8b"),
}
"""By vendor: dialect, end of the base URL, model."""

ASKED = "What is the weather in Oslo?"
SAID = "It is cold in Oslo today, so take a warm coat, a scarf and gloves with you."
SCHEMA = {
    "type": "object",
    "properties": {"cold": {"type": "boolean"}},
    "required": ["cold"],
    "additionalProperties": False,
}
FIXTURES: list[dict[str, Any]] = [
    {
        "match": {"userMessage": "weather", "hasToolResult": False},
        "response": {
            "content": "Let me look.",
            "toolCalls": [
                {"name": "calculator", "arguments": {"expression": "1+1"}},
                {"name": "calculator", "arguments": {"expression": "2+2"}},
            ],
        },
    },
    {"match": {"userMessage": "weather", "hasToolResult": True}, "response": {"content": SAID}},
    {"match": {"userMessage": "As JSON"}, "response": {"content": '{"cold": true}'}},
]


@pytest.fixture(scope="module")
async def aimock(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    missing = "this needs Node.js, and `npm ci --prefix tests/contract/node`"
    node = needed(shutil.which("node") if SCRIPT.exists() else None, missing)
    fixtures = tmp_path_factory.mktemp("aimock") / "fixtures.json"
    fixtures.write_text(json.dumps({"fixtures": FIXTURES}))
    async with serving(node, fixtures) as url:
        yield url


@asynccontextmanager
async def serving(node: str, fixtures: Path) -> AsyncIterator[str]:
    """Run the server on a free port; yield its URL."""
    command = (node, str(SCRIPT), "--port", "0", "--strict", "--fixtures", str(fixtures))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            while b"listening on " not in (line := await process.stdout.readline()):
                assert line, "it ended"
        yield line.decode().split()[-1]
    finally:
        process.kill()
        await process.communicate()


@tool("calculator", "Calculates.")
def calculator(expression: str) -> str:
    return expression


@pytest.mark.parametrize("vendor", DOORS)
async def test_an_agent_is_understood(aimock: str, vendor: str) -> None:
    """Ask twice with two calls of tools at once, then for an answer with a schema."""
    dialect, end, model = DOORS[vendor]
    provider = open_provider(
        ServerSpec(dialect=dialect, base_url=aimock + end, api_key="test-key", patience_s=0), model
    )
    about: dict[str, Any] = {"provider": provider, "params": ModelParams(max_output_tokens=500)}
    agent = BaseAgent("You know the weather.", tools=[calculator], **about)
    try:
        for query in (ASKED, "And what is the weather now?"):
            answer = await agent.execute_query_async(query)
            assert (answer.error, answer.content) == (None, SAID)
            assert answer.usage.model_calls == 2
            assert [result.result for result in answer.tool_results] == ["1+1", "2+2"]
        formal = BaseAgent("You answer.", output_schema=SCHEMA, **about)
        assert (await formal.execute_query_async("As JSON")).output_json == {"cold": True}
    finally:
        await provider.aclose()
    await _understood(aimock, model)


async def _understood(server: str, model: str) -> None:
    """Check that the server found system message, roles, tools and results in each request."""
    async with httpx2.AsyncClient(base_url=server) as client:
        entries = (await client.get("/__aimock/journal")).json()
    seen = [each["body"] for each in entries if each["body"]["model"] == model]
    assert all(each["response"]["status"] == 200 for each in entries)
    roles = [[message["role"] for message in body["messages"]] for body in seen]
    asked = ["system", "user", "assistant", "tool", "tool"]
    assert asked in roles
    assert [*asked, "assistant", "user", "assistant", "tool", "tool"] in roles
    assert any(body.get("tools") for body in seen)


@pytest.mark.deep
async def test_the_service_s_runs_are_understood(
    aimock: str, settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_SECRET_VENDOR", "vendor-key-0123456789")
    configured = settings.model_copy(
        update={"egress_allow": ["127.0.0.1"], "secret_hosts": {"VENDOR": ["127.0.0.1"]}}
    )
    async with running(configured, database_url, worker=True) as bottega:
        for vendor, (dialect, end, model) in DOORS.items():
            name = vendor.lower()
            provider: dict[str, Any] = {"name": name, "dialect": dialect, "base_url": aimock + end}
            provider["key"] = {"secret": "VENDOR"}
            assert (await bottega.client.post("/v1/providers", json=provider)).status_code == 201
            agent: dict[str, Any] = {
                "name": name,
                "system_message": "You know.",
                "model": f"{name}/{model}",
            }
            agent["tools"] = [{"type": "builtin", "name": "calculator"}]
            assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
            for _ in range(2):
                body = {"agent": name, "input": ASKED, "session_id": name}
                run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
                assert (run["status"], run["output"]) == ("completed", SAID), run
