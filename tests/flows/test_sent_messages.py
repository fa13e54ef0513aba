"""Messages that users send to a run under way."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest
import websockets
from pydantic_core import from_json, to_json

from bottega.llm.dialects.wire import UNDERSTOOD
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_conversations import ask, define, messages, said
from tests.flows.test_interrupts import decide, pending
from tests.service import Running
from tests.team import define_graph
from tests.waiting import until

CALCULATOR = {"type": "builtin", "name": "calculator"}


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


ENDING = (
    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%append_steps%'"
    " AND state = 'active' AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
)
"""Count the steps that wait for a lock, such as one that ends a run whose row is locked."""


async def send(bottega: Running, run_id: str, content: Any, **headers: str) -> tuple[int, Any]:
    path = f"/v1/runs/{run_id}/messages"
    answer = await bottega.client.post(path, json={"content": content}, headers=headers)
    return answer.status_code, answer.json()


async def sent(bottega: Running, run_id: str, content: Any) -> str:
    """Send a message; return its id."""
    status, body = await send(bottega, run_id, content)
    assert status == 202, body
    message_id: str = body["message_id"]
    return message_id


async def events(bottega: Running, run_id: str) -> list[dict[str, Any]]:
    answer = await bottega.client.get(f"/v1/runs/{run_id}/events", params={"limit": "100"})
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def of_type(log: list[dict[str, Any]], kind: str) -> list[Any]:
    """Return the data of the events of a type."""
    return [event["data"] for event in log if event["type"] == kind]


async def heard(bottega: Running, run_id: str, count: int) -> None:
    """Wait until the log has so many messages that came in."""
    seen = await until(
        lambda: events(bottega, run_id),
        lambda log: len(of_type(log, "message.received")) >= count,
    )
    assert len(of_type(seen, "message.received")) == count


async def finished(bottega: Running, run_id: str) -> list[dict[str, Any]]:
    """Return a run's log once the run is over."""
    return await until(
        lambda: events(bottega, run_id),
        lambda log: log[-1]["type"] in ("run.completed", "run.failed", "run.cancelled"),
    )


async def test_the_agent_gets_messages_before_its_next_model_call(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, tools=[CALCULATOR])
    gate = asyncio.Event()
    model.script(
        gated(gate, calls(("calculator", {"expression": "6*7"}))), text("42 euros"), text("Yes.")
    )
    run = await ask(bottega, "What is 6*7?", wait=0)
    await model.received(1)
    first = await sent(bottega, run["id"], "In euros, please.")
    key = {"Idempotency-Key": "once"}
    parts = [{"type": "text", "text": "Be brief."}]
    asked = [("user", "What is 6*7?"), ("assistant", None), ("tool", "42")]
    again = [(await send(bottega, run["id"], parts, **key))[1] for _ in range(2)]
    assert again[0] == again[1]
    second = again[0]["message_id"]
    await heard(bottega, run["id"], 2)
    gate.set()
    log = await finished(bottega, run["id"])
    assert log[-1]["type"] == "run.completed"
    assert of_type(log, "message.delivered") == [
        {"message_id": first, "call": 2, "content": "In euros, please."},
        {"message_id": second, "call": 2, "content": parts},
    ]
    assert of_type(log, "message.received") == [{"message_id": first}, {"message_id": second}]
    both = [{"type": "text", "text": "In euros, please."}, *parts]
    told = [("assistant", UNDERSTOOD), ("user", both)]
    history = [*asked, *told]
    assert said(model.requests[-1]) == history
    await ask(bottega, "Sure?")
    assert said(model.requests[-1]) == [*history, ("assistant", "42 euros"), ("user", "Sure?")]
    shown = [(each["role"], each["content"]) for each in (await messages(bottega))[:6]]
    assert shown == [
        ("user", "What is 6*7?"),
        ("assistant", ""),
        ("tool", "42"),
        ("user", "In euros, please."),
        ("user", "Be brief."),
        ("assistant", "42 euros"),
    ]
    own = (await bottega.client.get(f"/v1/runs/{run['id']}/messages")).json()["items"]
    assert [(each["role"], each["content"]) for each in own] == shown
    assert [each["message_id"] for each in own[3:5]] == [first, second]
    noted = (await bottega.client.get("/v1/audit?action=run.message")).json()["items"]
    assert [each["details"]["message_id"] for each in noted] == [first, second]


