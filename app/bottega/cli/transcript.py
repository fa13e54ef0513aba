"""A run as text: the agent's words when they arrive, and a line for each event of another kind."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, TextIO

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from bottega.cli.client import Event
from bottega.cli.terminal import one_line
from bottega.events import data as events
from bottega.events.types import Data, EventError


@dataclass(frozen=True, slots=True)
class Spent:
    """Total tokens and cost of model calls.

    Attributes:
        tokens: input and output tokens.
        amount: US dollars.
        complete: false if the price of some tokens is unknown.
    """

    tokens: int = 0
    amount: Decimal = Decimal(0)
    complete: bool = True

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Spent":
        """Convert the ``usage`` of an event or a run."""
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


_ENDS = {
    "agent.completed": "answered",
    "agent.failed": "failed",
    "subagent.completed": "answered",
    "subagent.failed": "failed",
    "subagent.timeout": "timed out",
    "subagent.cancelled": "cancelled",
}


_PARTS = {
    "queued": "waiting",
    "waiting": "waiting",
    "running": "running",
    "streaming": "running",
    "completed": "done",
    "failed": "failed",
    "timeout": "failed",
    "cancelled": "failed",
}
"""Count in which a task of each status is included, as in ``tasks`` of a run."""


@dataclass(slots=True)
class Crowd:
    """The dispatched tasks that are under way together. A task joins while another one is open.

    Attributes:
        parts: for each task ``waiting``, ``running``, ``done`` or ``failed``.
        began: time of the first dispatch, in seconds since the epoch.
        last_end: time of the last end of a task, in the same unit.
    """

    MANY: ClassVar[int] = 10
    """From this number of tasks on, the tasks are counted and not shown one by one."""
    ESTIMATE_FROM: ClassVar[int] = 3
    """Number of done tasks from which on the time of the others is estimated."""

    parts: dict[str, str] = field(default_factory=dict)
    began: float = 0.0
    last_end: float = 0.0
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_large(self) -> bool:
        return len(self.parts) >= self.MANY

    @property
    def is_over(self) -> bool:
        return self.over == len(self.parts)

    @property
    def over(self) -> int:
        """Number of tasks that have ended."""
        return self._counts["done"] + self._counts["failed"]

    def add(self, task_id: str, at: datetime) -> None:
        """Add a task that was dispatched; if all earlier tasks are over, a new crowd begins."""
        if self.is_over:
            self.parts.clear()
            self._counts.clear()
            self.began = at.timestamp()
        self.parts[task_id] = "waiting"
        self._counts["waiting"] += 1

    def move(self, task_id: str, status: str, at: datetime) -> bool:
        """Set a task's status; return true if the counts have changed."""
        old, new = self.parts.get(task_id), _PARTS[status]
        if old is None or old == new:
            return False
        self.parts[task_id] = new
        self._counts[old] -= 1
        self._counts[new] += 1
        if new in ("done", "failed"):
            self.last_end = at.timestamp()
        return True

    def __str__(self) -> str:
        over, total = self.over, len(self.parts)
        names = ("done", "failed", "running", "waiting")
        counts = ", ".join(f"{self._counts[name]:,} {name}" for name in names if self._counts[name])
        text = f"{over:,} of {total:,} tasks are over: {counts}"
        if self.is_over or self._counts["done"] < self.ESTIMATE_FROM:
            return text
        seconds = (self.last_end - self.began) / over * (total - over)
        return f"{text}; about {timedelta(seconds=max(1, round(seconds)))} left"


@dataclass(slots=True)
class AgentWork:
    """Work of the run's own agent, of a called sub-agent, or of an asynchronous task.

    Attributes:
        depth: number of agents between the run and this agent.
        is_task: true if this is an asynchronous task; its end is shown at the task's final event,
            not at the agent's final event.
        is_counted: true if this is an asynchronous task, or a part of the work of such a task.
    """

    agent: str
    depth: int
    started: datetime
    is_task: bool = False
    is_counted: bool = False
    is_over: bool = False
    spent: Spent = field(default_factory=Spent)


