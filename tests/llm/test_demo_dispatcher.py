"""The demo model as an asynchronous coordinator and as its tasks: pure functions, no server."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from bottega.llm.demo_model.conversation import DemoCall
from tests.llm.test_demo_decide import ask, shared, tool

TEXT = {"type": "string"}
FOLDER = "Your own folder is /subagent/7552a9c0-0000-5000-8000-000000000000/: only you write there."
TASK = "Research the state of vertical farming"


def swarm_tools(*names: str) -> list[dict[str, Any]]:
    agent = {"agent": {"enum": list(names), "type": "string"}} if names else {}
    dispatch = {"properties": {"prompt": TEXT, **agent}, "required": ["prompt"]}
    several = {"properties": {"task_ids": {"type": "array"}}, "required": ["task_ids"]}
    path = {"properties": {"path": TEXT}, "required": ["path"]}
    return [
        tool("dispatch_subagent", dispatch),
        tool("poll_subagent", several),
        tool("await_subagent", several),
        tool("read_file", path),
        tool("list_files", {"properties": {"path": TEXT}}),
    ]


def title_of(call: DemoCall) -> str:
    return str(call.arguments.get("agent") or call.arguments["metadata"]["title"])


@dataclass
class Swarm:
    """Stand-in for the three tools: tasks end after ``looks`` polls and awaits that showed them.

    Attributes:
        ends: how a task ends, by its title; the others complete.
        refusals: how often a task's dispatch is refused.
        made: the calls of each message.
    """

    looks: int = 2
    ends: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    made: list[tuple[DemoCall, ...]] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=dict)

    def play(self, asked: str, *names: str) -> str:
        """Answer calls until the model reports; return the report."""
        history: list[dict[str, Any]] = []
        while len(self.made) < 15:
            answer = ask(("user", asked), *history, tools=swarm_tools(*names))
            if not answer.calls:
                assert ask(("user", asked), *history, tools=swarm_tools(*names)) == answer
                return answer.text
            history += self._message(answer.calls)
            self.made.append(answer.calls)
        raise AssertionError("it goes on for ever")

    def kinds(self) -> list[str]:
        """Return the name of the called tool and the number of calls, per message."""
        assert all(len({call.name for call in calls}) == 1 for calls in self.made)
        return [f"{calls[0].name.partition('_')[0]} {len(calls)}" for calls in self.made]

    def _message(self, calls: Iterable[DemoCall]) -> list[dict[str, Any]]:
        made, results = [], []
        for number, call in enumerate(calls):
            call_id = f"{len(self.made)}.{number}"
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            made.append({"id": call_id, "type": "function", "function": function})
            content = json.dumps(self._result(call))
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        return [{"role": "assistant", "content": None, "tool_calls": made}, *results]

    def _result(self, call: DemoCall) -> dict[str, Any]:
        if call.name == "dispatch_subagent":
            title = title_of(call)
            if self.refusals.get(title, 0):
                self.refusals[title] -= 1
                return {"error": "20 tasks wait already"}
            self.shown[f"id of {title}"] = 0
            return {"task_id": f"id of {title}", "status": "queued", "queue_position": 0}
        asked = call.arguments["task_ids"]
        assert asked == list(self.shown)
        tasks = [self._look(task_id) for task_id in asked]
        found = {"tasks": [task for task in tasks if task["status"] != "lost"]}
        if call.name == "poll_subagent":
            return found | {"summary": {"total": len(asked)}}
        timed_out = any(task["status"] == "running" for task in tasks)
        return found | {"status": "waited", "wait_timed_out": timed_out}

    def _look(self, task_id: str) -> dict[str, Any]:
        self.shown[task_id] += 1
        title = task_id.removeprefix("id of ")
        if self.shown[task_id] <= self.looks:
            return {"task_id": task_id, "status": "running", "partial_output": "I beg"}
        end = {"status": "completed", "final_output": f"What I know of {title}."}
        return {"task_id": task_id} | self.ends.get(title, end)


class TestCoordinator:
    def test_it_dispatches_polls_awaits_and_reports(self) -> None:
        swarm = Swarm()
        report = swarm.play(f"{TASK}.")

        assert swarm.kinds() == ["dispatch 3", "poll 1", "poll 1", "await 1"]
        assert swarm.made[-1][0].arguments["mode"] == "all"
        titles = [title_of(call) for call in swarm.made[0]]
        assert len(set(titles)) == 3
        assert all(TASK in call.arguments["prompt"] for call in swarm.made[0])
        sections = "\n\n".join(f"## {title}\n\nWhat I know of {title}." for title in titles)
        assert report == (
            f"# Report: {TASK}\n\n{sections}\n\n"
            "3 tasks: 3 completed, 0 failed, 0 timeout, 0 cancelled."
        )

    def test_it_polls_once_if_all_have_ended(self) -> None:
        swarm = Swarm(looks=0)
        swarm.play(TASK)
        assert swarm.kinds() == ["dispatch 3", "poll 1", "await 1"]

    @pytest.mark.parametrize(
        ("asked", "count"),
        [
            (f"{TASK} in 5 tasks.", 5),
            (f"{TASK}, in 8 parts", 8),
            (f"In 7 parallel tasks: {TASK}", 7),
            (f"{TASK} in 1 part", 1),
            (f"{TASK} in 0 parts", 1),
            (f"{TASK} in 400 parts", 20),
            (f"{TASK} in 2050 for 3 people", 3),
        ],
    )
    def test_it_makes_the_requested_number_of_parts(self, asked: str, count: int) -> None:
        swarm = Swarm()
        report = swarm.play(asked)
        first = swarm.made[0]
        assert len(first) == len({call.arguments["prompt"] for call in first}) == count
        assert not any("parts" in call.arguments["prompt"] for call in first)
        assert f"\n{count} task" in report

    def test_named_agents_are_called_once_each(self) -> None:
        swarm = Swarm()
        swarm.play(TASK, "market", "risks")
        assert [call.arguments for call in swarm.made[0]] == [
            {"agent": "market", "prompt": f"{TASK} (your part: market)"},
            {"agent": "risks", "prompt": f"{TASK} (your part: risks)"},
        ]

    def test_other_parts_go_to_anonymous_children(self) -> None:
        swarm = Swarm()
        swarm.play(f"{TASK} in 5 parts", "market", "risks")
        agents = [call.arguments.get("agent") for call in swarm.made[0]]
        assert agents == ["market", "risks", None, None, None]
        assert len({title_of(call) for call in swarm.made[0]}) == 5

    def test_named_agents_are_found_in_an_optional_property(self) -> None:
        tools = swarm_tools()
        choice = {"anyOf": [{"const": "market", "type": "string"}, {"type": "null"}]}
        tools[0]["function"]["parameters"]["properties"]["agent"] = choice
        answer = ask(("user", TASK), tools=tools)
        assert [call.arguments.get("agent") for call in answer.calls] == ["market"]

    def test_report_says_how_tasks_ended(self) -> None:
        ends: dict[str, dict[str, Any]] = {
            "a": {"status": "failed", "error": {"code": "model_error", "message": "no model"}},
            "b": {"status": "timeout", "error": "after 5 s", "partial_output": "So far"},
            "c": {"status": "cancelled"},
            "d": {"status": "lost"},
            "e": {"status": "completed", "final_output": ""},
            "f": {"status": "completed", "final_output": "# Report: x\n\n## market\n\n#1"},
        }
        report = Swarm(ends=ends).play(TASK, *ends)
        for section in (
            "## a\n\nFailed: no model\n\n",
            "## b\n\nTimeout: after 5 s\n\nSo far\n\n",
            "## c\n\nCancelled.\n\n",
            "## d\n\nNot found.\n\n",
            "## e\n\n(nothing)\n\n",
            "## f\n\n### Report: x\n\n#### market\n\n#1\n\n",
        ):
            assert section in report
        last = "6 tasks: 2 completed, 1 failed, 1 timeout, 1 cancelled, 1 not found."
        assert report.endswith(last)

    def test_refused_task_is_tried_again_after_the_others(self) -> None:
        swarm = Swarm(refusals={"b": 1})
        report = swarm.play(TASK, "a", "b")
        kinds = ["dispatch 2", "poll 1", "poll 1", "await 1"]
        assert swarm.kinds() == [*kinds, "dispatch 1", "poll 1", "poll 1", "await 1"]
        assert "## b\n\nWhat I know of b." in report
        assert "2 completed" in report

    def test_task_refused_twice_is_reported(self) -> None:
        swarm = Swarm(refusals={"b": 2})
        report = swarm.play(TASK, "a", "b")
        assert swarm.kinds() == ["dispatch 2", "poll 1", "poll 1", "await 1", "dispatch 1"]
        assert "## b\n\nRefused: 20 tasks wait already" in report
        assert report.endswith("1 completed, 0 failed, 0 timeout, 0 cancelled, 1 refused.")

    def test_if_all_are_refused_it_waits_for_nothing(self) -> None:
        swarm = Swarm(refusals={"a": 9, "b": 9})
        report = swarm.play(TASK, "a", "b")
        assert swarm.kinds() == ["dispatch 2", "dispatch 2"]
        assert report.endswith("2 refused.")

    def test_wait_that_timed_out_is_repeated(self) -> None:
        swarm = Swarm(looks=4)
        report = swarm.play(TASK)
        assert swarm.kinds()[3:] == ["await 1", "await 1", "await 1"]
        assert "3 completed" in report

    def test_wait_is_repeated_three_times_at_most(self) -> None:
        swarm = Swarm(looks=99)
        report = swarm.play(TASK)
        assert swarm.kinds()[3:] == ["await 1"] * 4
        assert "Running.\n\nI beg" in report
        assert report.endswith("0 completed, 0 failed, 0 timeout, 0 cancelled, 3 running.")

    @pytest.mark.parametrize("content", ["Error: out of order", '{"error": "no"}', "?", "[1]"])
    def test_tools_that_only_fail_are_abandoned(self, content: str) -> None:
        class Broken(Swarm):
            def _message(self, calls: Iterable[DemoCall]) -> list[dict[str, Any]]:
                made, *results = super()._message(calls)
                return [made, *({**result, "content": content} for result in results)]

        swarm = Broken()
        report = swarm.play(TASK)
        assert swarm.kinds() == ["dispatch 3", "dispatch 3"]
        assert report.endswith("3 refused.")

    def test_task_that_a_plugin_answered_is_no_failure(self) -> None:
        class Skipping(Swarm):
            def _result(self, call: DemoCall) -> dict[str, Any]:
                if call.arguments.get("agent") == "b":
                    return {"status": "skipped", "result": "I know that already."}
                return super()._result(call)

        report = Skipping().play(TASK, "a", "b")
        assert "## b\n\nI know that already." in report
        assert report.endswith("1 skipped.")

    def test_each_request_starts_from_the_beginning(self) -> None:
        swarm = Swarm()
        swarm.play(TASK)
        done = swarm._message(swarm.made[0])
        answer = ask(
            ("user", TASK), *done, ("user", "Research tea in 2 parts"), tools=swarm_tools()
        )
        assert [call.name for call in answer.calls] == ["dispatch_subagent"] * 2

    def test_other_named_tools_are_called_first(self) -> None:
        answer = ask(("user", "List files below /global/a, then go on."), tools=swarm_tools())
        assert answer.calls == (DemoCall("list_files", {"path": "/global/a"}),)


class Steered:
    """A conversation of the demo model that has the tools to steer its tasks."""

    def __init__(self, asked: str) -> None:
        more: dict[str, Any] = {"properties": {}}
        names = ("dispatch_subagents", "send_to_subagent", "cancel_subagent")
        self.asked = asked
        self.tools = swarm_tools() + [tool(name, more) for name in names]
        self.history: list[dict[str, Any]] = []

    def next(self) -> Any:
        return ask(("user", self.asked), *self.history, tools=self.tools)

    def step(self, answer: Any) -> DemoCall:
        """Return the model's only call; answer it."""
        asked: DemoCall
        (asked,) = self.next().calls
        function = {"name": asked.name, "arguments": json.dumps(asked.arguments)}
        call = {"id": str(len(self.history)), "type": "function", "function": function}
        self.history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result = {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(answer)}
        self.history.append(result)
        return asked


