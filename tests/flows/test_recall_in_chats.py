"""Memory in conversations: chats are given nothing at their start, questions what is theirs."""

from typing import Any

import pytest

from benchmarks.relevance.sets import chats, requests
from tests.fake_model import FakeModel, calls, text
from tests.service import Running


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


TOOLS = [{"type": "builtin", "name": "calculator"}]
STORED = [each for each in requests() if each.language == "en"][:6]
ASKED = STORED[0].related


@pytest.fixture
async def remembering(bottega: Running, model: FakeModel) -> Running:
    """A service whose user ann made some requests."""
    model.decide = lambda request: text("done")
    body = {"name": "clerk", "system_message": "x", "tools": TOOLS}
    assert (await bottega.client.post("/v1/agents", json=body)).status_code == 201
    for each in STORED:
        result = {"output": each.answer, "error": None}
        episode = {"task": {"original_input": each.task}, "result": result, "user": "ann"}
        answer = await bottega.client.post("/v1/episodes", json=episode | {"outcome": "SUCCESS"})
        assert answer.status_code == 201, answer.text
    return bottega


async def run(bottega: Running, asked: Any, **more: Any) -> list[dict[str, Any]]:
    """Execute a run of the user; return what it recalled."""
    body = {"agent": "clerk", "input": asked, "user": "ann", "memory": "read", **more}
    done = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert done["status"] == "completed", done
    answer = await bottega.client.get(f"/v1/runs/{done['id']}/events?limit=100")
    return [each["data"] for each in answer.json()["items"] if each["type"] == "context.recalled"]


async def test_chats_are_given_nothing(remembering: Running) -> None:
    for chat in [each for each in chats() if each.language == "en"][::3]:
        assert await run(remembering, chat.text) == [], chat.text


async def test_a_later_request_is_given_its_own_and_why(remembering: Running) -> None:
    (given,) = await run(remembering, ASKED)
    assert STORED[0].task[:60] in given["content"]
    assert given["why"]["words"] == ["refund", "headphones"]
    assert set(given["why"]) == {"words", "cosine", "floor"}


async def test_a_question_without_a_topic_is_given_nothing(remembering: Running) -> None:
    assert await run(remembering, "Refund the headphones") == [], "two content words"
    assert len(await run(remembering, "Refund the wireless headphones")) == 1
    assert len(await run(remembering, "Where is parcel KX-20931?")) == 1, "an identifier is two"


async def test_a_later_turn_of_a_conversation_is_given_nothing(
    remembering: Running, model: FakeModel
) -> None:
    assert len(await run(remembering, ASKED, session_id="s")) == 1
    assert await run(remembering, ASKED, session_id="s") == []
    assert len(await run(remembering, ASKED, session_id="s", conversation="new")) == 1
    said = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi!"}
    question = {"role": "user", "content": ASKED}
    assert await run(remembering, [*said, question]) == []
    assert await run(remembering, [said[1], question]) == []
    assert len(await run(remembering, [said[0], question])) == 1


async def test_later_turns_may_search(remembering: Running, model: FakeModel) -> None:
    await run(remembering, "Hello!", session_id="s")
    model.script(calls(("search_memory", {"query": "refund for headphones"})), text("done"))
    before = len(model.requests)
    assert await run(remembering, "And mine?", session_id="s") == []
    assert STORED[0].task[:60] in str(model.requests[before + 1]["messages"][-1])