@dataclass(slots=True)
class ActivityView:
    """The work of a run's agents, updated from the run's events.

    Attributes:
        work: work by task id; ``None`` is the id of the run's own agent.
        crowd: the asynchronous tasks that are under way.
        has_moved: true if the last event changed the counts of a large crowd.
    """

    work: dict[str | None, AgentWork] = field(default_factory=dict)
    crowd: Crowd = field(default_factory=Crowd)
    has_moved: bool = False

    def describe(self, event: Event) -> str | None:
        """Describe an event in a line of text; ``None``: this view does not show the event.

        If a crowd is large, its tasks have lines only if they fail, or if people are asked.
        """
        kind, data = event["type"], event["data"]
        line = self._line_of(event)
        work = self.work.get(event["task_id"])
        self.has_moved = self._move(event) and self.crowd.is_large
        is_counted = work is not None and work.is_counted and self.crowd.is_large
        if is_counted and kind not in ("subagent.failed", "subagent.timeout"):
            line = None
        agent = work.agent if work else event["agent"] or "the run"
        return line or _notice(kind, data, agent)

    def _move(self, event: Event) -> bool:
        match event["type"]:
            case "subagent.status_changed":
                moved: events.SubagentStatusData = event["data"]
                status = moved["to"]
            case "subagent.resumed":
                status = "queued"
            case _:
                return False
        return self.crowd.move(event["task_id"], status, datetime.fromisoformat(event["at"]))

    def _line_of(self, event: Event) -> str | None:
        kind, data = event["type"], event["data"]
        if kind == "agent.started":
            return self._start(event)
        if kind == "subagent.dispatched":
            return self._dispatch(event)
        if kind.startswith("node."):
            return self._node(event)
        work = self.work.get(event["task_id"])
        if work is not None and kind in _ENDS:
            return _end(work, event)
        if work is not None and kind == "llm.completed":
            completed: events.LlmCompletedData = data
            work.spent += Spent.of(completed["usage"])
        agent = work.agent if work else event["agent"] or "the run"
        return _line(kind, data, agent)

    def depth(self, task_id: str | None) -> int:
        """Return the number of agents between the run and a task's agent."""
        work = self.work.get(task_id)
        return work.depth if work else 0

    def _start(self, event: Event) -> str | None:
        work = self.work.get(event["task_id"])
        if work is None:
            work = self._add(event, event["agent"])
        return None if work.is_task else f"{work.agent} starts"

    def _node(self, event: Event) -> str | None:
        kind, data = event["type"], event["data"]
        if kind == "node.skipped":
            skipped: events.NodeSkippedData = data
            return f"{skipped['node']} is skipped: {skipped['reason']}"
        if kind == "node.started":
            self._add(event, data["node"])
        if event["agent"] is not None:
            return None
        if kind == "node.started":
            return f"{data['node']} starts"
        return f"{data['node']} failed: {data['error']['message']}" if "error" in data else None

    def _dispatch(self, event: Event) -> str | None:
        if event["task_id"] in self.work:
            return None
        task: events.SubagentDispatchedData = event["data"]
        work = self._add(event, _name(task), is_task=True)
        self.crowd.add(event["task_id"], work.started)
        parent = self.work.get(event["parent_task_id"])
        who = parent.agent if parent else "somebody"
        ahead = task.get("queue_position") or 0
        return f"{who} dispatches {work.agent} (priority {task['priority']}, {ahead} ahead)"

    def _add(self, event: Event, agent: str, *, is_task: bool = False) -> AgentWork:
        above = None if event["task_id"] is None else self.work.get(event["parent_task_id"])
        depth = above.depth + 1 if above else 0
        is_counted = is_task or (above is not None and above.is_counted)
        work = AgentWork(agent, depth, datetime.fromisoformat(event["at"]), is_task, is_counted)
        self.work[event["task_id"]] = work
        return work


def _name(task: events.SubagentDispatchedData) -> str:
    """Return the task's agent, or the title from its metadata, or the beginning of its prompt."""
    if task["agent"] not in (None, "subagent"):
        return str(task["agent"])
    text, metadata = " ".join(task["prompt"].split()), task["metadata"] or {}
    return str(metadata.get("title") or (text if len(text) <= 48 else f"{text[:47]}…"))


def _line(kind: str, data: Data, agent: str) -> str | None:
    match kind:
        case "subagent.dequeued":
            dequeued: events.SubagentDequeuedData = data
            return f"{agent} starts after {dequeued['waited_ms'] / 1000:.1f} s in the queue"
        case "subagent.resumed":
            return f"{agent} is queued again"
        case "memory.injected":
            injected: events.MemoryInjectedData = data
            return f"{agent} receives the answer of {injected['source']}"
        case "memory.published":
            published: events.PublicationData = data
            return f"{agent} publishes version {published['version']}"
        case "llm.failed":
            return f"{agent}: {EventError.of(data).message}"
        case "tool.started":
            started: events.ToolStartedData = data
            return f"{agent} calls {started['name']}{_short(started['arguments'])}"
        case "tool.failed":
            ended: events.ToolEndedData = data
            error = ended["error"]
            reason = "" if error is None else error["message"] or error["type"]
            return f"{ended['name']} failed: {reason}"
    return None


AWAITED = {"children": "its child runs", "model": "its model", "time": "its next try"}
"""Reasons for waits, in words, except waits for people, which interrupts describe."""