def test_with_the_tools_for_it_it_dispatches_all_in_one_call_and_steers() -> None:
    steered = Steered(TASK)
    step = steered.step
    ids = [
        {"index": 0, "task_id": "a"},
        {"index": 1, "error": "full"},
        {"index": 2, "task_id": "c"},
    ]
    tasks = [{"task_id": each, "status": "completed", "final_output": each} for each in "ac"]
    first = step({"tasks": ids})
    assert (first.name, len(first.arguments["tasks"])) == ("dispatch_subagents", 3)
    sent = step({"task_id": "c", "status": "sent"})
    assert (sent.name, sent.arguments["task_id"]) == ("send_to_subagent", "c")
    assert step({"tasks": tasks}).arguments == {"task_ids": ["a", "c"], "mode": "any_success"}
    assert [step({"tasks": tasks}).name for _ in range(2)] == ["poll_subagent", "await_subagent"]
    again = step({"error": "full"})
    assert again.arguments == {"tasks": [first.arguments["tasks"][1]]}
    report = steered.next().text
    assert report.endswith("2 completed, 0 failed, 0 timeout, 0 cancelled, 1 refused.")


def test_if_the_first_answer_is_enough_it_cancels_the_other_tasks() -> None:
    steered = Steered(f"{TASK} in 3 parts, the first answer is enough.")
    step = steered.step
    asked = step({"tasks": [{"index": n, "task_id": each} for n, each in enumerate("abc")]})
    assert "enough" not in asked.arguments["tasks"][0]["prompt"]
    step({"task_id": "c", "status": "sent"})
    found = {"task_id": "b", "status": "completed", "final_output": "b"}
    step({"tasks": [{"task_id": each, "status": "queued"} for each in "ac"] + [found]})
    ends = [{"task_id": each, "status": "cancelled"} for each in "ac"]
    cancelled = step({"tasks": ends})
    assert (cancelled.name, cancelled.arguments) == ("cancel_subagent", {"task_ids": ["a", "c"]})
    assert [step({"tasks": [*ends, found]}).name for _ in range(2)] == [
        "poll_subagent",
        "await_subagent",
    ]
    assert steered.next().text.endswith("1 completed, 0 failed, 0 timeout, 2 cancelled.")


