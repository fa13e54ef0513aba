"""A run as text that only grows: the agent's words as they come, other work in lines.

Sums of tokens and costs, as text. Pure.

View of a run: state folded from its events, drawn as a tree. Pure.

A run's tree of agents on a screen: redrawn on a terminal, as lines of text elsewhere.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.tree import Tree

from bottega.cli.client import Event
from bottega.cli.terminal import one_line
from bottega.clock import utcnow
from bottega.events.types import (
    ContextReceived,
    EventError,
    LlmCompleted,
    LlmStarted,
    MemoryPublished,
    SubagentDequeued,
    SubagentDispatched,
    SubagentEnded,
    tool_name_of,
)


@dataclass(frozen=True, slots=True)
class Spent:
    """Sum of what model calls took.

    Attributes:
        tokens: input and output.
        amount: US dollars.
        complete: false if some of the tokens have no known price.
    """

    tokens: int = 0
    amount: Decimal = Decimal(0)
    complete: bool = True

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Spent":
        """Read the ``usage`` of an event or a run."""
        tokens = usage["input"] + usage["output"]
        cost = usage.get("cost")
        if cost is None:
            return cls(tokens, complete=not tokens)
        return cls(tokens, Decimal(cost["amount"]), cost["complete"])

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.tokens + other.tokens,
            self.amount + other.amount,
            self.complete and other.complete,
        )

    def __str__(self) -> str:
        tokens = f"{self.tokens:,} tokens"
        if not self.amount:
            return tokens
        return f"{tokens}, ${self.amount:.4f}{'' if self.complete else ' or more'}"


_MARKS = {
    "queued": "[dim]○[/]",
    "done": "[green]✓[/]",
    "failed": "[red]✗[/]",
    "stopped": "[yellow]■[/]",
}
_ENDS = {
    "agent.completed": ("done", "answered"),
    "agent.failed": ("failed", "failed"),
    "subagent.completed": ("done", "answered"),
    "subagent.failed": ("failed", "failed"),
    "subagent.timeout": ("failed", "timed out"),
    "subagent.cancelled": ("stopped", "cancelled"),
}
"""Mark and state of a line after a final event."""

_NAMELESS = (None, "subagent")
"""Values for a task without an agent of its own."""

_NEVER = datetime.min.replace(tzinfo=UTC)

_MAX_TEXT = 48
"""Characters shown of a model's text."""


@dataclass(slots=True)
class Line:
    """Work of one agent: the root, one call of a sub-agent, or an asynchronous task.

    Attributes:
        is_task: asynchronous: queued, and ended by an event of the task, not of its agent.
        depth: number of the lines above it.
    """

    agent: str
    started: datetime
    state: str = "starting"
    ended: datetime | None = None
    spent: Spent = field(default_factory=Spent)
    text: str = ""
    received: list[str] = field(default_factory=list)
    children: "list[Line]" = field(default_factory=list)
    mark: str = "busy"
    is_task: bool = False
    depth: int = 0


@dataclass(slots=True)
class Board:
    """Tree of a run's agents.

    Attributes:
        lines: by task id; ``None`` is the root.
        tops: lines without another above: the root, or the nodes of a DAG.
        at: time of the last event.
    """

    lines: dict[str | None, Line] = field(default_factory=dict)
    tops: list[Line] = field(default_factory=list)
    status: str = "queued"
    at: datetime = _NEVER

    def apply(self, event: dict[str, Any]) -> str | None:
        """Apply one event; return a line of text for output without a terminal."""
        self.at = at = datetime.fromisoformat(event["at"])
        kind, data = event["type"], event["data"]
        if kind.startswith("run."):
            return self._apply_run(kind.removeprefix("run."), at)
        if kind == "agent.started":
            return self._start(event, at)
        if kind == "subagent.dispatched":
            return self._queue(event, at)
        line = self.lines.get(event["task_id"])
        if said := _notice(kind, data, line.agent if line else event["agent"] or "the run"):
            return said
        if line is None:
            return None
        if kind in _ENDS:
            return _end(line, event, at)
        if kind.startswith("subagent."):
            return _move(line, event, at)
        if kind.startswith("memory."):
            return _share(line, kind, data)
        return _work(line, kind, data) if line.ended is None else None

    def _apply_run(self, status: str, at: datetime) -> str:
        self.status = status
        if status in ("completed", "failed", "timeout", "cancelled"):
            for line in self.lines.values():
                if line.ended is None:
                    line.ended, line.mark, line.state = at, "stopped", "stopped"
        return f"run {status}"

    def _start(self, event: dict[str, Any], at: datetime) -> str | None:
        """Start an agent; a task has its line already."""
        line = self.lines.get(event["task_id"])
        if line is None:
            line = self._add(event, Line(event["agent"], at))
        elif line.is_task:
            return None
        return f"{line.agent} starts"

    def _queue(self, event: dict[str, Any], at: datetime) -> str | None:
        if event["task_id"] in self.lines:
            return None
        task = SubagentDispatched.of(event["data"])
        line = self._add(event, Line(_name(task), at, mark="queued", is_task=True))
        line.state = f"queued, priority {task.priority}"
        parent = self.lines.get(event["parent_task_id"])
        who = parent.agent if parent else "somebody"
        ahead = task.queue_position
        return f"{who} dispatches {line.agent} (priority {task.priority}, {ahead} ahead)"

    def _add(self, event: dict[str, Any], line: Line) -> Line:
        above = None if event["task_id"] is None else self.lines.get(event["parent_task_id"])
        self.lines[event["task_id"]] = line
        if above is None:
            self.tops.append(line)
        else:
            line.depth = above.depth + 1
            above.children.append(line)
        return line

    def render(self, now: datetime) -> Tree:
        """Draw the tree."""
        tree = Tree(f"[bold]run[/] {self.status}", guide_style="dim")
        for line in self.tops:
            _grow(tree, line, now)
        return tree


