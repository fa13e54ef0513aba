"""Reflection: lessons from one finished run."""

from typing import Any
from uuid import UUID

import pytest

from bottega.memory.episodes.episode import Episode, Outcome, State, StorageState
from bottega.memory.learning.reflection import (
    LONGEST,
    MOST,
    applications_of,
    asked_of,
    reflect,
    with_insights,
)
from bottega.memory.patterns.pattern import Arm
from bottega.memory.patterns.task_analysis import analyse, refined
from tests.domain.test_mining import NO_ANSWER, stored

GIVEN = {
    "id": str(UUID(int=7)),
    "version": 2,
    "arm": "used",
    "category": "sequence",
    "baseline": {"name": "controls", "rate": 0.4, "n": 3},
    "followed": True,
    "good": False,
}


def episode(*given: dict[str, Any], **changes: Any) -> Episode:
    trace = [
        {"tool": "fetch", "error": "no answer in 3 s", "signature": NO_ANSWER},
        {"tool": "slow", "result": "ok"},
        *[{"tool": "look", "result": "ok"}] * 4,
    ]
    metadata = {"agents": [], "patterns": list(given), "features": {"domain": "d"}}
    known = {
        "metadata": metadata,
        "execution": {"duration_s": 2.0, "resources": {"usage": {"input": 7, "output": 3}}},
        "result": {"output": "all", "error": None},
    }
    return stored(trace, **{**known, **changes})


def test_rules_report_failures_remedies_and_costs() -> None:
    found = reflect(episode())
    assert found == {
        "failures": [{"tool": "fetch", "signature": NO_ANSWER, "then": "slow", "recovered": True}],
        "insights": [f"After fetch failed ({NO_ANSWER}), slow went well."],
        "patterns": [{"uses": ["slow", "look", "look", "look", "look"]}],
        "performance": {
            "usage": {"input": 7, "output": 3},
            "duration_s": 2.0,
            "failed_calls": 1,
        },
        "by": "rules",
    }


def test_insights_of_a_model_are_bounded() -> None:
    known = reflect(episode())
    said = with_insights(known, ["  a\nb ", "a b", "", "x" * 9999, *map(str, range(99))], "gpt")
    assert said["insights"][0] == "a b"
    assert len(said["insights"]) == MOST
    assert all(0 < len(each.encode()) <= LONGEST for each in said["insights"])
    assert said == {**known, "by": "gpt", "insights": said["insights"]}
    assert asked_of(episode(), known)["calls"][0] == {
        "name": "fetch",
        "ok": False,
        "error": NO_ANSWER,
    }


def test_results_of_given_patterns_are_reported() -> None:
    of_run = GIVEN | {"category": "strategic", "good": None, "arm": "control"}
    one, other = applications_of(episode(GIVEN, of_run))
    assert (one.pattern_id, one.version, one.arm) == (UUID(int=7), 2, Arm.USED)
    assert (one.followed, one.good, one.tokens, one.duration_s) == (True, False, 10, 2.0)
    assert (one.episode_id, one.at, one.features) == (
        UUID(int=1),
        episode().at,
        {"domain": "d"},
    )
    assert (other.arm, other.good) == (Arm.CONTROL, True)
    judged = episode(GIVEN, of_run, state=State(label=Outcome.FAILURE, label_source="check"))
    assert [each.good for each in applications_of(judged)] == [False, False]
    unjudged = episode(GIVEN, of_run, outcome=Outcome.UNKNOWN)
    assert [each.good for each in applications_of(unjudged)] == [False, None]


@pytest.mark.parametrize(
    "changes",
    [
        {"trust": 1},
        {"outcome": Outcome.CANCELLED},
        {"state": State(state=StorageState.QUARANTINED)},
        {"metadata": {}},
    ],
)
def test_some_episodes_report_nothing_on_patterns(changes: dict[str, Any]) -> None:
    assert applications_of(episode(GIVEN, **changes)) == []


def test_model_analysis_of_a_task_overrides_the_rules() -> None:
    found = analyse("Add 1 and 2. You must not round.", domain="maths")
    said = {"goals": ["add", " add ", "", "x" * 999], "criteria": ["sum"], "complexity": 0.9}
    better = refined(found, said)
    assert better.goals == ("add",), "a text that is too long is left out, not cut"
    assert better.constraints == found.constraints
    assert better.criteria == ("sum",)
    assert better.complexity == better.features["complexity"] == 0.9
    assert better.features["domain"] == "maths"
    assert refined(found, {}) == found