def _notice(kind: str, data: Data, agent: str) -> str | None:
    match kind:
        case "warning":
            warning: events.WarningData = data
            return f"warning: {warning['message']}"
        case "subagent.backpressure":
            refusal: events.SubagentBackpressureData = data
            return f"{agent} is refused a task: {refusal['message']}"
        case "subagent.circuit_opened":
            opened: events.SubagentCircuitData = data
            again = f"again in {opened['retry_after_ms'] / 1000:g} s"
            return f"tasks like {agent} are refused after {opened['failures']} failures; {again}"
        case "run.waiting" if data["reason"] in AWAITED:
            return f"{agent} waits for {AWAITED[data['reason']]}, without a worker"
        case "interrupt.created":
            created: events.InterruptCreatedData = data
            return f"{agent} waits for people: {created['kind']}, {created['tool']}"
        case "interrupt.resolved":
            resolved: events.InterruptResolvedData = data
            return f"{agent}: a call that waited for people is {resolved['status']}"
    return None


def _end(work: AgentWork, event: Event) -> str | None:
    of_task = event["type"].startswith("subagent.")
    if work.is_task is not of_task or work.is_over:
        return None
    work.is_over = True
    end = _ENDS[event["type"]]
    seconds = (datetime.fromisoformat(event["at"]) - work.started).total_seconds()
    if of_task:
        ended: events.SubagentEndedData = event["data"]
        seconds, work.spent = (ended["duration_ms"] or 0) / 1000, Spent.of(ended["token_usage"])
        if reason := EventError.of(ended).message:
            end = f"{end}: {reason}"
    return f"{work.agent} {end} ({seconds:.1f} s, {work.spent})"


@dataclass(slots=True)
class Transcript:
    """Writer of a run's events.

    If ``out`` is a terminal, ``out`` gets the words of the run's own agent when they arrive. If
    ``out`` is a pipe or file, ``out`` gets only the answer.

    Attributes:
        notes: output for lines about tools, other agents and errors.
    """

    notes: Console
    out: TextIO = field(default_factory=lambda: sys.stdout)
    _activity: ActivityView = field(default_factory=ActivityView)
    _words: str = ""
    _written: str = ""
    _in_line: bool = False
    _progress: str = ""
    _tenths: int = 0

    def show(self, event: Event) -> None:
        """Write the text that an event adds to the answer, or a line about the event."""
        kind, data, of_root = event["type"], event["data"], event["task_id"] is None
        line = self._activity.describe(event)
        if of_root and self.out.isatty():
            self._show_text(kind, data)
        if line is not None and not (of_root and kind.startswith("agent.")):  # the answer follows
            self.note(line, self._activity.depth(event["task_id"]))
        if self._activity.has_moved:
            self._show_progress(self._activity.crowd)

    def note(self, text: str, depth: int = 0) -> None:
        """Write a line about an event."""
        self._hide_progress()
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
        """Write the run's error, or the answer if it was not written yet; then the cost."""
        self._hide_progress()
        output = text_of(run["output"])
        if output.strip() and output.strip() != self._written.strip():
            self._write(output)
        self._end_line()
        if run["error"] is not None:
            self.note(f"error: {run['error']['message']}")
        self.note(summary(run))

    def _show_progress(self, crowd: Crowd) -> None:
        """Write a crowd's progress: on a terminal in place, else at each tenth of its tasks."""
        tenths = 10 * crowd.over // len(crowd.parts)
        if self.notes.is_terminal and not self.notes.is_dumb_terminal:
            text = one_line(str(crowd), self.notes.width - 1)
            if text != self._progress and not crowd.is_over and not self._in_line:
                self._hide_progress()
                self.notes.print(text, style="dim", markup=False, highlight=False, end="")
                self._progress = text
        elif tenths > self._tenths and not crowd.is_over:
            self.note(str(crowd))
        self._tenths = max(tenths, self._tenths)
        if crowd.is_over:
            self.note(str(crowd))
            self._tenths = 0

    def _hide_progress(self) -> None:
        if self._progress:
            erase = (ControlType.ERASE_IN_LINE, 2)
            self.notes.control(Control(ControlType.CARRIAGE_RETURN, erase))
            self._progress = ""

    def _show_text(self, kind: str, data: dict[str, Any]) -> None:
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
        """Write the model's new words; if the model began again, write all words."""
        if not self._words.startswith(self._written):
            self.note("(the model begins again)")
            self._written = ""
        self._write(self._words[len(self._written) :])
        self._written = self._words

    def _write(self, text: str) -> None:
        self._hide_progress()
        self.out.write(text)
        self.out.flush()
        self._in_line = not text.endswith("\n") if text else self._in_line

    def _end_line(self) -> None:
        if self._in_line:
            self._write("\n")


def text_of(content: Any) -> str:
    """Return the content of a message or run as text; for a DAG, all agents' answers."""
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
    if not isinstance(arguments, dict):
        return ""
    text = json.dumps(arguments, ensure_ascii=False)
    cut = text if len(text) <= 120 else f"{text[:120]}…"
    return f" {cut}" if arguments else ""
