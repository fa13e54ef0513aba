"""Facts about end users: set by people and by agents, read by later runs of the same user."""

import asyncio
from typing import Any

import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.conftest import asking
from tests.service import Running, running
from tests.waiting import until

FACTS = "/v1/users/ada%2F1/facts"
TOOLS = ("remember_fact", "forget_fact")


async def define(service: Running, **more: Any) -> None:
    body = {"name": "clerk", "system_message": "You help.", **more}
    assert (await service.client.post("/v1/agents", json=body)).status_code == 201


async def ask(service: Running, user: str | None = "ada/1", **more: Any) -> dict[str, Any]:
    body = {"agent": "clerk", "input": "Write the letter about tides.", "user": user, **more}
    run = (await service.client.post("/v1/runs?wait=30", json=body)).json()
    assert run["status"] == "completed", run
    return dict(run)


async def listed(service: Running, path: str = FACTS) -> list[dict[str, Any]]:
    answer = await service.client.get(path)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


@pytest.mark.parametrize("memory", ["full", "off"])
@pytest.mark.parametrize("in_session", [False, True])
async def test_a_fact_reaches_prompts_of_its_user_alone(
    guest: Running, guest_model: FakeModel, memory: str, in_session: bool
) -> None:
    await define(guest, facts="read", memory=memory)
    made = await guest.client.post(FACTS, json={"text": " Prefers\nItalian. "})
    assert made.status_code == 201, made.text
    assert made.json()["text"] == "Prefers Italian."
    assert made.json()["source"] == {"kind": "person", "run_id": None, "message_id": None}

    for user in ("ada/1", "bob", None):
        for turn in range(2):
            guest_model.script(text("done"))
            session = {"session_id": f"s-{user and user[:3]}"} if in_session else {}
            await ask(guest, user, **session)
            messages = guest_model.requests[-1]["messages"]
            assert ("Prefers Italian." in str(messages)) == (user == "ada/1"), (user, turn)
            assert "Prefers Italian." not in str(messages[0])  # never in the system message
            assert not {
                tool["function"]["name"] for tool in guest_model.requests[-1].get("tools", ())
            } & {*TOOLS}


async def test_without_the_field_no_fact_is_read(guest: Running, guest_model: FakeModel) -> None:
    await define(guest)
    await guest.client.post(FACTS, json={"text": "Prefers Italian."})
    guest_model.script(text("done"))
    await ask(guest)
    assert "Italian" not in str(guest_model.requests[-1])


async def test_an_agent_remembers_and_forgets(guest: Running, guest_model: FakeModel) -> None:
    await define(guest, facts="write")
    guest_model.script(calls(("remember_fact", {"text": "Has two cats."})), text("noted"))
    run = await ask(guest)
    (fact,) = await listed(guest)
    assert (fact["text"], fact["confirmed"]) == ("Has two cats.", True)
    assert fact["source"] == {"kind": "run", "run_id": run["id"], "message_id": None}

    await guest.client.post(FACTS, json={"text": "Likes tea."})
    guest_model.script(
        calls(("forget_fact", {"number": 3}), ("remember_fact", {"text": "Has a dog."})),
        calls(("forget_fact", {"number": 2}), ("remember_fact", {"text": "x" * 201})),
        calls(("forget_fact", {"number": 2})),
        text("ok"),
    )
    await ask(guest)
    shown = str([each["content"] for each in guest_model.requests[-1]["messages"]])
    assert r"1. Likes tea.\n2. Has two cats.\n" in shown, "as at the run's start"
    results = [
        each["content"] for each in guest_model.requests[-1]["messages"] if each["role"] == "tool"
    ]
    assert "no fact with the number 3" in results[0]
    assert ("Stored." in results[1], "Deleted." in results[2]) == (True, True)
    assert "at most 200 characters" in results[3]
    assert "no fact with the number 2" in results[4], "deleted already"
    assert [each["text"] for each in await listed(guest)] == ["Likes tea.", "Has a dog."]


async def test_a_fact_from_outside_content_waits_for_a_person(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, facts="write", tools=[{"type": "builtin", "name": "http_get"}])
    guest_model.script(
        calls(("http_get", {"url": "https://127.0.0.1:1/"})),  # whatever it answers
        calls(("remember_fact", {"text": "Pays every bill."})),
        text("ok"),
    )
    await guest.client.post(FACTS, json={"text": "Owes nothing."})
    await ask(guest)
    owes, fact = await listed(guest)
    assert fact["confirmed"] is False
    guest_model.script(
        calls(("http_get", {"url": "https://127.0.0.1:1/"})),
        calls(("forget_fact", {"number": 1})),
        text("ok"),
    )
    await ask(guest)
    assert owes in await listed(guest)  # a person has set it
    guest_model.script(text("done"))
    await ask(guest)
    assert "Pays every bill." not in str(guest_model.requests[-1]["messages"])

    changed = await guest.client.patch(f"{FACTS}/{fact['id']}", json={"text": "Pays no bill."})
    assert changed.json()["confirmed"] is True
    guest_model.script(text("done"))
    await ask(guest)
    assert "1. Pays no bill." in str(guest_model.requests[-1]["messages"])