def _name(task: SubagentDispatched) -> str:
    """Name a task: its agent, else the title that its parent gave, else its prompt's start."""
    if task.agent not in _NAMELESS:
        return str(task.agent)
    return str(task.metadata.get("title") or _shortened(task.prompt))


def _notice(kind: str, data: dict[str, Any], agent: str) -> str | None:
    """Describe an event that changes no line."""
    match kind:
        case "warning":
            return f"warning: {data['message']}"
        case "subagent.backpressure":
            return f"{agent} is refused a task: {data['message']}"
        case "subagent.circuit_opened":
            again = f"again in {data['retry_after_ms'] / 1000:g} s"
            return f"tasks like {agent} are refused after {data['failures']} failures; {again}"
    return None


def _move(line: Line, event: dict[str, Any], at: datetime) -> str | None:
    """Change a task's state, without ending it."""
    match event["type"].removeprefix("subagent."):
        case "dequeued":
            line.started, line.mark, line.state = at, "busy", "running"
            waited = SubagentDequeued.of(event["data"]).waited_ms / 1000
            return f"{line.agent} starts after {waited:.1f} s in the queue"
        case "status_changed" if line.ended is None:
            state = event["data"]["to"]
            if state in ("running", "streaming", "waiting"):  # the others have their own event
                line.mark, line.state = "busy", state
        case "resumed":
            line.mark, line.state = "queued", "queued again"
            return f"{line.agent} is queued again"
    return None


def _share(line: Line, kind: str, data: dict[str, Any]) -> str:
    if kind == "memory.injected":
        context = ContextReceived.of(data)
        line.received.append(f"{context.source} v{context.version}")
        return f"{line.agent} receives what {context.source} published"
    return f"{line.agent} publishes version {MemoryPublished.of(data).version}"


def _work(line: Line, kind: str, data: dict[str, Any]) -> str | None:
    """Show an agent's current activity."""
    match kind:
        case "llm.started":
            line.state, line.text = f"asks the model (call {LlmStarted.of(data).call})", ""
        case "llm.delta":
            line.text = line.text[: data["offset"]] + data["text"]
            line.state = f"[italic]…{escape(' '.join(line.text.split())[-_MAX_TEXT:])}[/]"
        case "llm.completed":
            line.spent += Spent.of(LlmCompleted.of(data).usage)
            line.state = "reads the answer"
        case "llm.failed":
            error = EventError.of(data)
            line.state = f"[yellow]model failed: {escape(error.code or '')}[/]"
            return f"{line.agent}: {error.message}"
        case "tool.started":
            line.state = f"calls {escape(tool_name_of(data))}"
        case "interrupt.created":
            line.state = f"waits for people ({escape(data['tool'])})"
            return f"{line.agent} waits for people: {data['kind']}, {data['tool']}"
        case "interrupt.resolved":
            line.state = f"goes on: {data['status']}"
            return f"{line.agent}: a call that waited for people is {data['status']}"
    return None


def _end(line: Line, event: dict[str, Any], at: datetime) -> str | None:
    """Close a line, once; that of a task by the event of the task."""
    of_task = event["type"].startswith("subagent.")
    if line.is_task is not of_task or line.ended is not None:
        return None
    line.ended = at
    line.mark, line.state = _ENDS[event["type"]]
    said = line.state
    if of_task:
        ended = SubagentEnded.of(event["data"])
        line.started = at - timedelta(milliseconds=ended.duration_ms)
        line.spent = Spent.of(ended.token_usage)
        if reason := ended.error.message:
            line.state = f"{said}: {escape(_shortened(reason))}"
            said = f"{said}: {reason}"
    return f"{line.agent} {said} ({_seconds(line, at)}, {line.spent})"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _grow(tree: Tree, line: Line, now: datetime) -> None:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Spinner("dots", style="cyan") if line.mark == "busy" else _MARKS[line.mark],
        f"[bold]{escape(line.agent)}[/]",
        line.state,
        f"[dim]{_seconds(line, now)} · {line.spent}[/]",
        f"[magenta]← {escape(', '.join(line.received))}[/]" if line.received else "",
    )
    branch = tree.add(row)
    for child in line.children:
        _grow(branch, child, now)


def _seconds(line: Line, now: datetime) -> str:
    return f"{max(0.0, ((line.ended or now) - line.started).total_seconds()):.1f} s"


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


_PER_S = 12


@contextmanager
def drawing(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows an event."""
    board = Board()

    def fold(event: dict[str, Any]) -> None:
        board.apply(event)

    def write(event: dict[str, Any]) -> None:
        if line := board.apply(event):
            text = f"{event['seq']:>4}  {one_line(line)}"
            console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    if console.is_terminal:
        tree = partial(_tree, board)
        with Live(get_renderable=tree, console=console, refresh_per_second=_PER_S):
            yield fold
        return
    yield write


def _tree(board: Board) -> Tree:
    return board.render(utcnow())
