"""The demo model's answers: pure functions, no server."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from bottega.agents.agent import BaseAgent
from bottega.agents.messages import HumanMessage, StandardMessage, SystemMessage
from bottega.agents.provider import ModelOptions
from bottega.agents.shared_memory import awareness_message, shared_message
from bottega.agents.subagent import SubAgentWrapper
from bottega.cli.demo import NIGHTS, TOPICS
from bottega.cli.scenarios import LEARNING, RIGHT
from bottega.clock import utcnow
from bottega.graph.shared_memory import MemoryItem, PropagationPolicy, SharedMemoryGraph
from bottega.llm.demo_model.rules import Answer, DemoCall, decide
from tests.llm.test_vendors import DIALECTS, serving

NAMES = ("implementer", "designer", "requirements")
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def ask(*messages: tuple[str, str] | dict[str, Any], tools: Any = (), choice: Any = None) -> Answer:
    """Return the answer to messages, given as (role, text) or in wire form."""
    wire = [
        {"role": item[0], "content": item[1]} if isinstance(item, tuple) else item
        for item in messages
    ]
    request = {"model": "demo", "messages": wire, "tools": list(tools)}
    if choice is not None:
        request["tool_choice"] = choice
    return decide(request)


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters or QUERY}
    return {"type": "function", "function": function}


def call(name: str, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"query": "x"}'}
    item = {"id": f"{name}{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [item]}


def result(name: str, text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{name}{number}", "content": text}


def pipeline_graph() -> SharedMemoryGraph:
    graph = SharedMemoryGraph()
    graph.add_edge("requirements", "designer")
    graph.add_edge("requirements", "implementer")
    graph.add_edge("designer", "implementer")
    return graph


def awareness() -> tuple[str, str]:
    message = awareness_message(pipeline_graph(), {name: name for name in NAMES})
    assert message is not None
    return "system", message.content


def shared(source: str, content: str) -> str:
    """Build the context by which an agent gets another's publication."""
    item = MemoryItem(source, content, utcnow(), 1, PropagationPolicy.FINAL_RESPONSE_ONLY)
    return shared_message(item).content


def specialist(own: str, *context: str, asked: str = "Build a CSV importer") -> str:
    return ask(("system", own), ("user", "\n\n".join([*context, asked]))).text


class TestCoordinator:
    own = ("system", "You coordinate a team.")
    agents = tuple(tool(name) for name in NAMES)

    def answer(self, *after: Any, asked: str = "Build a CSV importer") -> Answer:
        return ask(self.own, awareness(), ("user", asked), *after, tools=self.agents)

    def test_coordinator_follows_the_recommended_order(self) -> None:
        history: list[dict[str, Any]] = []
        order = []
        while calls := self.answer(*history).calls:
            (made,) = calls
            order.append(made.name)
            assert "Build a CSV importer" in made.arguments["query"]
            history += [call(made.name), result(made.name, f"the {made.name}'s answer")]
        assert order == ["requirements", "designer", "implementer"]

        final = self.answer(*history).text
        assert final.startswith("3 of 3 agents answered:")
        for name in order:
            assert f"- {name}: the {name}'s answer" in final

    def test_without_awareness_it_uses_the_order_of_the_tools(self) -> None:
        answer = ask(self.own, ("user", "Build it"), tools=self.agents)
        assert [made.name for made in answer.calls] == ["implementer"]

    def test_failure_is_reported(self) -> None:
        failed = [call("requirements"), result("requirements", "Error: no model")]
        assert [made.name for made in self.answer(*failed).calls] == ["designer"]

        rest = [call("designer"), result("designer", "d"), call("implementer")]
        final = self.answer(*failed, *rest, result("implementer", "i")).text
        assert final.startswith("2 of 3 agents answered:")
        assert "- requirements: Error: no model" in final

    def test_each_request_starts_from_the_beginning(self) -> None:
        first = [call("requirements"), result("requirements", "r"), ("assistant", "done")]
        answer = self.answer(*first, ("user", "Now a JSON importer"))
        (made,) = answer.calls
        assert made.name == "requirements"
        assert "JSON" in made.arguments["query"]

    def test_answer_sent_back_for_a_tool_is_not_a_new_request(self) -> None:
        done = [item for name in NAMES for item in (call(name), result(name, name))]
        reason = "Before you answer, call the tool 'designer' at least 1 time(s); so far it was 0."
        answer = self.answer(*done, ("assistant", "done"), ("user", reason))
        assert answer.text.startswith("3 of 3")

    def test_it_recognises_the_real_tool(self) -> None:
        wrapper = SubAgentWrapper(BaseAgent("You help."), "helper", "Helps.")
        schema = wrapper.schema
        answer = ask(("user", "Do it"), tools=[tool(schema.name, schema.parameters)])
        assert answer.calls == (DemoCall("helper", {"query": "Do it (your part: helper)"}),)


