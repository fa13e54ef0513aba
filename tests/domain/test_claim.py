"""The decoded claim of a run."""

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from pydantic_core import to_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.definitions.pinned import Pin
from bottega.engine.claim import ClaimedRun
from tests.claims import claim_of

RUN, TASK = UUID(int=7), UUID(int=8)
PINNED: list[Any] = [("agent", "writer", 4), ("graph", "team", 2)]
STARTED = datetime(2026, 11, 22, 12, 0, 0, 500, tzinfo=UTC)


def test_a_claim_is_decoded_from_the_databases_json() -> None:
    run = claim_of(
        RUN,
        attempt=3,
        started_at=STARTED,
        remaining_s=12.5,
        cancelled_tasks=frozenset([TASK]),
        session_base=[{"agent": "writer", "version": 1}],
    )
    pinned: dict[str, Any] = {"agents": {"writer": 4}, "graph": {"name": "team", "version": 2}}
    values = {**asdict(run), **run.demands, "pinned": pinned, "batch": None}
    values["new_in_a_later_version"] = 1
    found = ClaimedRun.decoded(DEFAULT_TENANT, RUN, 3, to_json(values).decode())
    writer, team = [Pin(DEFAULT_TENANT, *one) for one in PINNED]
    assert found == replace(run, pins=(writer, team), agents={}, graph_pins=pinned["graph"])
    whole = found.with_definitions(
        {writer: {"a": 1}, team: {"nodes": []}, team._replace(version=3): {}}
    )
    assert (whole.agents, whole.graph) == ({"writer": {"a": 1}}, {"nodes": []})


def test_a_claim_without_a_known_value_is_refused() -> None:
    run = claim_of(RUN)
    values = {**asdict(run), **run.demands, "pinned": {}, "batch": None}
    del values["mode"]
    with pytest.raises(KeyError, match="mode"):
        ClaimedRun.decoded(DEFAULT_TENANT, RUN, 1, to_json(values).decode())


@pytest.mark.parametrize(("remaining_s", "elapsed_s"), [(600, 0.0), (590.5, 9.5), (-3, 603.0)])
def test_the_time_of_the_claim_follows_from_the_rest_of_the_timeout(
    remaining_s: float, elapsed_s: float
) -> None:
    run = claim_of(RUN, started_at=STARTED, remaining_s=remaining_s)
    assert run.elapsed_s == elapsed_s
    assert run.claimed_at == STARTED + timedelta(seconds=elapsed_s)


def test_a_dag_is_named_by_its_graph() -> None:
    assert claim_of(RUN).first == "writer"
    assert claim_of(RUN, mode="dag", agent=None, graph_name="software").first == "software"


@pytest.mark.parametrize(("mode", "uses"), [("async", True), ("sync", False)])
def test_a_run_uses_subagents_if_any_of_its_agents_does(mode: str, uses: bool) -> None:
    agents = {"writer": {"subagents": None}, "editor": {"subagents": {"mode": mode}}}
    assert claim_of(RUN, agents=agents).uses_subagents is uses
