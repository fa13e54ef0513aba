"""Clients in JavaScript talk to agents: OpenAI's official one, and the AI SDK in both forms.

They run in Node.js: `npm ci --prefix tests/contract/node` installs them. Without it the tests are
skipped, unless `JUDGES=required`.
"""

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from tests.fake_model import FakeModel, calls, text
from tests.flows.test_conversations import define
from tests.judges import needed
from tests.service import Running

NODE = Path(__file__).parents[1] / "contract" / "node"


async def run_in_node(program: str, package: str, bottega: Running) -> Any:
    """Run a program with our address and key; return the JSON that it prints."""
    found = shutil.which("node") and (NODE / "node_modules" / package).exists()
    needed(found, f"there is no Node.js with {package}: npm ci --prefix tests/contract/node")
    url = f"http://127.0.0.1:{bottega.port}/openai/v1"
    key = bottega.headers["Authorization"].removeprefix("Bearer ")
    client = await asyncio.create_subprocess_exec(
        "node", NODE / program, url, key, stdout=PIPE, stderr=PIPE
    )
    output, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    return json.loads(output)


async def test_the_ai_sdk(guest: Running, guest_model: FakeModel) -> None:
    await define(guest)
    locate = calls(("locate", {"user": "ada"}), content="Let me look.")
    turns = (
        *(text("Hello Ada."), text("You are Ada."), locate, text("In Rome.")),
        *(locate, text("Sure, in Rome."), text('```json\n{"city": "Rome"}\n```')),
    )
    guest_model.script(*turns, *turns)
    got = await run_in_node("ai_sdk.mjs", "ai", guest)
    for form in ("chat", "responses"):
        assert got[form] == {
            "first": "Hello Ada.",
            "second": "You are Ada.",
            "tools": [2, "Let me look.", "In Rome."],
            "streamedTools": "Let me look.Sure, in Rome.",
            "usage": True,
            "object": {"city": "Rome"},
        }
    runs = (await guest.client.get("/v1/runs?agent=clerk&limit=50")).json()["items"]
    assert [run["status"] for run in runs] == ["completed"] * 10
    told = [each["content"] for each in guest_model.requests[-2]["messages"]]
    assert told[1:5] == ["I am Ada.", "Hello Ada.", "Who am I?", "You are Ada."]


async def test_the_javascript_client(guest: Running, guest_model: FakeModel) -> None:
    await define(guest)
    guest_model.script(
        text("In Rome."),
        text("In Rome, I think."),
        calls(("locate", {"user": "ada"})),
        text("She is in Rome."),
        text('{"city": "Rome"}'),
        text('```json\n{"city": "Rome"}\n```'),
        text('<think>Oslo?</think>{"city": "Rome"}'),
        text("Hello Ada."),
        text("You are Ada."),
    )
    got = await run_in_node("openai_client.mjs", "openai", guest)
    assert got["streamedJson"] == got["responseJson"] == {"city": "Rome"}
    assert got["whole"] == "In Rome."
    assert got["streamed"] == "In Rome, I think."
    assert got["tools"] == "She is in Rome."
    assert got["parsed"] == {"city": "Rome"}
    assert (got["first"], got["second"]) == ("Hello Ada.", "You are Ada.")
    assert got["events"][0] == "response.created"
    assert got["events"][-1] == "response.completed"
    assert got["errors"] == [[True, "model_not_found"]] * 2 + [[True, "invalid_api_key"]]
    assert got["models"] == ["clerk"]
    answered = guest_model.requests[3]["messages"][-1]
    assert (answered["role"], answered["content"]) == ("tool", "ada is in Rome")
    told = [each["content"] for each in guest_model.requests[-1]["messages"]]
    assert told[-3:] == ["I am Ada.", "Hello Ada.", "Who am I?"]