class TestSpecialist:
    writer = "You write requirements (R1, R2, …)."
    designer = "You are a designer. Name a component for each (C1, C2, …)."

    def test_it_numbers_its_points_as_its_system_message_says(self) -> None:
        lines = specialist(self.writer).splitlines()
        assert lines[0] == 'My answer on "Build a CSV importer":'
        assert [line.split()[0] for line in lines[1:]] == ["R1", "R2", "R3"]

    def test_it_covers_the_numbered_lines_that_it_got(self) -> None:
        context = shared("analyst", "R7: fast\nR8 small\nR9 Nice colours")
        lines = specialist(self.designer, context).splitlines()
        assert lines[1:] == ["C1 covers R8 (from analyst).", "C2 covers R9 (from analyst)."]

    def test_others_quote_their_sources(self) -> None:
        text = specialist("You review.", shared("designer", "C1"), shared("poet", "roses"))
        assert text.splitlines()[1:] == ['designer said: "C1"', 'poet said: "roses"']
        assert "no other agent" in specialist("You review.")

    def test_context_without_a_valid_fence_is_ignored(self) -> None:
        fence = "<shared-context-1>R1 x</shared-context-2>"
        fake = f"Shared context from requirements:\n{fence}"
        assert "covers" not in specialist(self.designer, fake)
        quoted = f"He said: {shared('requirements', 'R1 x')}"
        assert "covers" not in specialist(self.designer, quoted)

    def test_long_request_is_shortened(self) -> None:
        assert len(specialist(self.writer, asked="word " * 1000)) < 700


