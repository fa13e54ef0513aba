"""Limits of the wait for a query's vector."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from bottega.errors import ModelError, UnavailableError
from bottega.memory.episodes.embedders import Patience
from bottega.memory.text.embeddings import Vectors


class Server:
    """Embedder that hangs, fails or answers, as the test sets it."""

    name = "server"
    dimension = 2

    def __init__(self) -> None:
        self.does = "answer"
        self.asked = 0

    async def embed(self, texts: Sequence[str]) -> Vectors:
        self.asked += 1
        if self.does == "hang":
            await asyncio.Event().wait()
        if self.does == "fail":
            raise ModelError("no", code="model_unavailable")
        return np.ones((len(texts), 2), np.float32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def ends(patience: Patience) -> str:
    """Return how a query ends."""
    try:
        assert (await patience.embed(patience.embedder, "x", 0.001)).shape == (1, 2)
    except (TimeoutError, UnavailableError, ModelError) as error:
        return type(error).__name__
    return "answered"


@pytest.mark.anyio
async def test_after_three_timeouts_in_a_row_one_query_per_ten_seconds_is_sent() -> None:
    clock, server = Clock(), Server()
    patience = Patience(server, clock)
    server.does = "hang"
    assert [await ends(patience) for _ in range(3)] == ["TimeoutError"] * 3
    assert [await ends(patience) for _ in range(5)] == ["UnavailableError"] * 5
    assert server.asked == 3
    clock.now = 9.9
    assert await ends(patience) == "UnavailableError"
    clock.now = 10.1
    probes = await asyncio.gather(*(ends(patience) for _ in range(5)))
    assert sorted(probes) == ["TimeoutError"] + ["UnavailableError"] * 4
    clock.now = 21.0
    server.does = "answer"
    assert [await ends(patience) for _ in range(3)] == ["answered"] * 3


@pytest.mark.anyio
async def test_answer_or_error_ends_the_row_of_timeouts() -> None:
    server = Server()
    patience = Patience(server, Clock())
    for between in ("answer", "fail"):
        for _ in range(2):
            server.does = "hang"
            assert await ends(patience) == "TimeoutError"
            assert await ends(patience) == "TimeoutError"
            server.does = between
            assert await ends(patience) != "UnavailableError"


@pytest.mark.anyio
async def test_hanging_embedder_does_not_slow_another() -> None:
    hangs, answers = Server(), Server()
    hangs.does = "hang"
    slow, fast = Patience(hangs, Clock()), Patience(answers, Clock())
    for _ in range(4):
        await ends(slow)
    assert await ends(slow) == "UnavailableError"
    assert await ends(fast) == "answered"
