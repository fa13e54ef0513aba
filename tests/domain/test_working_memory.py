"""The working memory as a library."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents.parts import estimated_tokens
from bottega.memory.working_memory import RECENT, Area, Budgets, Retrieved, WorkingMemory
from tests.examples import examples

words = st.text(alphabet=st.characters(), max_size=30)
long = st.sampled_from(["x", "né", "12 Error.\n", "a b "]).flatmap(
    lambda piece: st.integers(0, 3_000).map(lambda n: piece * n)
)
values: st.SearchStrategy[Any] = st.recursive(
    words | long | st.integers() | st.floats() | st.none() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["a", "b", "c", "d" * 500]) | words
texts = words | long
steps = st.one_of(
    st.tuples(
        st.just("set"),
        st.sampled_from(["a", "b", "d" * 500]),
        values,
        st.sampled_from(["global", "task", "execution", "intermediate", "metadata"]),
        st.sampled_from([None, "task", "intermediate", "accumulator", "control", "metadata"]),
        st.sampled_from(["", "s1", "s2"]),
    ),
    st.tuples(st.just("add"), names, values | long, st.lists(st.just("m1"), max_size=1)),
    st.tuples(st.just("state"), texts, names, st.lists(names, max_size=2), texts),
    st.tuples(st.just("load"), texts, st.lists(texts, max_size=3), st.lists(texts, max_size=3)),
    st.tuples(st.just("found"), st.lists(st.tuples(names, texts), max_size=4)),
    st.tuples(st.just("prune")),
    st.tuples(st.just("compose")),
    st.tuples(st.just("initialize"), texts),
    st.tuples(st.just("clear")),
)
budgets = st.one_of(
    st.just(Budgets()),
    st.builds(Budgets, *[st.integers(0, 300)] * 5),
)


def do(memory: WorkingMemory, step: tuple[Any, ...]) -> None:
    match step:
        case ("set", key, value, scope, kind, subtask):
            memory.set(key, value, scope, kind=kind, subtask=subtask)
        case ("add", subtask, output, refers_to):
            memory.add_intermediate(subtask, output, refers_to=refers_to)
        case ("state", phase, subtask, completed, error):
            memory.push_state(phase, subtask=subtask, completed=completed, failed={"f": error})
        case ("load", task, goals, plan):
            memory.load_task_context(task, goals=goals, plan=plan)
        case ("found", items):
            memory.retrieve_from_episodic(Retrieved(*item) for item in items)
        case ("prune",):
            memory.prune()
        case ("compose",):
            memory.compose()
        case ("initialize", system):
            memory.initialize(system)
        case ("clear",):
            memory.clear()


def words_of(text: str) -> int:
    return len(text.split()) + len(text) // 7


@settings(max_examples=examples(150), deadline=None)
@given(budgets, st.lists(steps, max_size=25), st.sampled_from([estimated_tokens, words_of]))
def test_working_memory_never_exceeds_its_limit(
    limits: Budgets, done: list[tuple[Any, ...]], count: Any
) -> None:
    memory = WorkingMemory(limits, count=count)
    for step in done:
        do(memory, step)
        assert all(memory.tokens_of(part) <= limits.of(part) for part in Area)
        assert memory.tokens <= limits.total
    text = memory.compose()
    assert count(text) <= limits.total
    assert all(count(memory.compose(part)) <= limits.of(part) for part in Area)
    assert memory.tokens <= limits.total


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(steps, max_size=25), st.lists(steps, max_size=10))
def test_reference_recalls_its_content_unchanged(
    first: list[tuple[Any, ...]], then: list[tuple[Any, ...]]
) -> None:
    memory = WorkingMemory(Budgets(50, 100, 100, 200, 100))
    for step in first:
        do(memory, step)
    results = [each for each in memory.references if each.startswith("m")]
    known = {reference: memory.recall(reference) for reference in results}
    for step in then:
        if step[0] not in ("clear", "initialize"):
            do(memory, step)
    assert {reference: memory.recall(reference) for reference in known} == known


@settings(max_examples=examples(100), deadline=None)
@given(budgets, st.lists(steps, max_size=20), st.lists(steps, max_size=10))
def test_a_snapshot_is_exact(
    limits: Budgets, first: list[tuple[Any, ...]], then: list[tuple[Any, ...]]
) -> None:
    memory = WorkingMemory(limits)
    for step in first:
        do(memory, step)
    snapshot = memory.snapshot()
    stored = json.loads(json.dumps(snapshot))
    for step in then:
        do(memory, step)
    assert stored == json.loads(json.dumps(snapshot)) == snapshot
    after = memory.snapshot()
    other = WorkingMemory()
    other.restore(stored)
    assert other.snapshot() == snapshot
    for step in then:
        do(other, step)
    assert other.snapshot() == after
    assert other.compose() == memory.compose()


@given(values, st.sampled_from(["global", "task", "execution", "metadata"]))
def test_variable_keeps_its_value(value: Any, scope: str) -> None:
    memory = WorkingMemory(Budgets(10, 10, 10, 10, 10))
    memory.set("key", value, scope)
    found = memory.get("key", scope)
    if isinstance(value, str | bool | int | type(None)):
        assert found == value
    json.dumps(found)


def test_old_results_are_pruned_first_and_recent_ones_stay() -> None:
    memory = WorkingMemory(Budgets(intermediate=1_000))
    outputs = [f"result {index} " + "x" * 400 for index in range(12)]
    references = [memory.add_intermediate(f"step{i}", text) for i, text in enumerate(outputs)]
    assert references[:2] == ["m1", "m2"]
    shown = memory.compose(Area.INTERMEDIATE)
    assert outputs[11] in shown
    assert outputs[7] in shown
    assert outputs[0] not in shown
    assert "m1 step0 (shortened): result 0" in shown
    assert [memory.recall(reference) for reference in references] == outputs


def test_result_of_recent_subtasks_stays_where_older_ones_give_room() -> None:
    memory = WorkingMemory(Budgets(intermediate=1_000))
    for name in ("older", "edge"):
        memory.add_intermediate(name, f"{name} " + "y" * 1_200)
    for index in range(RECENT - 1):
        memory.add_intermediate(f"s{index}", "short", refers_to=["m1"])
    memory.add_intermediate("last", "z" * 1_900)
    shown = memory.compose(Area.INTERMEDIATE)
    assert "older " + "y" * 1_200 not in shown
    assert "edge " + "y" * 1_200 in shown


def test_content_that_later_results_refer_to_stays() -> None:
    memory = WorkingMemory(Budgets(intermediate=1_000))
    memory.add_intermediate("first", "needed " + "y" * 400)
    for index in range(9):
        memory.add_intermediate(f"s{index}", "z" * 400, refers_to=["m1"])
    assert "needed " + "y" * 400 in memory.compose(Area.INTERMEDIATE)


def test_traces_become_a_summary() -> None:
    memory = WorkingMemory(Budgets(state=300))
    for index in range(40):
        memory.push_state("building", subtask=f"part {index}", completed=[f"{index}"])
    shown = memory.compose(Area.STATE)
    assert "now: building: part 39" in shown
    assert "earlier steps (shortened)" in shown
    assert "building: part 1\n" in (memory.recall("v1") or "")


def test_unread_retrieved_episodes_are_dropped_and_read_ones_stay() -> None:
    memory = WorkingMemory()
    memory.retrieve_from_episodic([Retrieved("e1", "read it")])
    memory.compose()
    memory.retrieve_from_episodic([Retrieved("e2", "unread")])
    memory.prune()
    shown = memory.compose(Area.RETRIEVED)
    assert "e1: read it" in shown
    assert "e2" not in shown


def test_listener_is_called_once_when_there_is_no_room() -> None:
    told: list[tuple[str, str]] = []
    memory = WorkingMemory(
        Budgets(task=100), listener=lambda code, message: told.append((code, message))
    )
    memory.load_task_context("do it\n" * 500, goals=["win"])
    memory.load_task_context("do that\n" * 500)
    for _ in range(2):
        assert "win" in memory.compose()
    assert [code for code, _ in told] == ["memory_limit"]


def test_variable_may_change_its_kind() -> None:
    memory = WorkingMemory()
    for kind in ("task", "accumulator", "control", "accumulator", "metadata", "task"):
        memory.set("key", 1, kind=kind)
        assert memory.get("key") == ([1] if kind == "accumulator" else 1)
    memory.set("tries", 1, kind="control")
    memory.set("tries", 2)
    memory.set("left", 1, kind="control")
    assert "left = 1" in memory.compose(Area.TASK)
    memory.push_state("work", subtask="next")
    assert "left = 1" not in memory.compose(Area.TASK)
    assert memory.get("tries") == 2
    memory.set("cost", 3, kind="metadata")
    memory.set("calls", "a", "metadata", kind="accumulator")
    memory.clear()
    memory.set("calls", "b", "metadata", kind="accumulator")
    assert memory.get("key") is None
    assert memory.get("cost") == 3
    assert memory.get("calls", "metadata") == ["a", "b"]
    assert "calls += a, b" in memory.compose(Area.STATE)


def test_kinds_of_variables() -> None:
    memory = WorkingMemory()
    memory.push_state("work", subtask="one")
    memory.set("files", "a.py", kind="accumulator")
    memory.set("files", "b.py", kind="accumulator")
    memory.set("tries", 2, "execution", kind="control")
    memory.set("library", "PyJWT", "intermediate", subtask="one")
    memory.set("tokens", 12, "metadata")
    assert memory.get("files") == ["a.py", "b.py"]
    assert memory.get("tries", "execution") == 2
    assert memory.get("library", "intermediate", subtask="one") == "PyJWT"
    assert memory.get("library", "intermediate", subtask="two", default="none") == "none"
    assert "files += a.py, b.py" in memory.compose(Area.TASK)
    memory.push_state("work", subtask="two")
    assert memory.get("tries", "execution") is None
    assert memory.get("library", "intermediate", subtask="one") == "PyJWT"
    memory.clear()
    assert memory.get("files") is None
    assert memory.get("tokens", "metadata") == 12
    assert memory.references == []


class Odd:
    def __str__(self) -> str:
        raise RuntimeError


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def test_unusual_values_cause_no_errors() -> None:
    for value in (Odd(), circle(), 10**5_000, {Odd(): 1}, "\ud800", [b"\xff"], {1, 2}):
        memory = WorkingMemory()
        memory.set("odd", value)
        memory.add_intermediate("odd", value)
        json.dumps(memory.snapshot())
        assert "odd = " in memory.compose()
