"""An asynchronous coordinator: it dispatches tasks, steers, polls and awaits them, and reports."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bottega.llm.demo_model.conversation import (
    STEERING_TOOLS,
    SWARM_TOOLS,
    Conversation,
    DemoCall,
    DemoOutcome,
    json_object,
    with_part,
)
from bottega.llm.demo_model.specialist import topic_of

_DISPATCH, _POLL, _AWAIT = "dispatch_subagent", "poll_subagent", "await_subagent"
_FAN_OUT, _SEND, _CANCEL = "dispatch_subagents", "send_to_subagent", "cancel_subagent"
_NOTE = "Say too what is not known yet."
_COUNT = re.compile(
    r"[,;]?\s*\b(?:each\s+)?(?:(?:in|into|as|with|using|by)\s+)?(\d{1,9})\s+(?:parallel\s+)?"
    r"(?:tasks?|parts?)\b",
    re.IGNORECASE,
)
_ENOUGH = re.compile(r"[,;]?\s*(?:the\s+)?first\s+(?:answer|result)\s+is\s+enough", re.IGNORECASE)
_ASPECTS = (
    "market", "technology", "risks", "costs", "regulation", "history", "outlook", "competition",
    "customers", "supply", "energy", "environment", "workforce", "funding", "regions", "standards",
    "pricing", "logistics", "safety", "criticism",
)  # fmt: skip
_PARTS = 3
_MOST_PARTS = len(_ASPECTS)
_TRIES = 2
_POLLS = 2
_AWAITS = 1 + 3
_LONGEST_PROMPT = 9_000
_LONGEST_SECTION = 2_000
_ENDS = ("completed", "failed", "timeout", "cancelled")
_OVER = frozenset((*_ENDS, "not_found"))
_HEADING = re.compile(r"^(?=#+ )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DemoPart:
    """A part of the request, for one task.

    Attributes:
        agent: name of the agent; ``None``: a child without a name.
    """

    title: str
    agent: str | None
    prompt: str

    @property
    def task(self) -> dict[str, Any]:
        """The arguments of its dispatch."""
        who = {"agent": self.agent} if self.agent else {"metadata": {"title": self.title}}
        return {"prompt": self.prompt, **who}


@dataclass(slots=True)
class _Work:
    """State of the tasks, by prompt, from the tools' results so far.

    Attributes:
        seen: the last known state of each, as ``poll_subagent`` shows a task, with the extra
            statuses ``refused`` and ``skipped``.
        fresh: a task was accepted since the last dispatches began.
        polls, awaits: numbers since then.
        sent: a task was sent a message.
        raced: it has awaited the first success.
    """

    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    fresh: bool = False
    polls: int = 0
    awaits: int = 0
    sent: bool = False
    raced: bool = False

    @property
    def ids(self) -> list[str]:
        return [task["task_id"] for task in self.seen.values() if "task_id" in task]

    @property
    def open_ids(self) -> list[str]:
        """Ids of the tasks that may still be running."""
        tasks = (task for task in self.seen.values() if "task_id" in task)
        return [task["task_id"] for task in tasks if task["status"] not in _OVER]

    @property
    def is_open(self) -> bool:
        return bool(self.open_ids)


def coordinates(conversation: Conversation) -> bool:
    """Return true if it dispatches: it has the tools, and a task itself was asked for parts."""
    has = {tool.name for tool in conversation.tools} >= SWARM_TOOLS
    return has and (not conversation.folder or _COUNT.search(conversation.asked) is not None)


def next_calls(conversation: Conversation) -> tuple[DemoCall, ...]:
    """Return the next calls: dispatch all, steer, poll, await, dispatch refused tasks once more."""
    parts = plan(conversation)
    work = _follow(conversation.outcomes)
    steers = {tool.name for tool in conversation.tools} >= STEERING_TOOLS
    if new := [part for part in parts if part.prompt not in work.tries]:
        return _dispatches(new, at_once=steers)
    if work.fresh:
        if steers and (call := _steering(work, enough=bool(_ENOUGH.search(conversation.asked)))):
            return (call,)
        if work.polls < (_POLLS if work.is_open else 1):
            return (DemoCall(_POLL, {"task_ids": work.ids}),)
        if work.awaits < (_AWAITS if work.is_open else 1):
            return (DemoCall(_AWAIT, {"task_ids": work.ids, "mode": "all"}),)
    again = [
        part
        for part in parts
        if work.seen[part.prompt]["status"] == "refused" and work.tries[part.prompt] < _TRIES
    ]
    return _dispatches(again, at_once=steers)


def _dispatches(parts: Sequence[DemoPart], *, at_once: bool) -> tuple[DemoCall, ...]:
    tasks = [part.task for part in parts]
    if at_once and tasks:
        return (DemoCall(_FAN_OUT, {"tasks": tasks}),)
    return tuple(DemoCall(_DISPATCH, task) for task in tasks)


def _steering(work: _Work, *, enough: bool) -> DemoCall | None:
    """Return a message to the last task, then a wait for the first success; each once.

    Args:
        enough: the first success is enough: the other tasks are cancelled.
    """
    if not work.sent:
        return DemoCall(_SEND, {"task_id": work.ids[-1], "message": _NOTE})
    if not work.raced:
        return DemoCall(_AWAIT, {"task_ids": work.ids, "mode": "any_success"})
    if enough and work.is_open:
        return DemoCall(_CANCEL, {"task_ids": work.open_ids})
    return None


def plan(conversation: Conversation) -> list[DemoPart]:
    """Return the parts: one for each named agent, then others up to the requested number.

    A second number ("in 3 parts, each in 2 parts") is left to the tasks.
    """
    count, topic = _counted(conversation.asked)
    names = _names(conversation)
    others = [aspect for aspect in _ASPECTS if aspect not in names]
    total = min(count, _MOST_PARTS) if count is not None else 0 if names else _PARTS
    titles = [*names, *others[: max(0, total - len(names))]] or others[:1]
    above = f"{conversation.part}, " if conversation.part else ""
    return [
        DemoPart(
            title,
            title if title in names else None,
            with_part(topic[:_LONGEST_PROMPT], f"{above}{title}"),
        )
        for title in titles
    ]


def report(conversation: Conversation) -> str:
    """Return Markdown with each task's result or error, and the number of each status."""
    parts = plan(conversation)
    seen = _follow(conversation.outcomes).seen
    topic = topic_of(_counted(conversation.asked)[1])
    sections = [f"## {part.title}\n\n{_found(seen[part.prompt])}" for part in parts]
    ends = Counter(seen[part.prompt]["status"] for part in parts)
    statuses = [*_ENDS, *(status for status in ends if status not in _ENDS)]
    sums = ", ".join(f"{ends[status]} {status.replace('_', ' ')}" for status in statuses)
    noun = "task" if len(parts) == 1 else "tasks"
    return "\n\n".join([f"# Report: {topic}", *sections, f"{len(parts)} {noun}: {sums}."])


