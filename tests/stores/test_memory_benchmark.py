"""The memory benchmark, run on very few episodes."""

import pytest

from benchmarks.memory import quality, scale, working
from benchmarks.memory.corpus import corpus
from bottega.db.engine import Database


async def test_quality(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    made = corpus(1, 120, 1)
    found = await quality.tables(database.pool, made, quality.embedders(made)[-1:])
    quality.show(found)
    [rows] = found.values()
    by_name = {row.name: row.mean("ndcg10") for row in rows}
    assert by_name["hybrid"] > by_name["lexical"] > 0.2
    assert by_name["hybrid"] == by_name["hybrid added"]
    assert "meanin" in capsys.readouterr().out


async def test_scale(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    await scale.measure(database, 200, queries=2, rounds=2)
    out = capsys.readouterr().out
    assert out.count("recall@10 1.000") == 4
    assert out.count("recall 1.000") == 3
    assert "store, one per transaction" in out


def test_working_memory(capsys: pytest.CaptureFixture[str]) -> None:
    working.main(20, calls=4)
    out = capsys.readouterr().out
    assert "the first result can be recalled: True" in out
