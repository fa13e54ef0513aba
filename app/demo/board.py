"""What the demo shows of a run: folded from its events, drawn as a tree. Pure."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.tree import Tree

_MARKS = {"done": "[green]✓[/]", "failed": "[red]✗[/]", "stopped": "[yellow]■[/]"}

_SHOWN = 48
"""Characters of what a model is saying."""


@dataclass(slots=True)
class Line:
    """One agent's work: the root, or one call of a sub-agent."""

    agent: str
    started: datetime
    state: str = "starting"
    ended: datetime | None = None
    tokens: int = 0
    text: str = ""
    received: list[str] = field(default_factory=list)
    children: "list[Line]" = field(default_factory=list)
    mark: str = "busy"


@dataclass(slots=True)
class Board:
    """The tree of a run's agents.

    Attributes:
        lines: by task id; ``None`` is the root.
        status: of the run; the final one once it is over.
    """

    lines: dict[str | None, Line] = field(default_factory=dict)
    status: str = "queued"

    def apply(self, event: dict[str, Any]) -> str | None:
        """Take in one event; answers a line of text for those who cannot see the tree."""
        at = datetime.fromisoformat(event["at"])
        kind, data, agent = event["type"], event["data"], event["agent"]
        if kind.startswith("run."):
            return self._apply_run(kind.removeprefix("run."), at)
        if kind == "agent.started":
            self._start(event, at)
            return f"{agent} starts"
        line = self.lines.get(event["task_id"])
        if line is None:
            return None
        match kind:
            case "llm.started":
                line.state, line.text = f"asks the model (call {data['call']})", ""
            case "llm.delta":
                line.text = line.text[: data["offset"]] + data["text"]
                line.state = f"[italic]…{escape(' '.join(line.text.split())[-_SHOWN:])}[/]"
            case "llm.completed":
                usage = data["usage"]
                line.tokens += usage["input_tokens"] + usage["output_tokens"]
                line.state = "reads the answer"
            case "llm.failed":
                line.state = f"[yellow]model failed: {escape(data['error']['code'])}[/]"
                return f"{agent}: {data['error']['message']}"
            case "tool.started":
                line.state = f"calls {escape(data['name'])}"
            case "memory.injected":
                line.received.append(f"{data['source']} v{data['version']}")
                return f"{agent} receives what {data['source']} published"
            case "memory.published":
                return f"{agent} publishes version {data['version']}"
            case "agent.completed" | "agent.failed":
                return self._end(line, kind, at)
        return None

    def _apply_run(self, status: str, at: datetime) -> str:
        self.status = status
        if status in ("completed", "failed", "timeout", "cancelled"):
            for line in self.lines.values():
                if line.ended is None:
                    line.ended, line.mark, line.state = at, "stopped", "stopped"
        return f"run {status}"

    def _start(self, event: dict[str, Any], at: datetime) -> None:
        line = Line(event["agent"], at)
        self.lines[event["task_id"]] = line
        if event["task_id"] is not None and event["parent_task_id"] in self.lines:
            self.lines[event["parent_task_id"]].children.append(line)

    def _end(self, line: Line, kind: str, at: datetime) -> str:
        line.ended = at
        line.mark = "done" if kind == "agent.completed" else "failed"
        line.state = "answered" if line.mark == "done" else "failed"
        return f"{line.agent} {line.state} ({_seconds(line, at)}, {line.tokens} tokens)"

    def render(self, now: datetime) -> Tree:
        """The tree as it is now."""
        tree = Tree(f"[bold]run[/] {self.status}", guide_style="dim")
        root = self.lines.get(None)
        if root is not None:
            _grow(tree, root, now)
        return tree


def _grow(tree: Tree, line: Line, now: datetime) -> None:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Spinner("dots", style="cyan") if line.mark == "busy" else _MARKS[line.mark],
        f"[bold]{escape(line.agent)}[/]",
        line.state,
        f"[dim]{_seconds(line, now)} · {line.tokens} tokens[/]",
        f"[magenta]← {escape(', '.join(line.received))}[/]" if line.received else "",
    )
    branch = tree.add(row)
    for child in line.children:
        _grow(branch, child, now)


def _seconds(line: Line, now: datetime) -> str:
    return f"{max(0.0, ((line.ended or now) - line.started).total_seconds()):.1f} s"
