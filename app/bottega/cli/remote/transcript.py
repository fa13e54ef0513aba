"""A run as text that only grows: the agent's words as they come, other work in lines."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console

from bottega.cli.remote.board import Board
from bottega.cli.remote.events import Event
from bottega.cli.remote.spent import Spent
from bottega.cli.texts import one_line

_LONGEST_ARGUMENTS = 120


@dataclass(slots=True)
class Transcript:
    """Writer of what happens in a run.

    The words of the run's own agent go to ``out`` as they come if that is a terminal. Else only
    the answer goes there, so that a pipe gets nothing but the answer.

    Attributes:
        notes: where lines about tools, other agents and errors go.
    """

    notes: Console
    out: TextIO = field(default_factory=lambda: sys.stdout)
    _board: Board = field(default_factory=Board)
    _words: str = ""
    _written: str = ""
    _in_line: bool = False

    def show(self, event: Event) -> None:
        """Write what is new."""
        kind, data, of_root = event["type"], event["data"], event["task_id"] is None
        line = self._board.apply(event)
        if of_root and self.out.isatty():
            self._hear(kind, data)
        if kind.startswith("interrupt.") or (of_root and kind.startswith(("run.", "agent."))):
            return  # the answer, its cost or a question says it
        if line is not None:
            self.note(line, self._depth(event))
        elif kind == "tool.started":
            arguments = _short(data["arguments"])
            self.note(f"{event['agent']} calls {data['name']}{arguments}", self._depth(event))
        elif kind == "tool.failed":
            why = data["error"]["message"] or data["error"]["type"]
            self.note(f"{data['name']} failed: {why}", self._depth(event))

    def note(self, text: str, depth: int = 0) -> None:
        """Write a line beside the agent's words."""
        self._end_line()
        self.notes.print(
            "  " * depth + one_line(text),
            style="dim",
            markup=False,
            highlight=False,
            soft_wrap=True,
            emoji=False,
        )

    def end(self, run: dict[str, Any]) -> None:
        """Write the answer if it was not heard, or the error; then the tasks and the cost."""
        output = text_of(run["output"])
        if output.strip() and output.strip() != self._written.strip():
            self._write(output)
        self._end_line()
        if len(self._board.lines) > 1:
            self.notes.print(self._board.render(self._board.at))
        if run["error"] is not None:
            self.note(f"error: {run['error']['message']}")
        self.note(summary(run))

    def _depth(self, event: Event) -> int:
        line = self._board.lines.get(event["task_id"])
        return line.depth if line else 0

    def _hear(self, kind: str, data: dict[str, Any]) -> None:
        match kind:
            case "llm.started":
                self._end_line()
                self._words = self._written = ""
            case "llm.delta":
                self._words = self._words[: data["offset"]] + data["text"]
                if not self._written.startswith(self._words):
                    self._catch_up()
            case "llm.completed":
                self._words = text_of(data["message"].get("content"))
                if self._words != self._written:
                    self._catch_up()
                self._end_line()

    def _catch_up(self) -> None:
        """Write the words that are not written; all of them if the model began again."""
        if not self._words.startswith(self._written):
            self.note("(the model begins again)")
            self._written = ""
        self._write(self._words[len(self._written) :])
        self._written = self._words

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        self._in_line = not text.endswith("\n") if text else self._in_line

    def _end_line(self) -> None:
        if self._in_line:
            self._write("\n")


def text_of(content: Any) -> str:
    """Return a message's or a run's content as text; of a DAG, each agent's under its name."""
    match content:
        case None:
            return ""
        case str():
            return content
        case dict():
            return "\n\n".join(f"{name}:\n{text_of(each)}" for name, each in content.items())
        case list():
            return "".join(str(part.get("text") or "") for part in content)
    return str(content)


def summary(run: dict[str, Any]) -> str:
    """Return a run's status and cost, on one line."""
    usage = run["usage"]
    return str(run["status"]) if usage is None else f"{run['status']}, {Spent.of(usage)}"


def _short(arguments: Any) -> str:
    """Return a call's arguments on one line."""
    if not isinstance(arguments, dict):
        return ""
    text = json.dumps(arguments, ensure_ascii=False)
    cut = text if len(text) <= _LONGEST_ARGUMENTS else f"{text[:_LONGEST_ARGUMENTS]}…"
    return f" {cut}" if arguments else ""
