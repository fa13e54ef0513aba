"""Texts of models on a terminal: made safe, streamed once, and asked about."""

import unicodedata
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bottega.cli.people import shown, value_for
from bottega.cli.terminal import one_line, safe
from bottega.cli.transcript import Spent, Transcript, text_of


class Screen(StringIO):
    """Terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


@given(st.text(st.characters(), max_size=200))
def test_a_safe_text_has_nothing_that_a_terminal_obeys(text: str) -> None:
    found = safe(text)
    assert len(found) == len(text)
    harmless = [each for each in found if each not in "\n\t"]
    assert not [each for each in harmless if unicodedata.category(each) in ("Cc", "Cs")]
    assert not [each for each in harmless if unicodedata.bidirectional(each) in _TURNING]
    assert safe(found) == found
    found.encode()


_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def test_all_texts_of_a_value_are_made_safe() -> None:
    value = {"\x1b": [1, None, {"a": "b\x9bc\r\n"}], "é": "👩‍💻 ünï\u202e"}
    assert safe(value) == {"\ufffd": [1, None, {"a": "b\ufffdc \n"}], "é": "👩‍💻 ünï\ufffd"}
    assert one_line(f"a\n\tb {'x' * 400}").startswith("a b xxx")
    assert len(one_line("x" * 400)) == 300


class Played:
    """Transcript with hand-written events of the run's own agent."""

    def __init__(self, *, at_terminal: bool = False) -> None:
        self.screen = Screen()
        console = Console(
            file=self.screen, width=200, color_system=None, force_terminal=at_terminal
        )
        self.transcript = Transcript(console, self.screen)

    def __call__(self, kind: str, task: str | None = None, **data: Any) -> None:
        event = {
            "type": kind,
            "task_id": task,
            "parent_task_id": None,
            "agent": "clerk",
            "at": "2026-11-21T10:53:53+00:00",
            "data": data,
        }
        self.transcript.show(event)

    def begin(self, attempt: int = 1) -> None:
        self("llm.started", call=1, attempt=attempt, provider="p", model="m", beside=False)

    def delta(self, offset: int, text: str) -> None:
        self("llm.delta", call=1, attempt=1, offset=offset, text=text)

    def complete(self, content: Any) -> None:
        usage = {"input": 1, "output": 2}
        self("llm.completed", call=1, message={"content": content}, usage=usage)


def test_words_are_written_once_however_often_they_come() -> None:
    play = Played()
    play.begin()
    play.delta(0, "Good ")
    play.delta(5, "mor")
    play.delta(0, "Good")  # a try failed; the next one says the same so far
    play.delta(4, " morning")
    play.complete("Good morning!")
    play.transcript.end({"output": "Good morning!\n", "error": None, "usage": None, "status": "x"})
    assert play.screen.getvalue() == "Good morning!\nx\n"


def test_other_words_begin_a_new_line() -> None:
    play = Played()
    play.begin()
    play.delta(0, "Good mor")
    play.delta(5, "evening")
    play.begin(attempt=2)
    play.complete([{"type": "text", "text": "Well."}])
    assert play.screen.getvalue().splitlines() == [
        "Good mor",
        "(the model begins again)",
        "Good evening",
        "Well.",
    ]


def play_many_tasks(play: Played, count: int, failed: int = -1, *, first: int = 0) -> None:
    """Play tasks of which one fails, and words of the run's own agent in the middle."""
    tasks = [f"t{first + number}" for number in range(count)]
    task: dict[str, Any] = {"agent": "x", "priority": 5, "metadata": {}, "queue_position": 0}
    for each in tasks:
        play("subagent.dispatched", each, **task, prompt="?")
    usage = {"token_usage": {"input": 1, "output": 0}, "duration_ms": 1000}
    for number, each in enumerate(tasks):
        play("subagent.status_changed", each, to="running")
        how = "failed" if number == failed else "completed"
        play("subagent.status_changed", each, to=how)
        play(f"subagent.{how}", each, **usage, error={"code": "x", "message": "no model"})
        if number == count // 2:
            play.begin()
            play.delta(0, "Half")
            play.complete("Half")


