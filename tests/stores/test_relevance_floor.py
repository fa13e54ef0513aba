"""Only episodes that are better than chance are relevant."""

from datetime import timedelta
from math import isfinite

import asyncpg
import numpy as np

from bottega.clock import monotonic, utcnow
from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.store import EpisodicMemory, Found
from bottega.memory.text.embeddings import Embedder, Vectors
from tests.memories import make_episode
from tests.waiting import until

TASKS = (
    "Book a flight to Oslo.", "Order tyres for the van.", "Repair the lift.",
    "Translate the manual.", "Paint the fence.", "Count the chairs.", "Hire a cook.",
    "Print the menu.", "Sell the old desk.", "Water the roses.", "Clean the pool.",
    "Test the alarm.", "Move the archive.", "Close the account.", "Feed the horses.",
    "Tune the piano.", "Sign the lease.", "Bake the bread.", "Scan the pass.", "Ship the oil.",
)  # fmt: skip


class Narrow:
    """Embedder whose vectors are all near to each other, as those of many models are."""

    name = "narrow"
    dimension = 768

    async def embed(self, texts: list[str]) -> Vectors:
        vectors = 0.4 * await BuiltinEmbedder().embed(texts)
        vectors[:, 0] += 1.0
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def over(database: Database, embedder: Embedder) -> tuple[EpisodicMemory, EmbeddingWorker]:
    embedders = Embedders(database.pool, lambda: embedder, lambda name: None, clock=monotonic)
    memory = EpisodicMemory(database.pool, embedders=embedders, clock=utcnow)
    return memory, EmbeddingWorker(database.pool, embedders)


async def embed_all(worker: EmbeddingWorker) -> None:
    await until(worker.work.do_due, lambda left_s: not isfinite(left_s))


async def ask(memory: EpisodicMemory, query: str) -> Found:
    return await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, query, k=20)


async def test_the_floor_is_measured_on_the_tenants_own_texts(database: Database) -> None:
    memory, worker = over(database, Narrow())  # type: ignore[arg-type]
    began = utcnow() - timedelta(hours=1)

    async def store(number: int) -> None:  # evenly, since the sample is taken by time
        at = began + timedelta(minutes=number)
        await memory.store(DEFAULT_TENANT, make_episode(TASKS[number], at, answer=""))

    for number in range(19):
        await store(number)
    await embed_all(worker)
    before = await ask(memory, "Who wrote the Iliad?")
    assert {hit.why["floor"] for hit in before.hits} == {0.9}, "nothing is known of this model"

    await store(19)
    await embed_all(worker)

    after = await ask(memory, "Who wrote the Iliad?")
    assert after.by_meaning
    assert not [hit for hit in after.hits if hit.relevant]
    (tyres,) = [hit for hit in (await ask(memory, "Order tyres for a van")).hits if hit.relevant]
    assert tyres.why["words"] == ["tyres", "van"]
    assert tyres.parts.cosine is not None
    assert tyres.floor is not None
    assert tyres.parts.cosine > tyres.floor


async def test_words_and_background_are_measured_each_night(
    database: Database, owner: asyncpg.Pool
) -> None:
    memory, worker = over(database, BuiltinEmbedder())
    await worker.measure(DEFAULT_TENANT)
    for task in TASKS:
        await memory.store(DEFAULT_TENANT, make_episode(task, utcnow()))
    await embed_all(worker)
    await owner.execute("UPDATE tenant_memory SET sampled_rows = 0, background = '{9,9}'")
    await worker.measure(DEFAULT_TENANT)
    row = await owner.fetchrow(
        "SELECT background, background_rows, sampled_rows FROM tenant_memory"
    )
    assert row["background"][0] < 0.2
    assert (row["background_rows"], row["sampled_rows"]) == (20, 20)
    await owner.execute("DELETE FROM episode_vectors")
    await worker.measure(DEFAULT_TENANT)
    assert await owner.fetchval("SELECT background_rows FROM tenant_memory") == 20


async def test_vectors_alone_are_compared_where_words_count_nothing(database: Database) -> None:
    memory, worker = over(database, BuiltinEmbedder())
    await memory.store(DEFAULT_TENANT, make_episode("Paint the garden fence green", utcnow()))
    query = "Paint the garden fence green"

    async def vectors_alone(query: str) -> Found:
        return await memory.semantic_search(DEFAULT_TENANT, EVERYTHING, query, words=False)

    assert not (await vectors_alone(query)).hits, "it is not embedded yet"
    assert (await ask(memory, query)).hits[0].relevance["words"]
    await embed_all(worker)
    found = await vectors_alone(query)
    (same,) = found.hits
    assert (same.relevance, same.relevant) == ({"words": [], "cosine": 1.0}, True)
    (other,) = (await vectors_alone("zz qq jj")).hits
    assert (other.relevance["words"], other.relevant) == ([], False)
    assert other.relevance["cosine"] < 0.5
