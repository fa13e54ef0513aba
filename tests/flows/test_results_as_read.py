"""Answers of tools: ``/messages`` shows what the model read, byte for byte."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, text
from tests.flows.test_agent_data import install
from tests.flows.test_interrupts import decide, pending
from tests.flows.test_messages import boss, said
from tests.flows.test_plugin_tools import create
from tests.flows.test_resume import final
from tests.service import Running, running

TOOLS = r"""
from bottega.agents import AgentEvent, Part, tool

GIVEN = {
    "keys": {"zebra": 1, "apple": {"b": 1.0, "a": [1e16, 1e-7, -0.0, 10**30]}},
    "text": " two\nlines\u2028 and more ",
    "blank": "  ",
    "empty": "",
    "nothing": None,
    "odd": "a\x00b\ud800c",
    "odd_keys": {"a\x00": ["\x00", "\udfff"]},
    "deep": 0,
    "unicode": {"ключ": "ß\U0001f600"},
    "list": [],
    "image": [Part("image", data=b"GIF89a\x01\x00\x01\x00", media_type="image/gif"), "seen"],
    "changed": "as the tool said",
    "hidden": {"secret": 1},
}
for _ in range(300):
    GIVEN["deep"] = [GIVEN["deep"]]

@tool("give", "Gives a thing.")
def give(what: str) -> object:
    return GIVEN[what]

@tool("fail", "Fails.")
def fail(how: str) -> None:
    raise ValueError(how)

def change(value, status):
    if value.tool_name == "give" and value.result == "as the tool said":
        return value.model_copy(update={"result": {"b": "changed", "a": "by a hook"}})
    if value.error and "heal" in value.error:
        return value.model_copy(update={"error": value.error + ": call it again"})
    return value

def configure_agent(agent, definition):
    if agent.agent_name == "it":
        agent.register_tool(give)
        agent.register_tool(fail)
        agent.on(AgentEvent.AFTER_TOOL_EXECUTION).transform(change)
"""
THINGS = [
    *("keys", "text", "blank", "empty", "nothing", "odd", "odd_keys", "deep"),
    *("unicode", "list", "image", "changed"),
]


@pytest.fixture
def configured(
    settings: Settings, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    install(tmp_path, "giving", TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "giving_plugin", raising=False)
    return settings.model_copy(update={"openai_base_url": model.base_url})


def heard(request: dict[str, Any]) -> list[str]:
    """Return the texts of the tools' answers in a request, in order."""
    return [each["content"] for each in request["messages"] if each["role"] == "tool"]


async def shown(bottega: Running, run_id: str, **query: Any) -> list[str]:
    messages = await said(bottega.client, run_id, **query)
    return [each["content"] for each in messages if each["role"] == "tool"]


async def test_answers_of_every_kind_are_shown_as_the_model_read_them(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    asked = [("give", {"what": each}) for each in THINGS]
    asked += [
        ("give", {}),
        ("fail", {"how": "torn \x00 wire"}),
        ("fail", {"how": "heal"}),
        ("fail", {"how": "long " * 5000}),
        ("below", {"query": "Say it."}),
        ("invented", {}),
        ("calculator", {"expression": "6*7"}),
    ]

    def decide_on(request: dict[str, Any]) -> Reply:
        if "You are below." in str(request["messages"]):
            return text(" said\nbelow ")
        return text("done") if heard(request) else calls(*asked)

    model.decide = decide_on
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "below")
        tools = [{"type": "builtin", "name": "calculator"}]
        await create(bottega, "it", tools=tools, subagents={"names": ["below"]})
        body = {"agent": "it", "input": "go", "session_id": "s"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert run["status"] == "completed", run
        read = heard(model.requests[-1])
        messages = await said(bottega.client, run["id"])
        calls_made = next(each["tool_calls"] for each in messages if each["tool_calls"])
        by_call = {each["tool_call_id"]: each for each in messages if each["role"] == "tool"}
        found = [by_call[call["id"]]["content"] for call in calls_made]
        assert len(read) == len(asked)
        assert dict(enumerate(found)) == dict(enumerate(read))
        assert "changed" in read[THINGS.index("changed")]
        image = by_call[calls_made[THINGS.index("image")]["id"]]
        assert [part["type"] for part in image["parts"]] == ["text", "image"]
        assert image["parts"][0]["text"] == image["content"]
        path = "/v1/sessions/s/messages"
        listed = (await bottega.client.get(path, params={"limit": 100})).json()["items"]
        of_session = {each["tool_call_id"]: each for each in listed if each["role"] == "tool"}
        assert [of_session[call["id"]]["content"] for call in calls_made] == read
        prompt = (await bottega.client.get(f"/v1/runs/{run['id']}/prompt")).json()["messages"]
        assert sorted(each["content"] for each in prompt if each["role"] == "tool") == sorted(read)


async def test_what_people_edit_deny_and_answer_is_shown_as_the_model_read_it(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    locate = {"type": "client", "name": "locate", "description": "Says where the user is."}
    model.script(
        calls(
            *(("give", {"what": each}) for each in ("keys", "text", "image")),
            ("fail", {"how": "torn"}),
            ("locate", {}),
        ),
        text("done"),
    )
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "it", tools=[locate], approval="always")
        body = {"agent": "it", "input": "go"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        for each in await pending(bottega.client, run_id, 5):
            arguments = each["arguments"]
            edit = {} if arguments == {"what": "text"} else {"arguments": arguments}
            answer = {"decision": "approve", **edit}
            assert (await decide(bottega.client, each, **answer))[0] == 200
        (call,) = await pending(bottega.client, run_id)
        found = {"zebra": 1, "apple": "ß"}
        assert (await decide(bottega.client, call, result=found))[0] == 200
        assert (await final(bottega, run_id))["status"] == "completed"
        read = heard(model.requests[-1])
        assert sum("edited by a person" in each for each in read) == 4
        assert sorted(await shown(bottega, run_id)) == sorted(read)


async def test_answers_of_asynchronous_sub_agents_are_shown_as_the_model_read_them(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = boss
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "leaf")
        await create(bottega, "boss", subagents={"mode": "async", "names": ["leaf"]})
        body = {"agent": "boss", "input": "go"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert run["status"] == "completed", run
        asked = [each for each in model.requests if "You are boss." in str(each["messages"][0])]
        assert len(heard(asked[-1])) == 3
        assert sorted(await shown(bottega, run["id"])) == sorted(heard(asked[-1]))
