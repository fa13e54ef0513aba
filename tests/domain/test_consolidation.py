"""Consolidation: one episode from several similar ones."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from bottega.memory.episodes.episode import Episode, Outcome, Summary
from bottega.memory.episodes.maintenance import as_one

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab/~", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~", max_size=2), inner),
    max_leaves=6,
)


def episode(number: int, **more: Any) -> Episode:
    given: dict[str, Any] = {
        "task": {"original_input": "Do it", "complexity": 0.5},
        "summary": Summary(task="Do it", result="done"),
        "execution": {"plan": ["a"], "duration_s": number, "resources": {"tokens": 10 * number}},
        "result": {"output": "done"},
        "metadata": {"tools_used": ["fetch", "search"], "agents": ["clerk"]},
        "origin": {"principal": "ann"},
        "session_id": "s",
    }
    return Episode(
        id=UUID(int=number),
        at=NOW + timedelta(hours=number),
        outcome=Outcome.SUCCESS,
        **(given | more),
    )


def one_of(*members: Episode, outcome: Outcome = Outcome.SUCCESS) -> tuple[Episode, dict[str, Any]]:
    one = as_one(members, members[0], outcome)
    return one, one.metadata["consolidated"]


def test_merged_episode_has_the_common_part_and_each_variation() -> None:
    other = {"tools_used": ["search"], "agents": ["clerk"]}
    one, said = one_of(
        episode(1),
        episode(2, metadata=other, tags=("x",)),
        episode(3, result={"output": "ready"}, tags=("y", "x")),
    )
    assert (one.kind, one.instances, one.at) == ("consolidated", 3, NOW + timedelta(hours=3))
    assert one.execution["duration_s"] == said["statistics"]["mean_duration_s"] == 2
    assert one.execution["resources"] == {"tokens": 20}
    assert one.metadata["tools_used"] == ["search"]
    assert one.tags == ("x", "y")
    assert said["representative_id"] == str(UUID(int=1))
    assert said["instances"] == 3
    assert said["statistics"]["success_rate"] == 1
    assert said["statistics"]["common_patterns"]["agents"] == ["clerk"]
    assert said["structure"] == {
        "/task/original_input": "Do it",
        "/task/complexity": 0.5,
        "/execution/plan": ["a"],
        "/metadata/agents": ["clerk"],
        "/session_id": "s",
        "/run_id": None,
    }
    assert [each["episode_id"] for each in said["variations"]] == [
        str(UUID(int=number)) for number in (1, 2, 3)
    ]
    assert said["variations"][2]["diff"] == {
        "/execution/duration_s": 3,
        "/execution/resources/tokens": 30,
        "/result/output": "ready",
        "/metadata/tools_used": ["fetch", "search"],
    }


def test_failed_episodes_merge_into_no_success() -> None:
    one, said = one_of(episode(1), episode(2), outcome=Outcome.FAILURE)
    assert one.outcome is Outcome.FAILURE
    assert said["statistics"]["success_rate"] == 0


def test_fields_that_differ_are_left_out() -> None:
    one, said = one_of(
        episode(1),
        episode(2, origin={"principal": "bob"}, execution={}, metadata={}),
    )
    assert one.origin["principal"] is None
    assert one.execution["duration_s"] == 1
    assert one.execution["resources"] == {}
    assert not any(path.startswith("/metadata") for path in said["structure"])
    same, _ = one_of(episode(1), episode(2))
    assert same.session_id == "s"
    assert same.origin["principal"] == "ann"


def test_id_depends_on_the_members_only() -> None:
    one, two, three = map(episode, (1, 2, 3))
    assert as_one([one, two], one).id == as_one([two, one], two).id
    assert as_one([one, two], one).id != as_one([one, two, three], one).id


def test_long_values_are_cut() -> None:
    many = {f"key {number}": number for number in range(100)}
    _, said = one_of(
        episode(1), episode(2, result={"output": "x" * 5000}), episode(3, metadata=many)
    )
    assert len(said["variations"][1]["diff"]["/result/output"]) == 201
    assert len(said["variations"][2]["diff"]) == 21


@given(st.lists(st.dictionaries(st.text("ab/~", max_size=2), JSON), min_size=2, max_size=4))
def test_structure_and_variation_together_restore_each_member(
    contents: list[dict[str, Any]],
) -> None:
    members = [
        replace(episode(number), metadata=content) for number, content in enumerate(contents)
    ]
    _, said = one_of(*members)
    for member, variation in zip(members, said["variations"], strict=True):
        if "…" in variation["diff"]:
            continue
        whole: dict[str, Any] = {}
        for path, value in (said["structure"] | variation["diff"]).items():
            whole = with_value(whole, path[1:].split("/"), value)
        assert whole["metadata"] == member.metadata


def with_value(whole: Any, names: list[str], value: Any) -> Any:
    if not names:
        return value
    name = names[0].replace("~1", "/").replace("~0", "~")
    return {**whole, name: with_value(whole.get(name, {}), names[1:], value)}