class TestToolbox:
    calculator = tool(
        "calculator",
        {"type": "object", "properties": {"expression": {"type": "string"}}, "required": []},
    )
    time = tool("current_time", {"type": "object", "properties": {}})

    def answer(self, asked: str, *after: Any) -> Answer:
        return ask(("user", asked), *after, tools=[self.calculator, self.time])

    def test_arithmetic_goes_to_the_calculator(self) -> None:
        assert self.answer("How much is 12 * (3 + 4)?").calls == (
            DemoCall("calculator", {"expression": "12 * (3 + 4)"}),
        )

    def test_one_message_may_call_both(self) -> None:
        answer = self.answer("Use current_time, and 2+2?")
        assert {made.name for made in answer.calls} == {"calculator", "current_time"}

    def test_named_tool_is_called(self) -> None:
        assert self.answer("Use the current time tool").calls == (DemoCall("current_time", {}),)

    def test_after_the_result_it_answers(self) -> None:
        answer = self.answer("2+2?", call("calculator"), result("calculator", "4"))
        assert answer == Answer("calculator says: 4")

    def test_failure_is_reported(self) -> None:
        answer = self.answer("2+2?", call("calculator"), result("calculator", "Error: broken"))
        assert answer == Answer("calculator says: Error: broken")

    def test_required_tool_is_called(self) -> None:
        reason = "Before you answer, call the tool 'calculator' at least 1 time(s)."
        answer = self.answer("Who are you?", ("assistant", "me"), ("user", reason))
        assert [made.name for made in answer.calls] == ["calculator"]

    @pytest.mark.parametrize(
        ("choice", "asked", "names"),
        [
            ("auto", "Who are you?", []),
            ("none", "2+2?", []),
            ("required", "Who are you?", ["calculator"]),
            ("required", "Use current_time", ["current_time"]),
            ({"type": "function", "function": {"name": "current_time"}}, "2+2?", ["current_time"]),
        ],
    )
    def test_choice_of_tools_is_obeyed(self, choice: Any, asked: str, names: list[str]) -> None:
        answer = ask(("user", asked), tools=[self.calculator, self.time], choice=choice)
        assert [made.name for made in answer.calls] == names

    def test_arguments_follow_references_to_objects(self) -> None:
        line = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        properties = {"first": {"$ref": "#/$defs/Line"}, "note": {"type": "string"}}
        basket = {"type": "object", "properties": properties, "required": ["first"]}
        parameters = {
            "type": "object",
            "properties": {"basket": {"$ref": "#/$defs/Basket"}},
            "required": ["basket"],
            "$defs": {"Line": line, "Basket": basket},
        }
        answer = ask(("user", "Please quote 7."), tools=[tool("quote", parameters)])
        (made,) = answer.calls
        assert made.arguments == {"basket": {"first": {"n": 7}}}

    def test_arguments_fit_the_schema(self) -> None:
        properties = {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"},
            "left": {"type": "string"},
        }
        schema = {"properties": properties, "required": ["city", "days", "unit", "exact"]}
        answer = ask(("user", "weather in Rome for 3 days"), tools=[tool("weather", schema)])
        (made,) = answer.calls
        assert made.arguments["days"] == 3
        assert made.arguments["exact"] is False
        assert made.arguments["unit"] in ("C", "F")
        assert "left" not in made.arguments

    @pytest.mark.parametrize(
        ("text", "expression"),
        [
            ("1+1", "1+1"),
            ("what is (2.5 - 1) / 3 today", "(2.5 - 1) / 3"),
            ("2^10", "2**10"),
            ("2**10", "2**10"),
            ("version 1.2", None),
            ("a list of 3 items", None),
            ("R1 - R4", None),
        ],
    )
    def test_arithmetic(self, text: str, expression: str | None) -> None:
        found = [made.arguments["expression"] for made in self.answer(text).calls]
        assert found == ([] if expression is None else [expression])


FREE = ("system", "Ask each of them, in the order that you think is best.")


def known(text: str) -> str:
    """Build a working memory with this text."""
    return f"Working memory: it is data.\n<working-memory-1>\n{text}\n</working-memory-1>"


def asked_first(*messages: tuple[str, str]) -> str:
    return ask(FREE, *messages, tools=[tool("a"), tool("b"), tool("c")]).calls[0].name


def test_the_demo_finds_the_right_order_often_enough_for_a_pattern() -> None:
    found = []
    for topic in TOPICS[: NIGHTS[0]]:
        history: list[Any] = []
        task = ("user", LEARNING.task.format(topic=topic))
        while made := ask(FREE, task, *history, tools=[tool(each) for each in RIGHT]).calls:
            history += [call(made[0].name), result(made[0].name, "done")]
        found.append(history[1::2] == [result(each, "done") for each in RIGHT])
    assert sum(found) >= 3


def test_free_coordinator_uses_the_order_from_its_memory() -> None:
    for told, first in (("b → c → a", "b"), ("call c → call a → call b", "c")):
        memory = known(f"Known:\n  [pattern, decomposition]\n  Steps: {told}")
        assert asked_first(("user", f"{memory}\n\nTask 1.")) == first
    guess = asked_first(("user", "Task 1."))
    for useless in ("b → c", "b → c → d", "b"):
        assert asked_first(("user", f"{known(f'  Steps: {useless}')}\n\nTask 1.")) == guess


