"""Adherence of a run to its patterns, and their results, computed from its events."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.events.types import EventType, RunStatus
from bottega.memory.learning.episode_recorder import EpisodeRecorder, RunFacts
from bottega.memory.patterns.adherence import MOST
from bottega.memory.patterns.pattern import Arm

ONE, TASK = UUID(int=1), UUID(int=2)


def shown(number: int = 1, **changes: Any) -> Any:
    data = {
        "source": f"pattern:{UUID(int=number)}",
        "version": 1,
        "score": 0.5,
        "arm": "used",
        "category": "sequence",
        "name": "n",
        "uses": [],
        "affects": [],
        "content": "",
    }
    return (EventType.CONTEXT_RECALLED, None, "boss", data | changes)


def begun(name: str, call: int = 1, task: UUID | None = None) -> Any:
    asked = {"call": call, "tool_call_id": f"c{call}", "name": name, "arguments": {}}
    return (EventType.TOOL_STARTED, task, "boss", asked)


def ended(name: str, call: int = 1, error: str | None = None, task: UUID | None = None) -> Any:
    data = {"call": call, "tool_call_id": f"c{call}", "name": name, "result": 1}
    kind = "cancelled" if error == "it was cancelled" else "tool_error"
    data["error"] = {"type": kind, "message": error} if error else None
    data["status"] = "error" if error else "success"
    kind = EventType.TOOL_FAILED if error else EventType.TOOL_COMPLETED
    return (kind, task, "boss", data)


def called(name: str, call: int = 1, error: str | None = None) -> list[Any]:
    return [begun(name, call), ended(name, call, error)]


def agent(name: str, task: UUID = TASK, code: str | None = None) -> list[Any]:
    error = {"error": {"code": code, "message": f"it was {code}"}}
    answer = {"output": "", "usage": {}}
    end = (EventType.AGENT_FAILED, error) if code else (EventType.AGENT_COMPLETED, answer)
    return [(EventType.AGENT_STARTED, task, name, {}), (end[0], task, name, end[1])]


def episode_patterns(*events: Any) -> list[dict[str, Any]]:
    """Return the patterns of a run's episode."""
    recorder = EpisodeRecorder(RunFacts(ONE, None, None, "Go.", "boss", {}, {}))
    for event in events:
        recorder.observe(*event)
    episode = recorder.episode(
        RunStatus.COMPLETED, output="", stop_reason=None, error=None, duration_s=1.0
    )
    patterns: list[dict[str, Any]] = episode["metadata"].get("patterns", [])
    return patterns


def verdicts(*events: Any) -> list[tuple[Any, Any]]:
    return [(each["followed"], each["good"]) for each in episode_patterns(*events)]


@pytest.mark.parametrize(
    ("calls", "followed"),
    [("ab", True), ("xaxbx", True), ("ba", False), ("a", False), ("bab", True), ("", False)],
)
def test_pattern_is_followed_if_its_tools_are_used_in_order(calls: str, followed: bool) -> None:
    events = [event for n, name in enumerate(calls) for event in called(name, n)]
    assert verdicts(shown(uses=["a", "b"]), *events) == [(followed, None)]
    assert verdicts(*events, shown(uses=["a", "b"])) == [
        (False, None)
    ]  # before the pattern was shown
    assert verdicts(shown(), *events) == [(None, None)]


def test_agents_count_as_tools_and_only_once() -> None:
    asked = [begun("helper"), *agent("helper"), ended("helper")]
    assert verdicts(shown(uses=["helper"]), *asked) == [(True, None)]
    assert verdicts(shown(uses=["helper", "helper"]), *asked) == [(False, None)]
    assert verdicts(shown(uses=["helper", "helper"]), *asked, *asked[:1]) == [(True, None)]
    # Called under another name, and one that its parent does not wait for.
    assert verdicts(shown(uses=["ask", "helper"]), begun("ask"), *agent("helper")) == [(True, None)]
    beside = [*called("dispatch_subagent"), *agent("helper"), agent("helper")[0]]
    assert verdicts(shown(uses=["helper", "helper"]), *beside) == [(False, None)]


def test_next_call_of_an_affected_tool_decides_the_result() -> None:
    about = shown(affects=["a"])
    assert verdicts(about, *called("b", 1, "no"), *called("a", 2)) == [(None, True)]
    assert verdicts(about, *called("a", 1, "no"), *called("a", 2)) == [(None, False)]
    assert verdicts(about, *called("b")) == [(None, None)]
    assert verdicts(begun("a"), about, ended("a", 1, "no"), *called("a", 2)) == [(None, True)]
    assert verdicts(shown(affects=["a"], category="strategic"), *called("a")) == [(None, None)]


def test_tasks_of_affected_agents_decide_the_result_too() -> None:
    about = shown(affects=["helper"])
    assert verdicts(about, *agent("helper")) == [(None, True)]
    assert verdicts(about, *agent("helper", code="model_error")) == [(None, False)]
    asked = [begun("ask_helper"), *agent("helper", code="x"), ended("ask_helper", 1, "it was x")]
    assert verdicts(about, *asked) == [(None, False)]
    late = (EventType.SUBAGENT_TIMEOUT, TASK, "helper", {"error": {"code": "timeout"}})
    assert verdicts(about, agent("helper")[0], late) == [(None, False)]


def test_cancelled_calls_decide_nothing() -> None:
    stopped = agent("helper", code="cancelled")
    asked = [begun("helper"), *stopped, ended("helper", 1, "it was cancelled")]
    assert verdicts(shown(affects=["helper"]), *asked) == [(None, None)]
    assert verdicts(shown(affects=["helper"]), *asked, *called("helper", 2)) == [(None, True)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=8),
    st.lists(st.sampled_from("abc"), max_size=3),
    st.sampled_from(list(Arm)),
)
def test_all_arms_are_measured_alike(
    calls: list[tuple[str, bool]], uses: list[str], arm: str
) -> None:
    events = [e for n, (name, bad) in enumerate(calls) for e in called(name, n, "no" * bad)]
    one = shown(uses=uses, affects=uses)
    other = shown(uses=uses, affects=uses, arm=arm)
    assert verdicts(one, *events) == verdicts(other, *events)


def test_each_pattern_is_reported_once_with_its_arm_and_source() -> None:
    events = [shown(1), shown(2, arm="control"), shown(1, version=2), shown(1)]
    episode = shown(source="episode:1")
    episode[3].pop("arm")
    first, *others = episode_patterns(*events, episode)
    assert first == {
        "id": str(ONE),
        "version": 1,
        "arm": "used",
        "category": "sequence",
        "followed": None,
        "good": None,
    }
    assert [(each["arm"], each["version"]) for each in others] == [("control", 1), ("used", 2)]


def test_number_of_followed_patterns_is_bounded() -> None:
    assert len(verdicts(*(shown(n) for n in range(MOST + 5)))) == MOST
