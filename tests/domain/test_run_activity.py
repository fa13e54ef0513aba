"""Lines of text about the agents of a run, from hand-written events."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from bottega.cli.transcript import ActivityView

START = datetime.fromisoformat("2026-11-21T10:53:53+00:00")


class Run:
    """Activity and its events: ``run("llm.started", "a", call=1)`` is one of task a."""

    def __init__(self) -> None:
        self.activity = ActivityView()
        self.now = START
        self.parents: dict[str | None, str | None] = {None: None}
        self.agents: dict[str | None, str | None] = {None: "lead"}
        assert self("agent.started", depth=0) == "lead starts"

    def __call__(self, kind: str, task: str | None = None, /, **data: Any) -> str | None:
        event = {
            "seq": 1,
            "type": kind,
            "task_id": task,
            "agent": self.agents.get(task, task),
            "parent_task_id": self.parents.get(task),
            "at": self.now.isoformat(),
            "data": data,
        }
        return self.activity.describe(event)

    def dispatch(self, task: str, parent: str | None = None, **data: Any) -> str | None:
        self.parents[task] = parent
        about: dict[str, Any] = {
            "agent": task,
            "prompt": "Find out",
            "priority": 5,
            "queue_position": 0,
        }
        rest: dict[str, Any] = {
            "instructions": None,
            "timeout_ms": 9000,
            "token_budget": None,
            "metadata": {},
        }
        return self("subagent.dispatched", task, **about | rest | data)

    def begin(self, task: str) -> str | None:
        said = self("subagent.dequeued", task, attempt=1, waited_ms=1500, timeout_ms=1000)
        assert self.move(task, "queued", "running") is None
        assert self("agent.started", task, depth=1) is None
        return said

    def move(self, task: str, old: str, new: str) -> str | None:
        return self("subagent.status_changed", task, attempt=1, **{"from": old, "to": new})

    def end(self, task: str, how: str = "completed", **data: Any) -> str | None:
        usage = {"input": 30, "output": 4}
        return self(f"subagent.{how}", task, duration_ms=2500, token_usage=usage, **data)

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def moved(self) -> bool:
        return self.activity.has_moved

    def depths(self) -> dict[str | None, int]:
        return {task: self.activity.depth(task) for task in self.activity.work}


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_dispatched_task_stands_below_its_parent(run: Run) -> None:
    assert run.dispatch("market", priority=2, queue_position=3) == (
        "lead dispatches market (priority 2, 3 ahead)"
    )
    assert run.dispatch("niche", "market") == "market dispatches niche (priority 5, 0 ahead)"
    assert run.depths() == {None: 0, "market": 1, "niche": 2}


def test_task_starts_and_ends_with_its_time_and_tokens(run: Run) -> None:
    run.dispatch("market")
    run.later(1.5)
    assert run.begin("market") == "market starts after 1.5 s in the queue"
    assert run.move("market", "running", "streaming") is None
    assert run("llm.delta", "market", call=1, attempt=1, offset=0, text="Lettuce") is None
    run.later(2.5)
    run("llm.completed", "market", call=1, message={}, usage={"input": 20, "output": 1})
    assert run("agent.completed", "market", output="x", usage={}) is None
    assert run.end("market") == "market answered (2.5 s, 34 tokens)"


def test_repeated_dispatch_says_nothing(run: Run) -> None:
    run.dispatch("market")
    assert run.dispatch("market") is None


@pytest.mark.parametrize("first", ["agent", "subagent"])
def test_repeated_end_is_told_once(run: Run, first: str) -> None:
    run.dispatch("market")
    run.begin("market")
    said = [] if first == "agent" else [run.end("market")]
    said.append(run("agent.failed", "market", error={"code": "x", "message": "y"}))
    said.append(run.end("market"))
    assert [text for text in said if text] == ["market answered (2.5 s, 34 tokens)"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("failed", "market failed: no [model] ("),
        ("timeout", "market timed out: no [model] ("),
        ("cancelled", "market cancelled: no [model] ("),
    ],
)
def test_other_ends_show_their_reason(run: Run, how: str, said: str) -> None:
    run.dispatch("market")
    text = run.end("market", how, error={"code": "x", "message": "no [model]"})
    assert text is not None
    assert text.startswith(said)


def test_error_may_be_a_text_or_missing(run: Run) -> None:
    run.dispatch("a")
    run.dispatch("b")
    first, second = run.end("a", "cancelled", error="parent-cancelled"), run.end("b", "cancelled")
    assert first == "a cancelled: parent-cancelled (2.5 s, 34 tokens)"
    assert second == "b cancelled (2.5 s, 34 tokens)"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"agent": None, "metadata": {"title": "costs"}}, "costs"),
        ({"agent": None, "metadata": None, "prompt": "How much is\n[tea]?"}, "How much is [tea]?"),
        (
            {"agent": None, "prompt": "word " * 100},
            "word word word word word word word word word wo…",
        ),
    ],
)
def test_task_without_an_agent_is_named_after_its_title_or_prompt(
    run: Run, data: dict[str, Any], name: str
) -> None:
    run.agents["1"] = None
    assert str(run.dispatch("1", **data)).startswith(f"lead dispatches {name} (")
    run.begin("1")
    said = run.end("1")
    assert said is not None
    assert said.startswith(f"{name} answered")


def test_resumed_task_is_queued_again(run: Run) -> None:
    run.dispatch("market")
    run.begin("market")
    assert run("subagent.resumed", "market", attempt=2) == "market is queued again"
    assert run.begin("market") == "market starts after 1.5 s in the queue"
    assert list(run.depths()) == [None, "market"]


def test_reason_for_held_tasks_is_shown(run: Run) -> None:
    said = run("subagent.backpressure", code="x", message="20 tasks wait", size=20, limit=20)
    assert said == "lead is refused a task: 20 tasks wait"
    run.dispatch("market")
    opened = run("subagent.circuit_opened", "market", failures=3, retry_after_ms=30_000)
    assert opened == "tasks like market are refused after 3 failures; again in 30 s"
    assert run("warning", "unknown", code="x", message="look") == "warning: look"
    assert list(run.depths()) == [None, "market"]


def test_blocking_sub_agent_is_told_by_its_own_events(run: Run) -> None:
    assert run("agent.started", "designer", depth=1) == "designer starts"
    assert run("memory.injected", "designer", source="requirements", version=1) == (
        "designer receives the answer of requirements"
    )
    run("llm.completed", "designer", call=1, message={}, usage={"input": 5, "output": 2})
    run.later(1)
    ended = run("agent.completed", "designer", output="x", usage={})
    assert ended == "designer answered (1.0 s, 7 tokens)"
    assert run("memory.published", "designer", version=1) == "designer publishes version 1"


def test_nodes_of_a_graph_are_told_once() -> None:
    run = Run()
    run.agents |= {"p": None, "a": "letter", "b": "letter", "x": None}
    assert run("node.started", "p", node="price", type="tool") == "price starts"
    assert run("tool.started", "p", call=1, name="get", arguments={}) == "price calls get"
    failed = {"code": "tool_failed", "message": "503"}
    assert run("node.failed", "p", node="price", error=failed) == "price failed: 503"
    assert run("node.started", "a", node="letter", type="agent") is None
    assert run("node.completed", "a", node="letter") is None
    # Two nodes may have the same agent.
    assert run("node.started", "b", node="reminder", type="agent") is None
    assert run("agent.started", "b", depth=1) == "reminder starts"
    reason = "sort chose help"
    assert run("node.skipped", "x", node="pay", reason=reason) == f"pay is skipped: {reason}"


def test_ten_tasks_under_way_are_counted_and_only_failures_have_lines(run: Run) -> None:
    tasks = [f"t{number}" for number in range(12)]
    lines = [run.dispatch(task) for task in tasks]
    assert [line is None for line in lines] == [False] * 9 + [True] * 3
    run.later(1)
    for task in tasks[:5]:
        assert run.begin(task) is None
    assert run("tool.started", tasks[0], call=1, name="get", arguments={}) is None
    run.parents["below"] = tasks[0]
    assert run("agent.started", "below", depth=2) is None
    asked = {"kind": "approval", "tool": "refund"}
    assert run("interrupt.created", tasks[1], **asked) == "t1 waits for people: approval, refund"
    assert run.move(tasks[0], "running", "completed") is None
    assert run.moved()
    assert run.end(tasks[0]) is None
    assert not run.moved()
    assert str(run.activity.crowd) == "1 of 12 tasks are over: 1 done, 4 running, 7 waiting"
    assert run.move(tasks[1], "running", "cancelled") is None
    assert run.end(tasks[1], "cancelled") is None
    run.move(tasks[2], "running", "failed")
    said = run.end(tasks[2], "failed", error={"code": "x", "message": "no model"})
    assert said == "t2 failed: no model (2.5 s, 34 tokens)"
    run.move(tasks[3], "running", "completed")
    run.later(60)
    run.move(tasks[4], "running", "completed")
    # Five tasks took 61 s, and seven are left.
    counts = "5 of 12 tasks are over: 3 done, 2 failed, 7 waiting"
    assert str(run.activity.crowd) == f"{counts}; about 0:01:25 left"
    assert run("subagent.resumed", tasks[5], attempt=2) is None
    for task in tasks[5:]:
        run.move(task, "running", "completed")
    assert str(run.activity.crowd) == "12 of 12 tasks are over: 10 done, 2 failed"
    # The next tasks are few again.
    assert run.dispatch("last") == "lead dispatches last (priority 5, 0 ahead)"
    run.move("last", "running", "completed")
    assert run.end("last") == "last answered (2.5 s, 34 tokens)"
    assert not run.moved()
