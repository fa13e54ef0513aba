"""Witness of a registry: an account of its tasks from their events alone.

It compares every sentence and number that a sub-agent tool says with that account.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor
from typing import Any
from uuid import UUID

from bottega.agents import BaseAgent, ToolCall, ToolResult
from bottega.subagents.handle import Listener, Parent, SubagentHandle
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.tools import SubagentTool

OVER = ("completed", "failed", "timeout", "cancelled")
STATES = ("queued", "running", "streaming", "waiting", *OVER, "not_found")
AGEING = 5.0
ROUNDING = 1e-6


@dataclass(eq=False)
class Seen:
    """One task, as its events told it."""

    task_id: str
    parent: UUID
    run: UUID
    tenant: UUID | None
    prompt: str
    priority: int
    number: int
    dispatched: float
    status: str = "queued"
    text: str = ""
    read: int = 0
    was_sent: bool = False
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def rank(self, now: float) -> tuple[int, float, int]:
        aged = max(1, self.priority - floor((now - self.dispatched) / AGEING))
        return aged, self.dispatched, self.number


@dataclass(frozen=True)
class Promise:
    """An estimate of a task's start."""

    task: Seen
    at: float
    seconds: float
    dispatched: int
    cancelled: int


class Witness(Listener):
    """Listener of all runs of a registry."""

    def __init__(self, limits: SubagentLimits, slots: int) -> None:
        self.limits = limits
        self.slots = slots
        self.tasks: dict[str, Seen] = {}
        self.promises: list[Promise] = []
        self.checked: Counter[str] = Counter()
        self.problems: list[Exception] = []
        self.is_flat = True
        self.cancelled = 0

    # Events

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        now, key = _now(), str(handle.task_id)
        if event == "dispatched":
            self.is_flat &= handle.depth == 0
            self.tasks[key] = Seen(
                key, handle.parent_id, handle.run_id, handle.tenant_id, handle.prompt,
                handle.priority, len(self.tasks), now,
            )  # fmt: skip
            return
        task = self.tasks[key]
        if event == "status_changed":
            task.status = str(data["to"])
            task.ended = now if task.is_over else None
            self.cancelled += task.status in ("cancelled", "timeout")
        elif event == "dequeued":
            task.started = now
        elif event == "output_chunk":
            task.text += data["text"]
        elif event == "message_sent":
            task.unread.append(data["message_id"])
        elif event == "message_read":
            task.unread.remove(data["message_id"])
        elif event in OVER:
            task.tokens = data["token_usage"]
            task.error = (data.get("error") or {}).get("message")

    def refused(self, parent: Parent, data: dict[str, Any]) -> None:
        pass

    # What the tools say

    def watch(self, agent: BaseAgent) -> None:
        """Check all answers of an agent's tools."""
        for tool in agent.registered_tools:
            if isinstance(tool, SubagentTool):
                setattr(tool, "execute", self._checked(tool))  # noqa: B010

    def _checked(self, tool: SubagentTool) -> Any:
        execute = tool.execute

        async def checked(tool_call: ToolCall) -> ToolResult:
            caller = tool.shared.scope()[1].parent_id
            result = await execute(tool_call)
            check = getattr(self, tool.name)
            try:
                check(caller, tool_call.arguments, result.result, result.error)
            except Exception as problem:  # an agent takes it for a failure of its tool
                self.problems.append(problem)
            self.checked[tool.name] += 1
            return result

        return checked

    def dispatch_subagent(self, caller: UUID, asked: Any, said: Any, error: str | None) -> None:
        if error is None:
            self._dispatched(caller, said)

    def dispatch_subagents(self, caller: UUID, asked: Any, said: Any, error: str | None) -> None:
        assert error is None, error
        assert [each["index"] for each in said["tasks"]] == list(range(len(asked["tasks"])))
        for each in said["tasks"]:
            self._dispatched(caller, each)

    def _dispatched(self, caller: UUID, said: Mapping[str, Any]) -> None:
        if "error" in said:
            self._refused(caller, said)
            return
        now, task = _now(), self.tasks[said["task_id"]]
        assert said["status"] == task.status == "queued"
        waiting = [each for each in self.tasks.values() if each.status == "queued"]
        siblings = [each for each in waiting if each.parent == caller and each.number < task.number]
        # Ageing steps at an exact multiple of its interval, which rounding may just miss.
        least, most = (
            sum(each.rank(now + by) < task.rank(now) for each in siblings)
            for by in (-ROUNDING, ROUNDING)
        )
        of_others = sum(each.tenant == task.tenant and each.parent != caller for each in waiting)
        if not self.is_flat:  # some that run need a slot again
            of_others += sum(
                each.status in ("running", "streaming") for each in self.tasks.values()
            )
        assert least <= said["queue_position"] <= most + of_others
        if (estimate := said["estimated_start_ms"]) is not None:
            promise = Promise(task, now, estimate / 1000, len(self.tasks), self.cancelled)
            self.promises.append(promise)

    def _refused(self, caller: UUID, said: Mapping[str, Any]) -> None:
        numbers = [int(each) for each in re.findall(r"\d+", said["error"])]
        if "of your tasks wait already" in said["error"]:
            self.checked["quota"] += 1
            waiting = [each for each in self.tasks.values() if each.status == "queued"]
            own = [each for each in waiting if each.parent == caller]
            if self.is_flat:
                assert numbers == [len(own) - self._starting(own, waiting)]
            assert numbers[0] >= self.limits.max_queued
        elif "deep" in said["error"]:
            self.checked["depth"] += 1
            assert numbers == [self.limits.max_depth]
        elif "queue is full" in said["error"]:
            self.checked["full"] += 1
            assert numbers[0] >= numbers[1]
        else:
            known = "there is no agent", "the dispatching agent has ended"
            assert said["error"].startswith(known), said

    def _starting(self, own: list[Seen], waiting: list[Seen]) -> int:
        """Count a parent's waiting tasks that get a slot in this moment."""
        runs = [each for each in self.tasks.values() if each.status in ("running", "streaming")]
        held = sum(each.parent == own[0].parent for each in runs)
        of_tenant = self.limits.tenant_max_concurrent or self.slots
        of_tenant -= sum(each.tenant == own[0].tenant for each in runs)
        free = self.slots - len(runs) - (len(waiting) - len(own))
        return max(0, min(len(own), free, of_tenant, self.limits.max_concurrent - held))

    def poll_subagent(self, caller: UUID, asked: Any, said: Any, error: str | None) -> None:
        assert error is None, error
        listed = said["tasks"]
        own = [each for each in self.tasks.values() if each.parent == caller]
        if "task_ids" not in asked:
            assert {each["task_id"] for each in listed} <= {each.task_id for each in own}
            names = {each["task_id"] for each in listed}
            left = [each for each in own if each.task_id not in names]
            over = sum(each.is_over for each in left)
            told = [int(each) for each in re.findall(r"\d+", said.get("note", ""))]
            assert told == ([len(left), len(left) - over, over] if left else [])
            self.checked["note"] += bool(left)
        states = Counter(each["status"] for each in listed)
        counts = {state: states[state] for state in STATES}
        assert said["summary"] == {"total": len(listed), **counts}
        longest = asked.get("max_partial_output_length", 2000)
        for view in listed:
            self._view(caller, view, longest, is_news=True)

    def await_subagent(self, caller: UUID, asked: Any, said: Any, error: str | None) -> None:
        assert error is None, error
        views = said["tasks"]
        for view in views:
            self._view(caller, view, 10_000 if said["wait_timed_out"] else 0, is_news=False)
        statuses = [view["status"] for view in views]
        over = sum(status in (*OVER, "not_found") for status in statuses)
        wanted = {"all": len(views), "any": 1, "quorum": asked.get("quorum"), "any_success": 1}
        met = over >= wanted[asked["mode"]]
        if asked["mode"] == "any_success":
            met = "completed" in statuses or over == len(views)
        assert said["wait_timed_out"] == (not met)
        if met and asked["mode"] == "any_success" and "completed" not in statuses:
            assert said["status"] == "none_succeeded"
        elif len(views) == 1:
            assert said["status"] == statuses[0]
        else:
            assert said["status"] == ("done" if met else "pending")

    def cancel_subagent(self, caller: UUID, asked: Any, said: Any, error: str | None) -> None:
        assert error is None, error
        for view in said["tasks"]:
            task = self.tasks[view["task_id"]]
            assert view["status"] == task.status or self._is_collected(view, task)
            assert task.is_over

    def send_to_subagent(self, caller: UUID, asked: Any, said: Any, error: str | None) -> None:
        task = self.tasks[asked["task_id"]]
        if error is None:
            assert not task.is_over
            assert said == {"task_id": task.task_id, "status": "sent"}
        elif "unread" in error:
            self.checked["unread"] += 1
            assert f" {len(task.unread)} unread messages" in error
        elif "the task is " in error:
            assert f"the task is {task.status}:" in error
            assert task.is_over
        else:
            assert "has given its answer" in error

    def _view(self, caller: UUID, view: Any, longest: int, *, is_news: bool) -> None:
        task, now = self.tasks[view["task_id"]], _now()
        if self._is_collected(view, task):
            return
        assert view["status"] == task.status
        assert view.get("error") == task.error
        until = now if task.ended is None else task.ended
        assert abs(view["duration_ms"] - 1000 * (until - task.dispatched)) <= 1
        if task.is_over:
            usage = {"input": task.tokens["input"], "output": task.tokens["output"]}
            assert view["token_usage"] == usage
        is_done = task.status == "completed"
        assert view.get("sent_before", False) == (is_news and is_done and task.was_sent)
        is_told = is_done and not (is_news and task.was_sent)
        assert view.get("final_output") == (f"found {task.prompt}" if is_told else None)
        task.was_sent |= is_told
        unread = task.text[task.read if is_news else 0 :]
        new = unread[-longest:] if longest and not is_done else ""
        assert view.get("partial_output", "") == new
        if longest:
            task.read = len(task.text)

    def _is_collected(self, view: Any, task: Seen) -> bool:
        """Check if a task is not found, and rightly: without a database a collected one is gone."""
        if view["status"] != "not_found":
            return False
        assert task.ended is not None
        is_late = _now() - task.ended >= self.limits.gc_ttl
        return is_late or len(self.tasks) > 10 * self.limits.max_concurrent_global

    def check_all(self) -> None:
        """Raise what was wrong; compare the estimates with the waits that nothing disturbed."""
        if self.problems:
            raise self.problems[0]
        for promise in self.promises:
            task = promise.task
            if task.started is None or self._was_disturbed(promise):
                continue
            wait = task.started - promise.at
            self.checked["estimate"] += wait > 0.8
            if wait > 0.8:
                assert wait / 3 <= promise.seconds <= 4 * wait, (promise, wait)
            if wait > 1:
                assert promise.seconds >= 0.4 * wait, (promise, wait)

    def _was_disturbed(self, promise: Promise) -> bool:
        """Check if other tasks came later, or some were cancelled."""
        task = promise.task
        assert task.started is not None
        later = list(self.tasks.values())[promise.dispatched :]
        return any(
            each.dispatched <= task.started
            and (each.parent != task.parent or each.priority < task.priority)
            for each in later
        ) or any(
            each.status in ("cancelled", "timeout", "failed")
            and each.ended is not None
            and promise.at <= each.ended <= task.started
            for each in self.tasks.values()
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