async def test_a_message_during_the_last_model_call_makes_another_one(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, max_iterations=1)
    gate = asyncio.Event()
    model.script(gated(gate, text("Hello.")), text("Hallo."), text("Bye."))
    run = await ask(bottega, "Greet me.", wait=0)
    await model.received(1)
    await sent(bottega, run["id"], "In German!")
    await heard(bottega, run["id"], 1)
    gate.set()
    log = await finished(bottega, run["id"])
    (told,) = of_type(log, "message.delivered")
    assert (told["call"], told["answered"]) == (2, True)
    history = [("user", "Greet me."), ("assistant", "Hello."), ("user", "In German!")]
    assert said(model.requests[-1]) == history
    ended = (await bottega.client.get(f"/v1/runs/{run['id']}")).json()
    assert (ended["status"], ended["output"]) == ("completed", "Hallo.")
    status, problem = await send(bottega, run["id"], "Louder!")
    assert (status, problem["code"]) == (409, "final")
    await ask(bottega, "Now leave.")
    assert said(model.requests[-1]) == [*history, ("assistant", "Hallo."), ("user", "Now leave.")]


async def test_a_message_at_the_very_end_is_read_before_the_run_completes(
    bottega: Running, model: FakeModel
) -> None:
    """Commit a message after the loop has ended: the run may not end without it."""
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("Hello.")), text("Hallo."))
    run = await ask(bottega, "Greet me.", wait=0)
    await model.received(1)
    async with bottega.owner.acquire() as connection, connection.transaction():
        answer = await connection.fetchval(
            "SELECT send_message(tenant_id, id, '\"In German!\"', NULL, '{}') FROM runs"
            " WHERE id = $1",
            UUID(run["id"]),
        )
        gate.set()
        await until(lambda: bottega.owner.fetchval(ENDING))
    message_id = from_json(answer)["id"]
    log = await finished(bottega, run["id"])
    ended = (await bottega.client.get(f"/v1/runs/{run['id']}")).json()
    assert (ended["status"], ended["output"]) == ("completed", "Hallo.")
    assert [each["cause"] for each in ended["attempts"]] == ["start", "message"]
    (told,) = of_type(log, "message.delivered")
    assert (told["message_id"], told["call"], told["answered"]) == (message_id, 2, True)
    assert len(of_type(log, "llm.completed")) == 2  # the first answer was kept
    assert len(of_type(log, "agent.completed")) == 1
    assert len(model.requests) == 2
    assert said(model.requests[-1])[1:] == [("assistant", "Hello."), ("user", "In German!")]


async def test_a_queued_run_gets_messages_with_its_first_call(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("one")), text("two"))
    first = await ask(bottega, "First.", wait=0)
    await model.received(1)
    second = await ask(bottega, "Second.", wait=0)
    assert second["blocked_by"]["run_id"] == first["id"]
    await sent(bottega, second["id"], "And quickly.")
    await heard(bottega, second["id"], 1)
    gate.set()
    log = await finished(bottega, second["id"])
    assert [each["call"] for each in of_type(log, "message.delivered")] == [1]
    assert of_type(log, "run.completed")
    assert said(model.requests[-1])[-1] == ("user", "Second.\n\nAnd quickly.")


async def test_a_waiting_run_gets_a_message_when_people_have_decided(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, tools=[{"type": "builtin", "name": "ask_user"}])
    model.script(calls(("ask_user", {"question": "Which?"})), text("red it is"))
    run = await ask(bottega, "Paint.")
    assert run["status"] == "waiting"
    await sent(bottega, run["id"], "Use oil.")
    await heard(bottega, run["id"], 1)
    assert (await bottega.client.get(f"/v1/runs/{run['id']}")).json()["status"] == "waiting"
    (interrupt,) = await pending(bottega.client, run["id"])
    assert (await decide(bottega.client, interrupt, answer="red"))[0] == 200
    log = await finished(bottega, run["id"])
    assert [each["call"] for each in of_type(log, "message.delivered")] == [2]
    assert said(model.requests[-1])[-1] == ("user", "Use oil.")


