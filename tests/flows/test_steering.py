"""``if_busy: steer``: a request becomes a message of the run under way."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, gated, text
from tests.flows.test_conversations import ask, define, messages, said
from tests.flows.test_sent_messages import finished, of_type
from tests.service import Running

ROUNDS = 5


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def test_a_steering_request_goes_to_the_run_under_way(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("Hello.")), text("Hallo."), text("apart"))
    first = await ask(bottega, "Greet me.", if_busy="steer", wait=0)
    assert first["message_id"] is None
    await model.received(1)
    body = {"agent": "clerk", "session_id": "s", "if_busy": "steer", "input": "In German!"}
    headers = {"Idempotency-Key": "once"}
    answer = await bottega.client.post("/v1/runs", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/runs/{first['id']}"
    steered = answer.json()
    assert (steered["id"], steered["input"]) == (first["id"], "Greet me.")
    again = await bottega.client.post("/v1/runs", json=body, headers=headers)
    assert again.json()["message_id"] == steered["message_id"]
    said_by = [{"role": "user", "content": [{"type": "text", "text": "Loud!"}]}]
    second = await ask(bottega, said_by, if_busy="steer", wait=0)
    refused = await bottega.client.post("/v1/runs", json={**body, "user": "eve"})
    assert (refused.status_code, refused.json()["code"]) == (409, "session_user")
    apart = await ask(bottega, "Apart.", conversation="new", if_busy="steer")
    assert (apart["output"], apart["message_id"]) == ("Hallo.", None)
    gate.set()
    log = await finished(bottega, first["id"])
    assert log[-1]["type"] == "run.completed"
    delivered = of_type(log, "message.delivered")
    assert [each["message_id"] for each in delivered] == [
        steered["message_id"],
        second["message_id"],
    ]
    told = [each["content"] for each in await messages(bottega) if each["role"] == "user"]
    assert told == ["Greet me.", "In German!", "Loud!", "Apart."]


@pytest.mark.parametrize(
    "body",
    [
        {"agent": "a", "input": [{"role": r, "content": "x"} for r in ("user", "user")]},
        {"agent": "a", "input": [{"role": r, "content": "x"} for r in ("system", "user")]},
        {"mode": "dag", "graph": "g", "input": "x"},
    ],
)
async def test_what_is_no_message_cannot_steer(bottega: Running, body: dict[str, Any]) -> None:
    body = {**body, "session_id": "s", "if_busy": "steer"}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert answer.status_code == 422, answer.text
    assert "steer" in answer.json()["errors"][0]["detail"]


async def test_a_request_at_the_end_of_a_run_steers_it_or_starts_one(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.decide = lambda request: text(f"{len(said(request))}")
    for number in range(ROUNDS):
        gate = asyncio.Event()
        model.script(gated(gate, text("first")))
        before = len(model.requests)
        first = await ask(bottega, "One.", session=f"s{number}", wait=0)
        await model.received(before + 1)
        gate.set()
        steered = await ask(
            bottega, f"two-{number}", session=f"s{number}", if_busy="steer", wait=30
        )
        log = await finished(bottega, first["id"])
        delivered = [each["content"] for each in of_type(log, "message.delivered")]
        if steered["id"] == first["id"]:
            assert delivered == [f"two-{number}"]
        else:
            assert (delivered, steered["status"]) == ([], "completed")
        listed = await messages(bottega, session=f"s{number}")
        assert [m["content"] for m in listed if m["role"] == "user"] == ["One.", f"two-{number}"]