def _counted(asked: str) -> tuple[int | None, str]:
    asked = _ENOUGH.sub("", asked)
    found = _COUNT.search(asked)
    if found is None:
        return None, asked
    rest = f"{asked[: found.start()]}{asked[found.end() :]}".strip(" ,;:")
    return int(found[1]), rest


def _names(conversation: Conversation) -> list[str]:
    """Return the names of agents: an enum in the tool's schema."""
    tool = next(tool for tool in conversation.tools if tool.name == _DISPATCH)
    schema = tool.properties.get("agent")
    if not isinstance(schema, dict):
        return []
    options = [schema, *(option for option in schema.get("anyOf", ()) if isinstance(option, dict))]
    found = (option.get("enum") or [option.get("const")] for option in options)
    return [name for names in found for name in names if isinstance(name, str)]


def _follow(outcomes: Sequence[DemoOutcome]) -> _Work:
    work = _Work()
    before = ""
    for outcome in outcomes:
        if outcome.name in (_DISPATCH, _FAN_OUT):
            if before not in (_DISPATCH, _FAN_OUT):
                work.fresh, work.polls, work.awaits = False, 0, 0
            for prompt, said in _accepted(outcome):
                _dispatched(work, prompt, said)
        elif outcome.name in SWARM_TOOLS or outcome.name == _CANCEL:
            races = outcome.arguments.get("mode") == "any_success"
            work.raced = work.raced or races
            work.polls += outcome.name == _POLL
            work.awaits += outcome.name == _AWAIT and not races
            _update_tasks(work, outcome)
        work.sent = work.sent or outcome.name == _SEND
        before = outcome.name
    return work


def _accepted(outcome: DemoOutcome) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the prompt of each task that a call dispatches, and what the tool says of it."""
    failure = {"error": outcome.text.removeprefix("Error:").strip()}
    said = json_object(outcome.text)
    if outcome.name == _DISPATCH:
        yield str(outcome.arguments.get("prompt")), said or failure
        return
    answers = said.get("tasks")
    answers = answers if isinstance(answers, list) else []
    by_index = {each.get("index"): each for each in answers if isinstance(each, dict)}
    for index, task in enumerate(outcome.arguments.get("tasks") or ()):
        yield str(task.get("prompt")), by_index.get(index, failure)


def _dispatched(work: _Work, prompt: str, said: dict[str, Any]) -> None:
    work.tries[prompt] += 1
    if isinstance(said.get("task_id"), str):
        work.seen[prompt] = {"task_id": said["task_id"], "status": "queued"}
        work.fresh = True
    elif said.get("status") == "skipped":
        work.seen[prompt] = {"status": "skipped", "final_output": said.get("result")}
    else:
        work.seen[prompt] = {"status": "refused", "error": said.get("error")}


def _update_tasks(work: _Work, outcome: DemoOutcome) -> None:
    """Take over the result of a poll or an await; ended tasks do not change."""
    tasks = json_object(outcome.text).get("tasks")
    if not isinstance(tasks, list):
        return  # the call failed
    statuses = {task["task_id"]: task for task in tasks if _is_task(task)}
    for prompt, task in work.seen.items():
        if "task_id" in task and task["status"] not in _ENDS:
            missing = {"task_id": task["task_id"], "status": "not_found"}
            work.seen[prompt] = statuses.get(task["task_id"], missing)


def _is_task(task: Any) -> bool:
    return isinstance(task, dict) and all(
        isinstance(task.get(key), str) for key in ("task_id", "status")
    )


def _found(task: dict[str, Any]) -> str:
    return "\n\n".join(_pieces(task))


def _pieces(task: dict[str, Any]) -> Iterator[str]:
    status = task["status"].replace("_", " ")
    if task["status"] not in ("completed", "skipped"):
        error = task.get("error")
        if isinstance(error, dict):
            error = error.get("message")
        yield f"{status.capitalize()}: {error}" if error else f"{status.capitalize()}."
    said = str(task.get("final_output") or task.get("partial_output") or "").strip()
    if len(said) > _LONGEST_SECTION:
        said = f"{said[:_LONGEST_SECTION]}…"
    if said:
        yield _HEADING.sub("##", said)  # below this report's own headings
    elif task["status"] == "completed":
        yield "(nothing)"
