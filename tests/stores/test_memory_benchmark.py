"""The memory benchmark, run on very few episodes."""

import pytest

from benchmarks import memory
from bottega.db.pool import Database


async def test_searches_find_the_nearest(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await memory.measure(database, memory.read(None), 200, questions=2, rounds=2)
    assert [recall for _, recall in found] == [1.0] * 5
    out = capsys.readouterr().out
    assert "structured: session" in out
    assert "bytes per episode" in out


def test_operations_of_the_working_memory(capsys: pytest.CaptureFixture[str]) -> None:
    memory.working_memory(20)
    assert "compose" in capsys.readouterr().out
