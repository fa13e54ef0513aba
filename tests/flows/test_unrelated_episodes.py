"""Unrelated episodes are not given to a run."""

import asyncio

import pytest

from tests.fake_model import FakeModel, text
from tests.service import Running
from tests.stores.test_significant_words import ITALIAN
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def test_only_related_episodes_are_given(bottega: Running, model: FakeModel) -> None:
    tasks, unrelated, related = ITALIAN
    client = bottega.client
    model.decide = lambda request: text("done")
    await client.post("/v1/agents", json={"name": "clerk", "system_message": "x"})
    for task in tasks:
        body = {"outcome": "SUCCESS", "user": "ada", "task": {"original_input": task}}
        assert (await client.post("/v1/episodes", json=body)).status_code == 201
    async with asyncio.timeout(30):  # until all of them have vectors
        await until(
            lambda: bottega.owner.fetchval("SELECT count(*) FROM episode_vectors"),
            lambda seen: seen >= len(tasks),
        )
    for question, given in ((unrelated, 0), (related, 1)):
        body = {"agent": "clerk", "input": question, "user": "ada", "memory": "read"}
        run = (await client.post("/v1/runs?wait=30", json=body)).json()
        events = (await client.get(f"/v1/runs/{run['id']}/events")).json()["items"]
        found = [event for event in events if event["type"] == "context.recalled"]
        recalled = [event["data"]["content"] for event in found]
        assert len(recalled) == given, recalled
        assert all(tasks[0] in content for content in recalled)
        for event in found:
            assert event["data"]["why"]["words"] or event["data"]["why"]["cosine"] >= 0.3
            assert event["data"]["why"]["floor"] > 0.3
