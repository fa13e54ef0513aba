"""An embedder that hangs costs a run or a search only the hits of its vector."""

import asyncio
import time

from bottega.settings import Settings
from tests.fake_model import FakeModel, gated, http_error, text
from tests.service import running


async def test_search_by_words_works_while_the_embedder_hangs(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    update = {"openai_base_url": model.base_url, "embedding_model": "vectors-1"}
    never = asyncio.Event()
    model.script_vectors(*(gated(never, http_error(503)) for _ in range(1000)))
    model.decide = lambda request: text("done")
    async with running(settings.model_copy(update=update), database_url, worker=True) as bottega:
        client = bottega.client
        await client.post("/v1/agents", json={"name": "clerk", "system_message": "x"})
        asked = "Repair the espresso grinder in the canteen."
        body = {"agent": "clerk", "input": asked, "user": "ada"}
        await client.post("/v1/runs?wait=30", json=body)
        await model.asked_for_vectors()
        run = (await client.post("/v1/runs?wait=30", json=body)).json()
        events = (await client.get(f"/v1/runs/{run['id']}/events?limit=100")).json()["items"]
        assert "memory_unavailable" not in str(events)
        assert "context.recalled" in [event["type"] for event in events]
        # Three queries at most wait for the vector; then none does.
        for _ in range(3):
            found = await client.post(
                "/v1/episodes/search", json={"query": "espresso grinder", "user": "ada"}
            )
            assert found.json()["by_meaning"] is False
            assert len(found.json()["items"]) == 2
        began = time.monotonic()
        embedded = len(model.embedded)
        for _ in range(10):
            found = await client.post(
                "/v1/memory/context", json={"task": "espresso grinder", "user": "ada"}
            )
            assert found.json()["by_meaning"] is False
            assert len(found.json()["episodes"]) == 2
        took = time.monotonic() - began
        assert len(model.embedded) - embedded <= 1 + took // 10, "a probe at most every 10 s"
        never.set()