class TestTask:
    def answer(self, asked: str, *before: Any, tools: Any = (), own: str = "You help.") -> Any:
        return ask(("system", own), *before, ("user", f"{asked}\n\n{FOLDER}"), tools=tools)

    def test_findings_are_about_its_part(self) -> None:
        text = self.answer(f"{TASK} (your part: risks)").text
        assert text.startswith(f'Findings on the risks of "{TASK}":\n')
        assert text.count("risks") > 1
        assert "vertical" in text.split("\n", 1)[1]
        assert text != self.answer(f"{TASK} (your part: market)").text
        assert text == self.answer(f"{TASK} (your part: risks)").text

    def test_folder_line_is_no_part_of_its_topic(self) -> None:
        for asked in (TASK, "x (your part: design)"):
            text = self.answer(asked).text
            assert "folder" not in text
            assert "/subagent" not in text

    def test_folder_mentioned_in_the_request_is_part_of_the_topic(self) -> None:
        text = ask(("user", "Look at /subagent/x, please\n\nand be quick")).text
        assert "/subagent/x" in text

    def test_it_cites_shared_context(self) -> None:
        text = self.answer(f"{shared('market', 'Lettuce sells.')}\n\n{TASK}").text
        assert 'market said: "Lettuce sells"' in text

    def test_role_in_a_software_team_is_kept(self) -> None:
        assert self.answer("Build it", own="You write requirements.").text.startswith("Requirem")

    def test_it_coordinates_when_asked_for_parts(self) -> None:
        answer = self.answer(f"{TASK}, each in 2 parts (your part: risks)", tools=swarm_tools())
        prompts = [call.arguments["prompt"] for call in answer.calls]
        assert prompts == [
            f"{TASK} (your part: risks, market)",
            f"{TASK} (your part: risks, technology)",
        ]

    def test_otherwise_it_does_the_work_itself(self) -> None:
        answer = self.answer(f"{TASK} (your part: risks)", tools=swarm_tools())
        assert answer.text.startswith("Findings on the risks")

    def test_number_for_the_tasks_is_passed_on(self) -> None:
        asked = f"{TASK} in 3 parts, each in 2 parts."
        answer = ask(("user", asked), tools=swarm_tools("market"))
        (first, *rest) = [call.arguments["prompt"] for call in answer.calls]
        assert first == f"{TASK}, each in 2 parts. (your part: market)"
        assert len(rest) == 2

    def test_named_tool_is_called_with_its_path(self) -> None:
        asked = "Read file /global/notes.md. Then research tea."
        assert self.answer(asked, tools=swarm_tools()).calls == (
            DemoCall("read_file", {"path": "/global/notes.md"}),
        )

    def test_messages_of_its_parent_are_notes_and_no_new_task(self) -> None:
        task = f"{TASK} (your part: risks)\n\n{FOLDER}"
        text = ask(("user", task), ("assistant", "Early."), ("user", "Mind the costs.")).text
        assert text.startswith("Findings on the risks")
        assert text.endswith("\n\nNoted: Mind the costs.")
        assert ask(("user", f"{task}\n\nMind the costs.")).text == text