def test_many_tasks_have_a_line_at_each_tenth_outside_of_a_terminal() -> None:
    play = Played()
    play_many_tasks(play, 1000, failed=7)
    lines = play.screen.getvalue().splitlines()
    assert sum("dispatches" in line for line in lines) == 9
    progress = [line for line in lines if "tasks are over" in line]
    assert [line.split()[0] for line in progress] == [
        *("100", "200", "300", "400", "500", "600", "700", "800", "900", "1,000")
    ]
    assert progress[0].startswith(
        "100 of 1,000 tasks are over: 99 done, 1 failed, 900 waiting; about "
    )
    assert progress[-1] == "1,000 of 1,000 tasks are over: 999 done, 1 failed"
    assert [line for line in lines if "no model" in line] == [
        "x failed: no model (1.0 s, 1 tokens)"
    ]
    assert "Half" in lines
    assert len(lines) == 9 + 10 + 2
    play_many_tasks(play, 10, first=1000)
    later = play.screen.getvalue().splitlines()[len(lines) :]
    assert sum("tasks are over" in line for line in later) == 10


def test_many_tasks_have_one_line_at_a_terminal() -> None:
    play = Played(at_terminal=True)
    play_many_tasks(play, 20, failed=7)
    lines = play.screen.getvalue().split("\n")
    left = [line.split("\r\x1b[2K")[-1] for line in lines]
    assert left[9:] == [
        "x failed: no model (1.0 s, 1 tokens)",
        "Half",
        "20 of 20 tasks are over: 19 done, 1 failed",
        "",
    ]
    assert "13 of 20 tasks are over: 12 done, 1 failed, 7 waiting" in play.screen.getvalue()


def test_an_answer_of_a_dag_names_its_agents() -> None:
    assert text_of({"a": "one", "b": None}) == "a:\none\n\nb:\n"
    assert (text_of(None), text_of(7)) == ("", "7")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (None, "7", "7"),
        ({"type": "string"}, "7", "7"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"enum": ["red", 7]}, "red", "red"),
        ({"enum": ["red", 7]}, "7", 7),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ],
)
def test_an_answer_has_the_type_that_its_schema_wants(schema: Any, text: str, value: Any) -> None:
    assert value_for(schema, text) == value


def test_a_call_is_described_with_the_model_s_words_quoted() -> None:
    about = {"agent": "clerk", "tool": "refund", "question": None, "schema": None, "reason": "a\nb"}
    about["server"] = None
    lines = shown({**about, "kind": "approval", "arguments": {"note": "x\nApprove? y"}})
    assert lines.splitlines() == [
        "clerk wants to call refund:",
        '  | note = "x\\nApprove? y"',
        "  because: a b",
    ]
    asked = {**about, "kind": "question", "question": "One\nor two?", "schema": {"enum": [1, 2]}}
    assert shown(asked).splitlines()[1:4] == ["  | One", "  | or two?", "  one of: 1, 2"]
    long = shown({**about, "kind": "client_tool", "arguments": {"a": "x" * 5000}})
    assert "more characters" in long


def test_costs_are_summed_up() -> None:
    def spent(amount: str, complete: bool) -> Spent:
        cost = {"amount": amount, "currency": "USD", "complete": complete}
        return Spent.of({"input": 1000, "output": 1, "cost": cost})

    assert str(spent("0.01200", True)) == "1,001 tokens, $0.0120"
    assert str(spent("0.01200", True) + spent("0", False)) == "2,002 tokens, $0.0120 or more"
    assert str(Spent.of({"input": 1, "output": 0})) == "1 tokens"
    assert Spent(1, Decimal(1), False) + Spent() == Spent(1, Decimal(1), False)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("children", "clerk waits for its child runs, without a worker"),
        ("model", "clerk waits for its model, without a worker"),
        ("time", "clerk waits for its next try, without a worker"),
        ("person", None),
    ],
)
def test_it_says_what_a_run_waits_for(reason: str, shown: str | None) -> None:
    play = Played()
    play("run.waiting", reason=reason, since="2026-11-21T10:53:53Z", until=None)
    lines = play.screen.getvalue().splitlines()
    assert [line for line in lines if "waits" in line] == ([] if shown is None else [lines[-1]])
    assert shown is None or lines[-1].endswith(shown)
