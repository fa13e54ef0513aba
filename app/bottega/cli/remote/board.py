"""View of a run: state folded from its events, drawn as a tree. Pure."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.tree import Tree

from bottega.cli.remote.spent import Spent
from bottega.events.payloads import (
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