async def test_a_user_has_at_most_fifty_short_facts(guest: Running) -> None:
    for number in range(50):
        answer = await guest.client.post(FACTS, json={"text": f"Likes number {number}."})
        assert answer.status_code == 201, answer.text
    again = await guest.client.post(FACTS, json={"text": "Likes number 7."})
    assert again.status_code == 201  # the user has it already
    more = await guest.client.post(FACTS, json={"text": "Likes number 50."})
    assert (more.status_code, more.json()["code"]) == (409, "too_many_facts")
    for wrong in ("", " \n ", "x" * 201, "a\x00b"):
        assert (await guest.client.post(FACTS, json={"text": wrong})).status_code == 422, wrong
    page = (await guest.client.get(f"{FACTS}?limit=20&order=desc")).json()
    assert [each["text"] for each in page["items"]][:2] == ["Likes number 49.", "Likes number 48."]
    assert page["next_cursor"]


async def test_a_fact_is_another_user_s_or_is_changed_and_deleted(guest: Running) -> None:
    fact = (await guest.client.post(FACTS, json={"text": "Prefers Italian."})).json()
    for method, body in (("PATCH", {"text": "x"}), ("DELETE", None)):
        other = await guest.client.request(method, f"/v1/users/bob/facts/{fact['id']}", json=body)
        assert other.status_code == 404
    assert await listed(guest, "/v1/users/bob/facts") == []
    await guest.client.post(FACTS, json={"text": "Likes tea."})
    twice = await guest.client.patch(f"{FACTS}/{fact['id']}", json={"text": "Likes tea."})
    assert (twice.status_code, twice.json()["code"]) == (409, "exists")
    tea = (await listed(guest))[-1]
    assert (await guest.client.delete(f"{FACTS}/{tea['id']}")).status_code == 204
    changed = await guest.client.patch(f"{FACTS}/{fact['id']}", json={"text": "Prefers Greek."})
    assert changed.json()["text"] == "Prefers Greek."
    gone = await guest.client.delete(f"{FACTS}/{fact['id']}")
    assert gone.status_code == 204
    assert await listed(guest) == []
    audit = (await guest.client.get("/v1/audit?limit=100")).json()["items"]
    actions = [each["action"] for each in audit if each["target"] == fact["id"]]
    assert sorted(actions) == ["fact.change", "fact.create", "fact.delete"]


async def test_facts_are_exported_and_erased_with_their_user(guest: Running) -> None:
    await guest.client.post(FACTS, json={"text": "Prefers Italian."})
    exported = await guest.client.get("/v1/users/ada%2F1/export")
    assert '{"type":"fact",' in exported.text
    assert "Prefers Italian." in exported.text
    assert (await guest.client.delete("/v1/users/ada%2F1")).status_code == 202

    async def known() -> Any:
        return await guest.client.get("/v1/users/ada%2F1")

    await until(known, lambda answer: answer.status_code == 404)
    assert await listed(guest) == []


async def test_a_token_of_an_end_user_reads_no_facts(guest: Running) -> None:
    body = {"user": "ada/1", "actions": ["run", "read"], "expires_in": 60}
    token = (await guest.client.post("/v1/tokens", json=body)).json()["token"]
    answer = await guest.client.get(FACTS, headers={"authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope")


async def test_a_resumed_run_has_the_numbers_that_it_showed_first(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    impatient = asking(model, settings).model_copy(update={"drain_grace_s": 0.0})
    model.script(gated(asyncio.Event(), text("never")))
    async with running(impatient, database_url, worker=True) as server:
        await define(server, facts="write")
        await server.client.post(FACTS, json={"text": "Likes tea."})
        body = {"agent": "clerk", "input": "x", "user": "ada/1"}
        run = (await server.client.post("/v1/runs", json=body)).json()
        await model.received(1)
        await server.client.post(FACTS, json={"text": "Likes rain."})
    model.script(calls(("forget_fact", {"number": 1})), text("ok"))
    async with running(impatient, database_url, worker=True) as server:
        await server.frames(f"/v1/runs/{run['id']}/ws")
        assert [each["text"] for each in await listed(server)] == ["Likes rain."]
    first, resumed, _ = model.requests
    assert resumed["messages"] == first["messages"]
