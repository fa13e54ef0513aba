"""Requests of ten clients of OpenAI's API, in the shapes that they send.

`client_requests.json` has them by client, in the order in which one conversation sends them. Those
of libraries are what the libraries sent to a server that recorded them; those of programs follow
their documentation. `call_1` and the like are ids of the answer to the client's first request.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from bottega.llm.demo_model.rules import Answer
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_conversations import define
from tests.service import Running

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "client_requests.json").read_text()
)
PATHS = {"chat": "/openai/v1/chat/completions", "responses": "/openai/v1/responses"}


def decides(request: dict[str, Any]) -> Answer:
    """Answer as the recording server did."""
    if request.get("response_format"):
        return text('{"city":"Rome"}')
    names = [each["function"]["name"] for each in request.get("tools") or ()]
    if "locate" in names and request["messages"][-1]["role"] == "user":
        return calls(("locate", {"user": "ada"}), content="Let me look.")
    return text("In Rome.")


def whole(form: str, answer: Any) -> tuple[str, dict[str, str]]:
    """Return the text of an answer, streamed or not, and its ids by their kind."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        body = answer.json()
        if form == "responses":
            return _response(body)
        message = body["choices"][0]["message"]
        called = [call["id"] for call in message.get("tool_calls") or ()]
        return message["content"] or "", {"call": called[0]} if called else {}
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if form == "responses":
        return _response(events[-1]["response"])
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    called = [call["id"] for delta in deltas for call in delta.get("tool_calls") or ()]
    said = "".join(delta.get("content") or "" for delta in deltas)
    return said, {"call": called[0]} if called else {}


def _response(body: dict[str, Any]) -> tuple[str, dict[str, str]]:
    assert body["status"] == "completed", body
    ids, said = {"resp": body["id"]}, ""
    for item in body["output"]:
        if item["type"] == "message":
            ids["msg"] = item["id"]
            said += "".join(part["text"] for part in item["content"])
        else:
            ids |= {"fc": item["id"], "call": item["call_id"]}
    return said, ids


@pytest.mark.parametrize("name", RECORDED)
async def test_the_requests_of_a_client_pass(
    guest: Running, guest_model: FakeModel, name: str
) -> None:
    await define(guest)
    guest_model.decide = decides
    ids: dict[str, str] = {}
    for number, request in enumerate(RECORDED[name], 1):
        sent = json.dumps(request["body"])
        for recorded, ours in ids.items():
            sent = sent.replace(f'"{recorded}"', f'"{ours}"')
        form = request["form"]
        answer = await guest.client.post(
            PATHS[form], content=sent, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200, (number, answer.text)
        said, own = whole(form, answer)
        assert said in ("In Rome.", "Let me look.", '{"city":"Rome"}'), (number, answer.text)
        assert ("call" in own) == (said == "Let me look."), (number, answer.text)
        ids |= {f"{kind}_{number}": id_ for kind, id_ in own.items()}
        if "Be brief." in sent:
            assert json.dumps(guest_model.requests[-1]["messages"]).count("Be brief.") == 1


def test_there_are_ten() -> None:
    assert len(RECORDED) == 10
