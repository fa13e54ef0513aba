"""Background embedding: sharing of work, outages and changes of the embedder."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
import pytest

from bottega.clock import utcnow
from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import ModelError
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.llm.openai_embedder import OpenAIEmbedder
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.text.embeddings import Embedder, packed_vectors
from tests.accounts import Purse
from tests.claims import leased
from tests.fake_model import FakeModel, Reply, http_error, http_reply, vectors_body
from tests.waiting import until

OTHER = UUID(int=77)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


async def store(
    database: Database, numbers: range | list[int], tenant: UUID = DEFAULT_TENANT
) -> None:
    async with acting_as(database.pool, tenant) as connection:
        for number in numbers:
            row = {
                "id": str(UUID(int=number)),
                "outcome": "SUCCESS",
                "summary": {"task": f"task {number}", "result": f"result {number}"},
            }
            await connection.execute("SELECT store_episode($1, $2::jsonb)", tenant, json.dumps(row))


def keeper(
    database: Database, clock: Clock, current: Embedder | None = None, *others: Embedder
) -> EmbeddingWorker:
    found = current or BuiltinEmbedder()
    embedders = Embedders(
        database.pool,
        lambda: found,
        lambda name: next((each for each in others if each.name == name), None),
        clock=clock,
    )
    return EmbeddingWorker(database.pool, embedders, clock=clock)


@asynccontextmanager
async def hosted(model: FakeModel, name: str = "vectors-1") -> AsyncIterator[OpenAIEmbedder]:
    embedder = OpenAIEmbedder(
        name, Purse(), api_key="test-key", base_url=model.base_url, max_tries=1, cached=0
    )
    try:
        yield embedder
    finally:
        await embedder.aclose()


async def embedded(owner: asyncpg.Pool, embedder: str, tenant: UUID = DEFAULT_TENANT) -> list[int]:
    """Return the episodes that have vectors of an embedder."""
    rows = await owner.fetch(
        "SELECT episode_id FROM episode_vectors WHERE tenant_id = $1 AND embedder = $2 ORDER BY 1",
        *(tenant, embedder),
    )
    return [row[0].int for row in rows]


async def waiting(owner: asyncpg.Pool) -> list[int]:
    rows = await owner.fetch("SELECT episode_id FROM episode_work WHERE work='embed' ORDER BY 1")
    return [row[0].int for row in rows]


async def of_queries(owner: asyncpg.Pool) -> str | None:
    name: str | None = await owner.fetchval("SELECT embedder FROM tenant_memory")
    return name


async def leases_end(owner: asyncpg.Pool) -> None:
    await owner.execute("UPDATE episode_work SET next_at = now()")


async def all_done(keeper: EmbeddingWorker, owner: asyncpg.Pool) -> None:
    while await waiting(owner):
        await keeper.work.do_due()


async def test_a_stored_episode_gets_vectors_of_its_three_texts(
    database: Database, owner: asyncpg.Pool, clock: Clock
) -> None:
    await store(database, [1, 2])

    assert await keeper(database, clock).work.do_due() < 1
    assert await embedded(owner, "builtin-1") == [1, 2]
    assert await waiting(owner) == []
    assert await of_queries(owner) == "builtin-1"
    row = await owner.fetchrow(
        "SELECT task::real[], unpacked_vector(result)::real[], unpacked_vector(whole)::real[],"
        " outcome FROM episode_vectors WHERE episode_id = $1",
        UUID(int=1),
    )
    assert row is not None
    expected = await BuiltinEmbedder().embed(["task 1", "result 1", "task 1\nresult 1"])
    assert np.allclose(np.array(row[:3]), expected, atol=3e-3)
    assert row["outcome"] == "SUCCESS"
    assert await keeper(database, clock).work.do_due() == float("inf")


async def test_vectors_are_packed_in_python_as_in_the_database(owner: asyncpg.Pool) -> None:
    random = np.random.default_rng(1).normal(size=(20, 50)).astype(np.float32)
    vectors = np.concatenate([random, np.zeros((1, 50), np.float32), np.eye(50)[:2]])
    vectors = vectors.astype(np.float16).astype(np.float32)  # as the database stores them
    query = "SELECT packed_vector($1::real[]::halfvec)"
    assert packed_vectors(vectors) == [await owner.fetchval(query, row.tolist()) for row in vectors]
    for row, packed in zip(random, packed_vectors(random), strict=True):
        unpacked = await owner.fetchval("SELECT unpacked_vector($1)::real[]", packed)
        assert np.dot(unpacked, row) / np.linalg.norm(row) > 0.9995


async def test_a_dead_worker_s_episodes_are_taken_again_after_its_lease(
    database: Database, owner: asyncpg.Pool, clock: Clock
) -> None:
    await store(database, [1])
    assert len(await leased(database.pool, "embed", lease_s=120)) == 1

    worker = keeper(database, clock)
    assert 100 < await worker.work.do_due() <= 120
    assert await embedded(owner, "builtin-1") == []
    await leases_end(owner)
    await worker.work.do_due()

    assert await embedded(owner, "builtin-1") == [1]


async def test_an_embedder_that_is_down_loses_nothing(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1, 2])
    model.script_vectors(http_error(503), http_error(503))
    async with hosted(model) as embedder:
        worker = keeper(database, clock, embedder)
        assert await worker.work.do_due() == 1
        await store(database, [3])
        assert await worker.work.do_due() == 1  # notices do not cause calls meanwhile
        assert len(model.embedded) == 1
        clock.now += 1
        await leases_end(owner)
        assert await worker.work.do_due() == 2
        assert await waiting(owner) == [1, 2, 3]
        assert {row[0] for row in await owner.fetch("SELECT tries FROM episode_work")} == {0}
        clock.now += 2
        await leases_end(owner)
        await worker.work.do_due()

    assert await embedded(owner, "openai:vectors-1:768") == [1, 2, 3]


async def test_an_embedder_that_is_down_is_called_once_for_each_tenant_and_pause(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    tenants = [UUID(int=900 + number) for number in range(6)]
    for number, tenant in enumerate(tenants):
        name = f"tenant {number}"
        await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, $2)", tenant, name)
        await store(database, [number], tenant)
    model.script_vectors(*[http_error(503)] * 6)
    async with hosted(model) as embedder:
        worker = keeper(database, clock, embedder)
        assert await worker.work.do_due() == 1
        await leases_end(owner)
        assert await worker.work.do_due() == 1

    assert len(model.embedded) == 6
    assert await waiting(owner) == [*range(6)]
    assert {row[0] for row in await owner.fetch("SELECT tries FROM episode_work")} == {0}


async def test_a_refused_text_delays_no_other_vectors(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1, 2, 3])
    refused = http_error(400, message="this is not allowed")
    model.script_vectors(refused, None, refused, None)
    async with hosted(model) as embedder:
        worker = keeper(database, clock, embedder)
        assert await worker.work.do_due() < 1
        assert len(await embedded(owner, embedder.name)) == 2
        assert len(await waiting(owner)) == 1  # and is tried again later
        assert await worker.work.do_due() > 10
        await leases_end(owner)
        await worker.work.do_due()

    assert await embedded(owner, "openai:vectors-1:768") == [1, 2, 3]


async def test_unsearchable_episodes_get_no_vectors(
    database: Database, owner: asyncpg.Pool, clock: Clock
) -> None:
    await store(database, [1, 2])
    await owner.execute("DELETE FROM episode_search WHERE episode_id = $1", UUID(int=1))

    await keeper(database, clock).work.do_due()

    assert await embedded(owner, "builtin-1") == [2]
    assert await waiting(owner) == []


@pytest.mark.deep
async def test_queries_change_over_when_all_have_the_new_vectors(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, range(1, 301))
    old = BuiltinEmbedder()
    await all_done(keeper(database, clock, old), owner)

    async with hosted(model) as new:
        worker = keeper(database, clock, new, old)
        assert await worker.change_over() == 0.5
        assert len(await waiting(owner)) == 256  # one page
        assert await worker.change_over() == 0.5
        assert len(await waiting(owner)) == 256
        await store(database, [301])
        await worker.work.do_due()
        worker = keeper(database, clock, new, old)  # as after a kill
        while await of_queries(owner) == "builtin-1":
            assert len(await embedded(owner, old.name)) >= 300
            await worker.work.do_due()
            await worker.change_over()
        assert await embedded(owner, new.name) == list(range(1, 302))
        # Until then queries found the new episode as well.
        assert await embedded(owner, old.name) == list(range(1, 302))
        await until(lambda: worker.change_over(), lambda seen: seen != 0.5)

    assert await of_queries(owner) == "openai:vectors-1:768"
    assert await embedded(owner, old.name) == []
    assert not await owner.fetchval("SELECT leftovers FROM tenant_memory")


async def test_a_process_with_a_stale_setting_uses_the_new_vectors_at_once(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1, 2, 3])
    old = BuiltinEmbedder()
    await all_done(keeper(database, clock, old), owner)
    async with hosted(model) as new:
        both = {each.name: each for each in (old, new)}
        embedders = Embedders(database.pool, lambda: new, both.get, clock=clock)
        memory = EpisodicMemory(database.pool, embedders=embedders, clock=utcnow)

        async def nearest() -> list[int]:
            """Return the hits by vector; the query shares no word with them."""
            found = await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, "irrigate", k=3)
            assert found.by_meaning or found.by_spelling
            return sorted(hit.episode.id.int for hit in found.hits if hit.episode.id)

        assert await nearest() == [1, 2, 3]
        worker = keeper(database, clock, new, old)
        while await worker.change_over() == 0.5:
            await worker.work.do_due()
        assert await embedded(owner, old.name) == []
        assert await nearest() == [1, 2, 3]


async def test_episodes_embedded_by_an_old_worker_get_new_vectors(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1])
    old = BuiltinEmbedder()
    await all_done(keeper(database, clock, old), owner)
    async with hosted(model) as new:
        worker = keeper(database, clock, new, old)
        while await worker.change_over() == 0.5:
            await worker.work.do_due()
        await store(database, [2])
        await all_done(keeper(database, clock, old), owner)
        assert await embedded(owner, old.name) == [2]

        while await worker.change_over() == 0.5:
            await worker.work.do_due()
        assert await embedded(owner, new.name) == [1, 2]
        assert await embedded(owner, old.name) == []


async def test_queries_stay_with_the_old_vectors_while_the_new_embedder_is_down(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1])
    await all_done(keeper(database, clock), owner)
    model.script_vectors(http_error(503))
    async with hosted(model) as new:
        worker = keeper(database, clock, new, BuiltinEmbedder())
        with pytest.raises(ModelError):
            await worker.change_over()
        assert await of_queries(owner) == "builtin-1"
        for _ in range(10):
            await worker.change_over()
            await worker.work.do_due()

    assert await of_queries(owner) == "openai:vectors-1:768"


async def test_a_reverted_change_leaves_no_vectors_of_the_other_embedder(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1, 2])
    old = BuiltinEmbedder()
    await all_done(keeper(database, clock, old), owner)
    async with hosted(model) as new:
        worker = keeper(database, clock, new, old)
        await worker.change_over()
        await worker.work.do_due()
        assert await embedded(owner, new.name) == [1, 2]
    worker = keeper(database, clock, old)
    await until(lambda: worker.change_over(), lambda seen: seen != 0.5)

    assert await embedded(owner, "openai:vectors-1:768") == []
    assert await embedded(owner, old.name) == [1, 2]
    assert await of_queries(owner) == old.name


async def test_vectors_that_another_worker_failed_to_delete_are_deleted_later(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1, 2])
    old = BuiltinEmbedder()
    await all_done(keeper(database, clock, old), owner)
    async with hosted(model) as new:
        worker = keeper(database, clock, new, old)
        while await of_queries(owner) == old.name:
            await worker.change_over()
            await worker.work.do_due()
        async with owner.acquire() as killed:
            deletion = killed.transaction()
            await deletion.start()
            await killed.execute("DELETE FROM episode_vectors WHERE embedder = $1", old.name)
            for _ in range(4):
                await worker.change_over()
            await deletion.rollback()
        await until(lambda: worker.change_over(), lambda seen: seen != 0.5)
    assert await embedded(owner, old.name) == []


async def test_without_the_old_embedder_search_is_by_words_until_the_change(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1])
    async with hosted(model, "gone") as gone:
        await all_done(keeper(database, clock, gone), owner)
    current = BuiltinEmbedder()
    embedders = Embedders(database.pool, lambda: current, lambda name: None, clock=clock)

    assert (await embedders.embed_query(DEFAULT_TENANT, "x", 30.0)).compared == "words"
    worker = keeper(database, clock, current)
    for _ in range(3):
        await worker.change_over()
        await worker.work.do_due()
    clock.now += 5
    asked = await embedders.embed_query(DEFAULT_TENANT, "x", 30.0)
    assert (asked.embedder, asked.compared) == (current.name, "spelling")


async def test_vectors_of_another_length_get_an_index_of_their_own(
    database: Database, owner: asyncpg.Pool, clock: Clock, model: FakeModel
) -> None:
    await store(database, [1])
    model.script_vectors(_five)
    async with hosted(model) as embedder:
        await keeper(database, clock, embedder).work.do_due()

    assert await embedded(owner, "openai:vectors-1:5") == [1]
    definition = await owner.fetchval(
        "SELECT indexdef FROM pg_indexes WHERE indexname = 'ix_episode_vectors_task_5'"
    )
    assert "hnsw" in definition
    assert "vector_dims(task) = 5" in definition
    for wrong in (0, 4001):
        with pytest.raises(asyncpg.RaiseError):
            await database.pool.execute("SELECT ensure_vector_index($1)", wrong)


def _five(request: dict[str, Any]) -> Any:
    rows = np.random.default_rng(1).normal(size=(len(request["input"]), 5))
    reply: Reply = http_reply(vectors_body(rows, request), media_type="application/json")
    assert callable(reply)
    return reply(request)
