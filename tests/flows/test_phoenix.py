"""Arize Phoenix, an observability platform, judges the spans of runs."""

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, free_port, text
from tests.flows.conftest import asking
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import client_of, running
from tests.waiting import until

VERSION = "20.26.1"
FOLDER = Path(tempfile.gettempdir()) / f"bottega-phoenix-{VERSION}-{os.getuid()}"
START_S = 240


def install() -> Path:
    """Install Phoenix at its first use, into an environment of its own; return its program."""
    program = FOLDER / "bin" / "phoenix"
    with FOLDER.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = FOLDER / "installed"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
            wanted = ["--quiet", "--only-binary=:all:", f"arize-phoenix=={VERSION}"]
            pip = [str(FOLDER / "bin" / "pip"), "install", *wanted]
            subprocess.run(pip, check=True, capture_output=True)
            done.touch()
    return program


@pytest.fixture
async def phoenix(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Phoenix on loopback."""
    program = await asyncio.to_thread(install)
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PHOENIX_WORKING_DIR": str(tmp_path),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        "PHOENIX_AGENTS_DISABLE_WEB_ACCESS": "true",
    }
    with (tmp_path / "phoenix.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(program), "serve", env=environment, stdout=log, stderr=log
        )
    async with client_of(port) as client:

        async def answers() -> bool:
            assert process.returncode is None, (tmp_path / "phoenix.log").read_text()[-2000:]
            try:
                return (await client.get("/healthz")).status_code == 200
            except httpx2.TransportError:
                return False

        try:
            await until(answers, within=START_S)
            yield client
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.deep
@pytest.mark.timeout(900)
async def test_phoenix_shows_agents_models_tools_and_tokens(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    phoenix: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(phoenix.base_url).rstrip("/"))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    of_lead: list[Reply] = [
        calls(("calculator", {"expression": "6*7"}), ("helper", {"query": "?"}))
    ]
    of_lead.append(text("42, says the lead"))
    replies = iter(of_lead)
    model.decide = lambda request: (
        next(replies) if named(request) == "lead" else text("42, says the helper")
    )
    async with running(asking(model, settings), database_url, worker=True) as bottega:
        await create(bottega, "helper")
        tools = [{"type": "builtin", "name": "calculator"}]
        await create(bottega, "lead", subagents={"names": ["helper"]}, tools=tools)
        body = {"agent": "lead", "input": "6*7?", "session_id": "s"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await bottega.watch(run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        trace = model.headers[-1]["traceparent"][3:35]

    async def shown() -> list[dict[str, Any]]:
        answer = await phoenix.get("/v1/projects/default/spans", params={"limit": 1000})
        spans = answer.json().get("data", []) if answer.status_code == 200 else []
        return [each for each in spans if each["context"]["trace_id"] == trace]

    spans = await until(shown, lambda found: len(found) == 9, within=60)
    check(spans, run)


def check(spans: list[dict[str, Any]], run: dict[str, Any]) -> None:
    by_id = {each["context"]["span_id"]: each for each in spans}

    def path(span: dict[str, Any]) -> str:
        parent = by_id.get(span["parent_id"])
        return span["name"] if parent is None else f"{path(parent)} > {span['name']}"

    top = "POST /v1/runs > invoke_workflow lead > invoke_agent lead"
    helper = f"{top} > execute_tool helper > invoke_agent helper"
    chat = "chat gpt-5-mini"
    kinds = {path(each): each["span_kind"] for each in spans}
    assert kinds == {
        "POST /v1/runs": "UNKNOWN",
        "POST /v1/runs > invoke_workflow lead": "UNKNOWN",
        top: "AGENT",
        f"{top} > {chat}": "LLM",
        f"{top} > execute_tool calculator": "TOOL",
        f"{top} > execute_tool helper": "TOOL",
        helper: "AGENT",
        f"{helper} > {chat}": "LLM",
    }
    assert {each["status_code"] for each in spans} <= {"OK", "UNSET"}
    asked = [each["attributes"] for each in spans if each["name"] == chat]
    assert {each["llm.model_name"] for each in asked} == {"gpt-5-mini"}
    for ours, theirs in (("input", "prompt"), ("output", "completion")):
        counted = sum(each[f"llm.token_count.{theirs}"] for each in asked)
        assert counted == run["usage"][ours]
    tool = next(each for each in spans if each["name"] == "execute_tool calculator")
    assert tool["attributes"]["tool.name"] == "calculator"
    assert "42" in str(tool["attributes"]["output.value"])
    agent = next(each for each in spans if each["name"] == "invoke_agent helper")
    assert "helper" in str(agent["attributes"])