async def test_messages_of_a_failed_run_are_discarded(bottega: Running, model: FakeModel) -> None:
    await define(bottega, tools=[CALCULATOR])
    gate = asyncio.Event()
    model.script(gated(gate, calls(("calculator", {"expression": "1"}))), http_error(400))
    run = await ask(bottega, "Begin.", wait=0)
    await model.received(1)
    await sent(bottega, run["id"], "Go on.")
    await heard(bottega, run["id"], 1)
    gate.set()
    log = await finished(bottega, run["id"])
    assert log[-1]["type"] == "run.failed"
    shown = [(each["content"], each["discarded"]) for each in await messages(bottega)]
    assert shown == [("Begin.", True), ("", True), ("1", True), ("Go on.", True)]
    model.script(text("Hello."))
    await ask(bottega, "Again.")
    assert said(model.requests[-1]) == [("user", "Again.")]
    retried = await bottega.client.post(f"/v1/runs/{run['id']}/retry", json={"from": "last_step"})
    model.script(text("Done."))
    log = await finished(bottega, retried.json()["id"])
    assert log[-1]["type"] == "run.completed"
    assert said(model.requests[-1])[-1] == ("user", "Go on.")


async def test_a_message_that_no_agent_could_get_is_refused(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("x")))
    run = await ask(bottega, "Hi.", wait=0)
    await model.received(1)
    for content, code in (
        ("x" * 100_001, "message_too_large"),
        ("", "invalid"),
        ([{"type": "image", "file": str(uuid4())}], "unknown_file"),
    ):
        status, problem = await send(bottega, run["id"], content)
        assert (status, problem["code"]) == (422, code)
        assert problem["errors"][0]["pointer"].startswith("/content")
    assert (await send(bottega, str(uuid4()), "Hi."))[0] == 404
    count = "UPDATE runs SET messages = $2 WHERE id = $1"
    await bottega.owner.execute(count, UUID(run["id"]), 100)
    status, problem = await send(bottega, run["id"], "Hi.")
    assert (status, problem["code"]) == (409, "too_many_messages")
    await bottega.owner.execute(count, UUID(run["id"]), 0)
    await bottega.client.post(f"/v1/runs/{run['id']}/cancel")
    status, problem = await send(bottega, run["id"], "Hi.")
    assert (status, problem["code"]) == (409, "final")
    await define_graph(bottega.client, "pair", ("one", "two"))
    body = {"mode": "dag", "graph": "pair", "input": "x"}
    model.script(gated(gate, text("x")))
    dag = (await bottega.client.post("/v1/runs", json=body)).json()
    status, problem = await send(bottega, dag["id"], "Hi.")
    assert (status, problem["code"]) == (409, "no_root")
    await bottega.client.post(f"/v1/runs/{dag['id']}/cancel")
    await finished(bottega, dag["id"])


async def test_a_message_may_come_over_the_websocket(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("Hello.")), text("Hallo."))
    run = await ask(bottega, "Greet me.", wait=0)
    await model.received(1)
    url = f"ws://127.0.0.1:{bottega.port}/v1/runs/{run['id']}/ws"
    async with websockets.connect(url, additional_headers=bottega.headers) as socket:

        async def reply(frame: dict[str, Any]) -> Any:
            await socket.send(to_json(frame).decode())
            while True:
                answer = from_json(await socket.recv())
                if answer["type"] in ("error", "message.accepted"):
                    return answer

        refused = await reply({"type": "message", "content": ""})
        assert (refused["code"], refused["detail"][:8]) == ("invalid", "/content")
        accepted = await reply({"type": "message", "content": "In German!"})
    gate.set()
    log = await finished(bottega, run["id"])
    (told,) = of_type(log, "message.delivered")
    assert accepted == {"type": "message.accepted", "message_id": told["message_id"]}