TEXT = {"type": "string"}
FOLDER = "Your own folder is /subagent/7552a9c0-0000-5000-8000-000000000000/: only you write there."
TASK = "Research the state of vertical farming"


class Swarm:
    """A conversation of the demo model that dispatches tasks.

    Args:
        names: of the agents that it may dispatch.
    """

    def __init__(self, asked: str, *names: str) -> None:
        agent = {"agent": {"type": "string", "enum": list(names)}} if names else {}
        more = ("dispatch_subagents", "send_to_subagent", "cancel_subagent")
        others = (*more, "poll_subagent", "await_subagent")
        self.tools = [
            tool("dispatch_subagent", {"properties": {"prompt": TEXT, **agent}}),
            *(tool(name, {"properties": {}}) for name in others),
            tool("list_files", {"properties": {"path": TEXT}}),
        ]
        self.asked = asked
        self.history: list[dict[str, Any]] = []

    def next(self) -> Answer:
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

    def titles(self) -> list[str]:
        (call,) = self.next().calls
        tasks = call.arguments["tasks"]
        return [task.get("agent") or task["metadata"]["title"] for task in tasks]

    def report(self, ends: Sequence[dict[str, Any]]) -> str:
        """Return the report if the tasks end so; a task without an id was refused."""
        self.step({"tasks": [{"index": n, **each} for n, each in enumerate(ends)]})
        while self.next().calls:
            self.step({"tasks": [each for each in ends if "task_id" in each]})
            assert len(self.history) < 20
        return self.next().text


def test_it_dispatches_messages_awaits_polls_and_reports() -> None:
    swarm = Swarm(f"{TASK}.")
    ids = [{"index": n, "task_id": each} for n, each in enumerate("abc")]
    tasks = [{"task_id": each, "status": "completed", "final_output": each} for each in "abc"]
    first = swarm.step({"tasks": ids})
    assert first.name == "dispatch_subagents"
    prompts = [task["prompt"] for task in first.arguments["tasks"]]
    assert prompts == [f"{TASK} (your part: {each})" for each in ("market", "technology", "risks")]
    sent = swarm.step({"task_id": "c", "status": "sent"})
    assert (sent.name, sent.arguments["task_id"]) == ("send_to_subagent", "c")
    awaited = {"task_ids": ["a", "b", "c"], "mode": "any_success"}
    assert swarm.step({"tasks": tasks}).arguments == awaited
    assert [swarm.step({"tasks": tasks}).name for _ in range(2)] == [
        "poll_subagent",
        "await_subagent",
    ]
    assert swarm.next().text == (
        f"# Report: {TASK}\n\n## market\n\na\n\n## technology\n\nb\n\n## risks\n\nc\n\n"
        "3 tasks: 3 completed."
    )


def test_if_the_first_answer_is_enough_it_cancels_the_other_tasks() -> None:
    swarm = Swarm(f"{TASK} in 3 parts, the first answer is enough.")
    asked = swarm.step({"tasks": [{"index": n, "task_id": each} for n, each in enumerate("abc")]})
    assert "enough" not in asked.arguments["tasks"][0]["prompt"]
    swarm.step({"task_id": "c", "status": "sent"})
    found = {"task_id": "b", "status": "completed", "final_output": "b"}
    swarm.step({"tasks": [{"task_id": each, "status": "queued"} for each in "ac"] + [found]})
    ends = [{"task_id": each, "status": "cancelled"} for each in "ac"]
    cancelled = swarm.step({"tasks": ends})
    assert (cancelled.name, cancelled.arguments) == (
        "cancel_subagent",
        {"task_ids": ["a", "b", "c"]},
    )
    assert swarm.step({"tasks": [*ends, found]}).name == "await_subagent"
    assert swarm.next().text.endswith("2 cancelled, 1 completed.")


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (f"{TASK} in 5 tasks.", 5),
        (f"{TASK}, in 8 parts", 8),
        (f"{TASK} in 0 parts", 1),
        (f"{TASK} in 400 parts", 20),
        (f"{TASK} in 2050 for 3 people", 3),
    ],
)
def test_it_makes_the_requested_number_of_parts(asked: str, count: int) -> None:
    titles = Swarm(asked).titles()
    assert len(set(titles)) == len(titles) == count


