"""The list of sessions as conversations: titles, last messages, states, search and order."""

import asyncio
from typing import Any
from urllib.parse import urlencode

from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_outcomes import define, finished
from tests.service import Running
from tests.waiting import until


async def listed(bottega: Running, **query: Any) -> list[dict[str, Any]]:
    answer = await bottega.client.get(f"/v1/sessions?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    sessions: list[dict[str, Any]] = answer.json()["items"]
    return sessions


async def ids(bottega: Running, **query: Any) -> list[str]:
    return [session["id"] for session in await listed(bottega, **query)]


async def test_a_session_shows_its_first_question_and_last_answer(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, None)
    guest_model.decide = lambda request: text("Done.")
    new = await guest.client.post("/v1/sessions", json={"id": "empty"})
    assert (new.json()["title"], new.json()["state"], new.json()["agent"]) == ("", "idle", None)
    await finished(guest, session_id="s", input="My refund, please")
    last = await finished(guest, session_id="s", input="And now?")
    (session,) = await listed(guest, q="refund")
    assert (session["title"], session["last_message"]) == ("My refund, please", "Done.")
    assert (session["agent"], session["state"]) == ("a", "idle")
    assert session["last_run_id"] == last["id"]
    assert session["updated_at"] >= last["ended_at"]


async def test_the_state_says_what_the_last_run_does(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, None, model_patience_s=0.1)
    guest_model.decide = lambda request: http_error(400)
    await finished(guest, session_id="broken", input="x")
    gate = asyncio.Event()
    guest_model.decide = lambda request: gated(gate, text("late"))
    body = {"agent": "a", "input": "slow", "memory": "off", "session_id": "busy"}
    run = (await guest.client.post("/v1/runs", json=body)).json()
    states = {each["id"]: each["state"] for each in await listed(guest)}
    assert states == {"broken": "failed", "busy": "answering"}
    (busy,) = await listed(guest, state="answering")
    assert (busy["id"], busy["last_message"]) == ("busy", "slow")
    assert await ids(guest, state="failed") == ["broken"]
    gate.set()
    path = f"/v1/runs/{run['id']}"

    async def is_over() -> bool:
        return bool((await guest.client.get(path)).json()["status"] == "completed")

    await until(is_over)
    assert await ids(guest, state="answering") == []


async def test_a_conversation_that_waits_for_a_person_is_found(
    guest: Running, guest_model: FakeModel
) -> None:
    tools = [{"type": "builtin", "name": "calculator", "approval": "always"}]
    await define(guest, None, tools=tools)
    guest_model.script(calls(("calculator", {"expression": "1+1"})))
    body = {"agent": "a", "input": "count", "memory": "off", "session_id": "ask"}
    run = (await guest.client.post("/v1/runs", json=body)).json()

    async def waits() -> bool:
        return await ids(guest, state="waiting") == ["ask"]

    await until(waits)
    assert (await guest.client.post(f"/v1/runs/{run['id']}/cancel")).is_success


async def test_sessions_are_ordered_by_their_last_run_in_pages(guest: Running) -> None:
    await define(guest, None)
    await guest.client.post("/v1/sessions", json={"id": "without"})
    for session in ("b", "a", "c", "b"):
        await finished(guest, session_id=session)
    assert await ids(guest, order="updated_at") == ["b", "c", "a"]
    assert await ids(guest) == ["a", "b", "c", "without"]
    first = (await guest.client.get("/v1/sessions?order=updated_at&limit=2")).json()
    assert [each["id"] for each in first["items"]] == ["b", "c"]
    rest = await ids(guest, order="updated_at", limit=2, cursor=first["next_cursor"])
    assert rest == ["a"]


async def test_a_search_reads_titles_and_questions(guest: Running) -> None:
    await define(guest, None)
    await define(guest, None, "b")
    await finished(guest, session_id="x", input="Where is the Café?", user="ada")
    await finished(guest, session_id="y", input="hello", metadata={"k": "v"})
    await finished(guest, session_id="y", input="cafe again", agent="b")
    title = {"title": "Menu of the house"}
    changed = await guest.client.patch("/v1/sessions/y", json=title)
    assert changed.json()["title"] == title["title"]
    assert await ids(guest, q="CAFE") == ["x", "y"]
    assert await ids(guest, q="menu") == ["y"]
    assert await ids(guest, q="cafe", user="ada") == ["x"]
    assert await ids(guest, q="cafe", agent="b") == ["y"]
    assert await ids(guest, agent="c") == []
    forked = (await guest.client.post("/v1/sessions/y/fork")).json()
    assert forked["title"] == title["title"]
    again = await guest.client.patch("/v1/sessions/y", json={"title": None})
    assert again.json()["title"] == "hello"


async def test_a_change_of_nothing_is_refused(guest: Running) -> None:
    await guest.client.post("/v1/sessions", json={"id": "s", "metadata": {"a": "1"}})
    for body in ({}, {"metadata": None}, {"title": ""}, {"title": "x" * 201}):
        answer = await guest.client.patch("/v1/sessions/s", json=body)
        assert answer.status_code == 422, body
    kept = await guest.client.patch("/v1/sessions/s", json={"title": "t"})
    assert (kept.json()["title"], kept.json()["metadata"]) == ("t", {"a": "1"})


async def test_a_search_takes_words_of_title_question_user_and_answer_and_a_time(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, None)
    guest_model.decide = lambda request: text("Done.")
    await finished(guest, session_id="one", user="Ada", input="My refund, please")
    between = await finished(guest, session_id="two", user="bob", input="My refund, again")
    await finished(guest, session_id="one", user="Ada", input="The blue lamp")
    assert await ids(guest, q="refund ADA") == ["one"]
    assert await ids(guest, q="lamp refund") == ["one"]
    assert await ids(guest, q="refund") == ["one", "two"]
    assert await ids(guest, q="refund carl") == []
    assert await ids(guest, q="done ADA") == ["one"]  # of the answer
    assert await ids(guest, q=" ") == ["one", "two"]
    assert await ids(guest, q="refund please a d e i o u y x my") == []
    at = between["created_at"]
    by_time = {"order": "updated_at"}
    assert await ids(guest, active_before=at, **by_time) == ["one"]
    assert await ids(guest, active_after=at, **by_time) == ["one", "two"]
    assert await ids(guest, active_before=between["ended_at"], limit=1, **by_time) == ["one"]
    both = {"active_before": between["ended_at"], **by_time}
    first = await guest.client.get(f"/v1/sessions?{urlencode({**both, 'limit': 1})}")
    cursor = first.json()["next_cursor"]
    assert await ids(guest, **both, limit=1, cursor=cursor) == ["two"]
