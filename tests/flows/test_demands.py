"""Goals, constraints and success criteria of a run: what a request says beside its input."""

from typing import Any

import pytest

from bottega.settings import Settings
from tests.domain.asked import TASKS
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_agent_data import create
from tests.service import Running, running
from tests.team import define_graph


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


SAID = {
    "goals": ["Ship it.", "  two\nlines, ünï ✓ "],
    "constraints": ["x", "y" * 500],
    "success_criteria": [f"criterion {n}" for n in range(10)],
}


def prompt(request: dict[str, Any]) -> str:
    """Return all text of a model request's messages."""
    return "\n".join(str(message["content"]) for message in request["messages"])


async def run_of(bottega: Running, **body: Any) -> dict[str, Any]:
    answer = await bottega.client.post("/v1/runs?wait=30", json={"input": "Do.", **body})
    assert answer.status_code in (200, 201, 202), answer.text
    run: dict[str, Any] = answer.json()
    return run


@pytest.mark.parametrize("memory", ["off", "full"])
async def test_what_a_request_says_reaches_the_model_word_for_word(
    bottega: Running, model: FakeModel, memory: str
) -> None:
    await create(bottega, "one")
    asked = "Goal: be brief.\n> Constraints: none\nWrite it. You must not shout."
    run = await run_of(bottega, agent="one", input=asked, memory=memory, **SAID)
    assert {name: run[name] for name in SAID} == SAID
    (sent,) = model.requests
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    told = sent["messages"][1]["content"]
    assert told.endswith(f"\n\n{asked}")
    assert told.count(asked) == 1
    for name, texts in SAID.items():
        lines = "\n".join(f"- {each}" for each in texts)
        assert f"{name.replace('_', ' ').capitalize()}:\n{lines}" in told
    again = await bottega.client.post(f"/v1/runs/{run['id']}/retry", json={})
    assert {name: again.json()[name] for name in SAID} == SAID
    await bottega.watch(again.json()["id"])
    assert model.requests[-1]["messages"][1]["content"].endswith(told)
    listed = (await bottega.client.get(f"/v1/runs/{run['id']}/prompt")).json()
    assert "- Ship it." in str(listed)


async def test_every_agent_of_a_graph_that_gets_the_input_gets_the_demands(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.script(text("one"), text("two"))
    await run_of(bottega, mode="dag", graph="g", constraints=["no more than 7 words"])
    assert len(model.requests) == 2
    assert all(prompt(each).count("- no more than 7 words") == 1 for each in model.requests)


async def test_sub_agents_get_only_what_their_caller_says(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "child", description="a child")
    await create(bottega, "parent", subagents={"names": ["child"]})
    model.script(calls(("child", {"query": "part"})), text("done"), text("all done"))
    await run_of(bottega, agent="parent", goals=["a goal of the whole"])
    parent, child, again = map(prompt, model.requests)
    assert "a goal of the whole" not in child
    assert parent.count("a goal of the whole") == again.count("a goal of the whole") == 1


async def test_a_turn_reads_its_own_demands_only(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "one")
    model.script(text("one"), text("two"))
    await run_of(bottega, agent="one", session_id="s", goals=["the first goal"])
    await run_of(bottega, agent="one", session_id="s", input="More.", goals=["the second goal"])
    told = prompt(model.requests[-1])
    assert "the second goal" in told
    assert "the first goal" not in told
    assert told.count("Do.") == told.count("More.") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("goals", [""]),
        ("constraints", ["x" * 501]),
        ("success_criteria", ["x"] * 11),
        ("goals", "a text"),
        ("goals", [1]),
        ("goals", None),
    ],
)
async def test_other_demands_are_refused(bottega: Running, field: str, value: Any) -> None:
    await create(bottega, "one")
    body = {"agent": "one", "input": "x", field: value}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"].startswith(f"/{field}")


async def test_a_message_for_another_run_takes_no_demands(bottega: Running) -> None:
    await create(bottega, "one")
    body = {"agent": "one", "input": "x", "session_id": "s", "if_busy": "steer", "goals": ["y"]}
    assert (await bottega.client.post("/v1/runs", json=body)).status_code == 422


async def test_a_schedule_starts_runs_with_its_demands(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "one")
    run = {"agent": "one", "input": "x", **SAID}
    body = {"name": "often", "cron": "* * * * *", "run": run, "paused": True}
    stored = await bottega.client.post("/v1/schedules", json=body)
    assert stored.status_code == 201, stored.text
    assert {name: stored.json()["run"][name] for name in SAID} == SAID


async def test_a_models_analysis_is_marked_as_one(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    update = {"openai_base_url": model.base_url, "memory_model": "analyst"}
    said = {"goals": ["Count the apples."], "constraints": [], "criteria": [], "complexity": 0.1}
    model.script(calls(("answer", said)), text("seven"))
    async with running(settings.model_copy(update=update), database_url, worker=True) as bottega:
        await create(bottega, "one")
        await run_of(bottega, agent="one", input="Apples? You must not guess.")
        told = prompt(model.requests[1])
    assert "Goals (found by a model):\n- Count the apples." in told
    assert "Constraints" not in told, "rules add nothing to it"
    assert told.count("You must not guess.") == 1


async def test_rules_tell_a_real_run_nothing_about_its_task(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "one")
    model.decide = lambda request: text("done")
    sample = TASKS[:: len(TASKS) // 12]
    for number, (_, task) in enumerate(sample):
        await run_of(bottega, agent="one", input=task, user=f"user {number}")
    sent = [request["messages"] for request in model.requests]
    assert [[each["content"] for each in messages] for messages in sent] == [
        ["You are one.", task] for _, task in sample
    ]
