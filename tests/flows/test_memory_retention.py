"""Background work of workers for episodes, seen from outside."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from bottega.settings import Settings
from tests import waiting
from tests.fake_model import FakeModel
from tests.service import Running, running
from tests.team import define, start


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Settings:
    changes = {"openai_base_url": model.base_url, "embedding_model": "vectors-1"}
    return settings.model_copy(update=changes)


async def create_episode(server: Running, text: str, **more: Any) -> str:
    body = {"outcome": "SUCCESS", "task": {"original_input": text}} | more
    answer = await server.client.post("/v1/episodes", json=body)
    assert answer.status_code == 201, answer.text
    episode_id: str = answer.json()["id"]
    return episode_id


async def hits(server: Running, query: str) -> list[dict[str, Any]]:
    answer = await server.client.post("/v1/episodes/search", json={"query": query, "explain": True})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def found_by_vector(server: Running, query: str, count: int) -> set[str]:
    """Search until ``count`` episodes are found: on a busy machine the embedder may be too slow."""
    found = await waiting.until(lambda: hits(server, query), lambda found: len(found) == count)
    return {hit["episode"]["id"] for hit in found}


async def until(server: Running, query: str, *arguments: Any) -> None:
    """Wait until a query of the database answers true."""
    await waiting.until(lambda: server.owner.fetchval(query, *arguments))


async def test_search_by_vectors_returns_with_the_embedder(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    model.embeds = False
    async with running(configured, database_url, worker=True) as server:
        episode_id = await create_episode(server, "Reset the router of the branch office")
        await model.asked_for_vectors()

        (found,) = await hits(server, "router")
        assert found["episode"]["id"] == episode_id
        assert found["parts"]["cosine"] is None
        assert await hits(server, "rerouted") == []  # only the vectors are similar

        model.embeds = True
        await until(server, "SELECT count(*) = 1 FROM episode_vectors")
        # On a busy machine, the embedder may be too slow for a search.
        (found,) = await waiting.until(lambda: hits(server, "rerouted"))
        assert found["episode"]["id"] == episode_id
        assert found["parts"]["cosine"] > 0


async def test_the_episode_of_a_run_is_embedded_as_soon_as_it_is_over(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    async with running(configured, database_url, worker=True) as server:
        await define(server.client)
        run_id = await start(server.client)
        await server.frames(f"/v1/runs/{run_id}/ws")
        await until(server, "SELECT count(*) = 1 FROM episode_vectors")
        embedder = await server.owner.fetchval("SELECT embedder FROM tenant_memory")

    assert embedder == "openai:vectors-1:768"
    assert model.embedded


@pytest.mark.deep
async def test_queries_switch_to_another_embedder_without_a_stop(
    settings: Settings, configured: Settings, database_url: str, model: FakeModel
) -> None:
    before = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(before, database_url, worker=True) as server:
        ids = {await create_episode(server, f"Reset router number {number}") for number in range(3)}
        await until(server, "SELECT count(*) = 3 FROM episode_vectors WHERE embedder = 'builtin-1'")

    async with running(configured, database_url, worker=True) as server:
        assert await found_by_vector(server, "routing", 3) == ids
        await until(server, "SELECT embedder = 'openai:vectors-1:768' FROM tenant_memory")
        assert await found_by_vector(server, "routing", 3) == ids
        await until(server, "SELECT count(*) = 0 FROM episode_vectors WHERE embedder = 'builtin-1'")


async def test_long_bodies_move_to_the_object_store_and_are_read_from_there(
    configured: Settings, database_url: str, tmp_path: Path
) -> None:
    trace = [{"tool": "ping", "said": f"{number} ok " * 20} for number in range(200)]
    async with running(configured, database_url, worker=True) as server:
        episode_id = await create_episode(server, "Ping them all", execution={"trace": trace})
        await until(
            server,
            "SELECT object_key IS NOT NULL AND content IS NULL FROM episode_bodies"
            " WHERE episode_id = $1 AND part = 'trace'",
            UUID(episode_id),
        )
        assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
        read = (await server.client.get(f"/v1/episodes/{episode_id}")).json()
        assert read["execution"]["trace"] == trace
