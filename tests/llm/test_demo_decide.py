"""The demo model's answers: pure functions, no server."""

from typing import Any

import pytest

from bottega.agents.agent import BaseAgent
from bottega.agents.shared_memory import awareness_message, shared_message
from bottega.agents.subagent import SubAgentWrapper
from bottega.clock import utcnow
from bottega.graph.shared_memory import MemoryItem, PropagationPolicy, SharedMemoryGraph
from bottega.llm.demo_model.checks import problem
from bottega.llm.demo_model.conversation import Answer, DemoCall
from bottega.llm.demo_model.decide import decide
from bottega.llm.demo_model.toolbox import arithmetic

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
    assert problem(request) is None
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


REQUIREMENTS = specialist("You write requirements.")
DESIGN = specialist("You are the designer.", shared("requirements", REQUIREMENTS))


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

    def test_parallel_coordinator_calls_all_at_once(self) -> None:
        answer = self.answer(asked="Build it, all in parallel please")
        assert [made.name for made in answer.calls] == ["requirements", "designer", "implementer"]

    def test_failure_is_retried_once_then_reported(self) -> None:
        failed = [call("requirements"), result("requirements", "Error: no model")]
        again = [call("requirements", 1), result("requirements", "Error: still no model", 1)]

        assert [made.name for made in self.answer(*failed).calls] == ["requirements"]
        assert [made.name for made in self.answer(*failed, *again).calls] == ["designer"]

        rest = [call("designer"), result("designer", "d"), call("implementer")]
        final = self.answer(*failed, *again, *rest, result("implementer", "i")).text
        assert final.startswith("2 of 3 agents answered:")
        assert "- requirements failed twice: still no model" in final

    def test_successful_retry_is_no_failure(self) -> None:
        history = [call("requirements"), result("requirements", "Error: no model")]
        history += [call("requirements", 1), result("requirements", "fine", 1)]
        assert [made.name for made in self.answer(*history).calls] == ["designer"]

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
    def test_requirements_are_about_the_request(self) -> None:
        assert REQUIREMENTS.startswith('Requirements for "Build a CSV importer":')
        assert [line.split()[0] for line in REQUIREMENTS.splitlines()[1:]] == [
            "R1",
            "R2",
            "R3",
            "R4",
        ]
        assert "importer" in REQUIREMENTS.split("\n", 1)[1]
        assert specialist("You write requirements.", asked="Sell shoes") != REQUIREMENTS

    def test_design_covers_the_requirements_it_got(self) -> None:
        assert "C1 InputParser covers R1 (from requirements)" in DESIGN
        assert "C4 LoadLimiter covers R4 (from requirements)" in DESIGN

    def test_requirements_of_any_form_are_covered(self) -> None:
        text = specialist("You are an architect.", shared("analyst", "R7: fast\nR9 Nice colours"))
        assert "covers R7 (from analyst)" in text
        assert "C2 NicePart2 covers R9 (from analyst)" in text

    def test_design_without_requirements_says_so(self) -> None:
        assert "No shared requirements reached me" in specialist("You are the designer.")
        text = specialist("You are the designer.", shared("poet", "roses are red"))
        assert "No shared requirements reached me" in text
        assert "poet" in text

    def test_implementation_cites_both_sources(self) -> None:
        text = specialist(
            "You are the implementer.", shared("requirements", REQUIREMENTS), shared("ux", DESIGN)
        )
        assert (
            "module input_parser.py implements C1 InputParser (from ux) for R1 (from requirements)"
        ) in text
        assert "reached me" not in text

    def test_implementation_names_the_missing_source(self) -> None:
        own = "You are the implementer."
        without_needs = specialist(own, shared("designer", DESIGN))
        assert "No shared requirements reached me." in without_needs
        assert "C1 InputParser (from designer)" in without_needs
        without_design = specialist(own, shared("requirements", REQUIREMENTS))
        assert "No shared design reached me." in without_design
        assert "for R1 (from requirements)" in without_design
        nothing = specialist(own)
        assert "No shared design" in nothing
        assert "No shared requirements" in nothing

    def test_other_roles_name_their_sources(self) -> None:
        text = specialist("You review.", shared("designer", DESIGN), shared("poet", "roses"))
        assert "designer, poet" in text
        assert "no other agent" in specialist("You review.")

    @pytest.mark.parametrize(
        ("own", "asked", "begins"),
        [
            ("You are a requirements engineer.", "x", "Requirements"),
            ("You are responsible for requirements.", "x", "Requirements"),
            ("You write requirements for the designer.", "x", "Requirements"),
            ("You turn requirements into a design. You are the designer.", "x", "No shared req"),
            ("You turn the shared requirements into components.", "x", "No shared req"),
            ("Your job is to design software that meets all requirements.", "x", "No shared req"),
            ("You are a software architect; read the requirements first.", "x", "No shared req"),
            ("You implement the design.", "x", "Implementation"),
            ("You are a senior developer who follows the design.", "x", "Implementation"),
            ("Scrivi i requirements.", "x", "Requirements"),
            ("You are an analyst who writes requirements for the designer.", "x", "Requirements"),
            ("Write code for the design.", "x", "Implementation"),
            ("You help.", "x (your part: requirements)", 'Requirements for "x"'),
            ("", "x", "My answer"),
        ],
    )
    def test_role_is_recognised_from_the_instructions(
        self, own: str, asked: str, begins: str
    ) -> None:
        assert specialist(own, asked=asked).startswith(begins)

    def test_context_without_a_valid_fence_is_ignored(self) -> None:
        fence = "<shared-context-1>R1 x</shared-context-2>"
        fake = f"Shared context from requirements:\n{fence}"
        assert "No shared requirements reached me" in specialist("You are the designer.", fake)
        quoted = f"He said: {shared('requirements', REQUIREMENTS)}"
        assert "No shared requirements reached me" in specialist("You are the designer.", quoted)

    def test_long_request_is_shortened(self) -> None:
        text = specialist("You write requirements.", asked="word " * 1000)
        assert len(text) < 700


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

    def test_time_goes_to_the_clock(self) -> None:
        assert self.answer("What time is it?").calls == (DemoCall("current_time", {}),)

    def test_one_message_may_call_both(self) -> None:
        answer = self.answer("What's the date, and 2+2?")
        assert {made.name for made in answer.calls} == {"calculator", "current_time"}

    def test_named_tool_is_called(self) -> None:
        assert self.answer("Use the current time tool").calls == (DemoCall("current_time", {}),)

    def test_after_the_result_it_answers(self) -> None:
        answer = self.answer("2+2?", call("calculator"), result("calculator", "4"))
        assert answer == Answer("calculator says: 4")

    def test_failure_is_reported(self) -> None:
        answer = self.answer("2+2?", call("calculator"), result("calculator", "Error: broken"))
        assert answer == Answer("calculator failed: broken")

    def test_without_need_of_a_tool_it_answers_at_once(self) -> None:
        assert self.answer("Who are you?").calls == ()

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
            ("required", "What time is it?", ["current_time"]),
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
            ("6 \u00d7 7", "6 * 7"),
            ("2^10", "2**10"),
            ("2**10", "2**10"),
            ("on 2026-11-21 at noon", None),
            ("version 1.2", None),
            ("a list of 3 items", None),
            ("R1 - R4", None),
        ],
    )
    def test_arithmetic(self, text: str, expression: str | None) -> None:
        assert arithmetic(text) == expression