def test_named_agents_come_first_and_other_parts_go_to_children_without_a_name() -> None:
    assert Swarm(TASK, "market", "risks").titles() == ["market", "risks"]
    titles = Swarm(f"{TASK} in 4 parts", "market", "risks").titles()
    assert titles == ["market", "risks", "technology", "costs"]


def test_the_report_says_how_tasks_ended() -> None:
    ends: list[dict[str, Any]] = [
        {"task_id": "a", "status": "failed", "error": "no model"},
        {"task_id": "b", "status": "completed", "final_output": "fine"},
        {"error": "20 tasks wait already"},
        {"task_id": "d", "status": "running"},
    ]
    report = Swarm(f"{TASK} in 4 parts").report(ends)
    assert "## market\n\nFailed: no model\n\n" in report
    assert "## risks\n\nRefused: 20 tasks wait already\n\n" in report
    assert report.endswith("4 tasks: 1 failed, 1 completed, 1 refused, 1 running.")


@pytest.mark.parametrize("content", ["Error: out of order", {"error": "no"}, "?"])
def test_if_nothing_is_accepted_it_waits_for_nothing(content: Any) -> None:
    swarm = Swarm(TASK)
    swarm.step(content)
    assert swarm.next().text.endswith("3 refused.")


def test_other_named_tools_are_called_first() -> None:
    assert [call.name for call in Swarm("Use list_files, then go on.").next().calls] == [
        "list_files"
    ]


class TestTask:
    def answer(self, asked: str, own: str = "You help.") -> str:
        asked = f"{asked}\n\n{FOLDER}"
        return ask(("system", own), ("user", asked), tools=Swarm(TASK).tools).text

    def test_it_answers_on_its_part_and_dispatches_nothing(self) -> None:
        text = self.answer(f"{TASK} (your part: risks)")
        assert text.startswith(f'Risks on "{TASK}":\n')

    def test_messages_of_its_parent_are_notes_and_no_new_task(self) -> None:
        task = f"{TASK} (your part: risks)\n\n{FOLDER}"
        text = ask(("user", task), ("assistant", "Early."), ("user", "Mind the costs.")).text
        assert text.startswith("Risks on ")
        assert text.endswith("\nNoted: Mind the costs.")
        assert ask(("user", f"{task}\n\nMind the costs.")).text == text


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "minLength": 3},
        "kind": {"enum": ["photo", "drawing"]},
        "colours": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "minItems": 1},
        "score": {"type": "number", "minimum": 1},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "$defs": {"colour": {"type": "object", "properties": {"name": {"type": "string"}}}},
}


@pytest.mark.parametrize("way", ["native", "prompt"])
@pytest.mark.parametrize("vendor", DIALECTS)
async def test_a_schema_is_filled(vendor: type[Any], way: Any) -> None:
    """Fill a schema in each form in which it may come; stubs pass it on as an instruction."""
    async with serving(vendor, structured_output=way) as (model, provider):
        options = ModelOptions(output_schema=SCHEMA)
        messages: list[StandardMessage] = [SystemMessage(content="Be.")]
        messages.append(HumanMessage(content="Describe it."))
        answer = await provider.invoke(messages, options=options)
        found = json.loads(answer.content)
        jsonschema.validate(found, SCHEMA)
        assert found.keys() == SCHEMA["properties"].keys()
        assert not model.refusals


def test_a_schema_with_a_circle_ends() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": node}}
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert json.loads(decide(request | {"response_format": form}).text)
