"""Metrics of tasks."""

from bottega.subagents.telemetry import Totals


def test_totals_add_up_by_name_and_attributes() -> None:
    totals = Totals()
    totals.count("subagent.dispatch.count")
    totals.count("subagent.dispatch.count", 2)
    totals.count("subagent.dispatch.rejected", reason="subagent_queue_full")
    totals.gauge("subagent.pool.size", 3)
    totals.gauge("subagent.pool.size", 5)
    assert totals.snapshot() == {
        "subagent.dispatch.count": 3,
        "subagent.dispatch.rejected{reason=subagent_queue_full}": 1,
        "subagent.pool.size": 5,
    }


def test_histogram_bucket_counts_values_up_to_its_bound() -> None:
    totals = Totals()
    for value in (100, 101, 400_000):
        totals.observe("d", value)
    assert totals.snapshot() == {
        "d.count": 3,
        "d.sum": 400_201,
        "d.le_100": 1,
        "d.le_1000": 2,
        "d.le_10000": 2,
        "d.le_60000": 2,
        "d.le_300000": 2,
    }
