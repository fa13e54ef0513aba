"""OpenAI's official client for JavaScript talks to agents: whole, streamed, tools, schemas, errors.

It runs in Node.js: `npm ci --prefix tests/contract/node` installs it. Without it the test is
skipped, unless `JUDGES=required`.
"""

import asyncio
import json
import os
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.fake_model import FakeModel, calls, text
from tests.flows.test_conversations import define
from tests.service import Running

NODE = Path(__file__).parents[1] / "contract" / "node"


async def test_the_javascript_client(guest: Running, guest_model: FakeModel) -> None:
    if not (shutil.which("node") and (NODE / "node_modules" / "openai").exists()):
        if os.environ.get("JUDGES") == "required":
            pytest.fail("install the judges: npm ci --prefix tests/contract/node")
        pytest.skip("there is no Node.js with openai: npm ci --prefix tests/contract/node")
    await define(guest)
    guest_model.script(
        text("In Rome."),
        text("In Rome, I think."),
        calls(("locate", {"user": "ada"})),
        text("She is in Rome."),
        text('{"city": "Rome"}'),
        text("Hello Ada."),
        text("You are Ada."),
    )
    url = f"http://127.0.0.1:{guest.port}/openai/v1"
    key = guest.headers["Authorization"].removeprefix("Bearer ")
    client = await asyncio.create_subprocess_exec(
        "node", NODE / "openai_client.mjs", url, key, stdout=PIPE, stderr=PIPE
    )
    output, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    got = json.loads(output)
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