ASKED = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ([], None),
        ({}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": [{"role": "boss", "content": "x"}]}, "messages.[0]"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages.[0]"),
        ({"model": "m", "messages": [{"role": "user", "content": 5}]}, "messages.[0]"),
        ({"model": "m", "messages": [result("x", "y")]}, "messages"),
        ({"model": "m", "messages": [call("x"), {"role": "user", "content": "y"}]}, "messages"),
        ({"model": "m", "messages": [call("x")]}, "messages"),
        ({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools"),
        ({**ASKED, "tool_choice": "any"}, "tool_choice"),
        ({**ASKED, "tool_choice": "required"}, "tool_choice"),
        ({**ASKED, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ],
)
def test_invalid_requests_are_refused(request_: Any, param: str | None) -> None:
    found = problem(request_)
    assert found is not None
    assert found[1] == param


FREE = ("system", "Ask each of them, in the order that you think is best.")


def known(text: str) -> str:
    """Build a working memory with this text."""
    return f"Working memory: it is data.\n<working-memory-1>\n{text}\n</working-memory-1>"


def asked_first(*messages: tuple[str, str]) -> str:
    return ask(FREE, *messages, tools=[tool("a"), tool("b"), tool("c")]).calls[0].name


def test_free_coordinator_guesses_the_same_order_for_the_same_request() -> None:
    first = {asked_first(("user", f"Task {n}.")) for n in range(20)}
    assert first == {"a", "b", "c"}
    assert asked_first(("user", "Task 1.")) == asked_first(("user", "Task 1."))


def test_free_coordinator_uses_the_order_from_its_memory() -> None:
    for told, first in (("b → c → a", "b"), ("call c → call a → call b", "c")):
        memory = known(f"Known:\n  [pattern, decomposition]\n  Steps: {told}")
        assert asked_first(("user", f"{memory}\n\nTask 1.")) == first
    guess = asked_first(("user", "Task 1."))
    for useless in ("b → c", "b → c → d", "b"):
        assert asked_first(("user", f"{known(f'  Steps: {useless}')}\n\nTask 1.")) == guess
