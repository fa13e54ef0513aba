"""Helpers for tests of asynchronous sub-agents: agents in virtual time, and a record of events."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4, uuid5

from bottega.agents import AssistantMessage, BaseAgent, StandardMessage, ToolCall, ToolMessage
from bottega.subagents.budget import Account
from bottega.subagents.handle import (
    DispatchParams,
    Listener,
    Parent,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
)
from bottega.subagents.limits import SchedulerOptions, SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.tools import use_async_subagents
from tests.domain.scripted import COST, ScriptedModel, call

Event = tuple[str, str, dict[str, Any]]


class Heard(Listener):
    """Record of the events, as (task's prompt, event, data)."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        self.events.append((handle.prompt, event, data))

    def refused(self, parent: Parent, data: dict[str, Any]) -> None:
        self.events.append((parent.agent, "backpressure", data))

    def of(self, event: str) -> list[str]:
        return [prompt for prompt, kind, _ in self.events if kind == event]

    def data(self, event: str) -> list[dict[str, Any]]:
        return [data for _, kind, data in self.events if kind == event]

    def moves(self, prompt: str) -> list[str]:
        return [
            str(data["to"])
            for which, kind, data in self.events
            if which == prompt and kind == "status_changed"
        ]


def registry(limits: SubagentLimits | None = None, **options: Any) -> SubagentRegistry:
    """Create a registry; by default with a fixed pool of two slots."""
    chosen = SchedulerOptions(
        **{"min_workers": 2, "max_workers": 2, "failure_threshold": 3, **options}
    )
    return SubagentRegistry(limits, SubagentScheduler(chosen))


def dispatch(prompt: str, id: str | None = None, **arguments: Any) -> ToolCall:
    return call("dispatch_subagent", id or prompt, prompt=prompt, **arguments)


def results(messages: Sequence[StandardMessage]) -> list[Any]:
    """Return the tools' answers, oldest first."""
    found = []
    for message in messages:
        if isinstance(message, ToolMessage):
            result = message.tool_results[0]
            found.append(result.result if result.error is None else result.error)
    return found


def ids(messages: Sequence[StandardMessage]) -> list[str]:
    """Return the ids of the dispatched tasks."""
    return [
        r["task_id"] for r in results(messages) if isinstance(r, dict) and "queue_position" in r
    ]


def await_all(messages: Sequence[StandardMessage]) -> ToolCall:
    return call("await_subagent", f"await{len(messages)}", task_ids=ids(messages))


def poll_all(messages: Sequence[StandardMessage]) -> ToolCall:
    return call("poll_subagent", f"poll{len(messages)}", task_ids=ids(messages))


async def passed(seconds: float) -> None:
    """Wait until virtual time reaches this moment."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, _set, future)
    try:
        await future
    finally:
        timer.cancel()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # cancelled at this moment
        future.set_result(None)


def after(seconds: float, answer: Any) -> Callable[..., Any]:
    """Return an answer that the model gives after some time."""

    async def answered(messages: Any) -> Any:
        await passed(seconds)
        return answer(messages) if callable(answer) else answer

    return answered


class Model(ScriptedModel):
    """Model that answers by prompt: an agent's first question selects its script."""

    def __init__(self, **scripts: Sequence[Any]) -> None:
        super().__init__()
        self.scripts = {name.replace("_", " "): list(script) for name, script in scripts.items()}
        self.asked: list[str] = []

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        question = next(m.content for m in messages if m.role == "user").partition("\n")[0]
        self.asked.append(question)
        self.answers = [self.scripts[question].pop(0)]
        on_delta = options.get("on_delta")
        message = await super().invoke(messages, tools, **options)
        if on_delta is not None and message.content:
            on_delta(message.content)
        return message


def coordinator(
    model: Any, where: SubagentRegistry, *agents: BaseAgent, **config: Any
) -> BaseAgent:
    """Create an agent that dispatches."""
    names = ("limits", "anonymous", "configure", "share_metadata")
    about = {name: config.pop(name) for name in names if name in config}
    made = BaseAgent("You coordinate.", provider=model, agent_name="lead", **config)
    use_async_subagents(made, where, agents, **about)
    return made


def by_hand(
    where: SubagentRegistry,
    heard: Heard | None = None,
    *,
    owner: SubagentHandle | None = None,
    **about: Any,
) -> Parent:
    """Create a parent without an agent: of a run of its own, or part of the task ``owner``."""
    limits = about.pop("limits", where.limits)
    account = Account("all tasks together", limits.max_total_tokens)
    paying = () if owner is None else (owner.account, *owner.parent.accounts)
    parent = Parent(
        **{
            "parent_id": uuid4() if owner is None else owner.task_id,
            "agent": "by hand",
            "run_id": uuid4() if owner is None else owner.run_id,
            "tenant_id": None if owner is None else owner.tenant_id,
            "path": () if owner is None else owner.path,
            "limits": limits,
            "account": account,
            "accounts": (account, *paying),
            "listener": heard or Heard(),
            "owner": owner,
            **about,
        }
    )
    if owner is not None:
        owner.scopes.append(parent)
    return parent


class Job:
    """Work of one task, which ends when the test says so."""

    def __init__(self) -> None:
        self.started = self.cancelled = False
        self.end: asyncio.Future[SubagentOutcome] = asyncio.get_running_loop().create_future()

    async def __call__(self, handle: SubagentHandle) -> SubagentOutcome:
        self.started = True
        try:
            return await self.end
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def finish(self, output: str = "done") -> None:
        self.end.set_result(SubagentOutcome(SubagentStatus.COMPLETED, output=output))
        await settled()

    async def fail(self, code: str = "agent_failed") -> None:
        self.end.set_result(
            SubagentOutcome(SubagentStatus.FAILED, error="it broke", error_code=code)
        )
        await settled()


def put(
    where: SubagentRegistry, parent: Parent, prompt: str = "task", work: Any = None, **params: Any
) -> SubagentHandle:
    """Dispatch a task without an agent; the same prompt is the same task."""
    return where.dispatch(
        parent,
        DispatchParams(**{"prompt": prompt, "agent": "helper", **params}),
        work or Job(),
        task_id=id_of(parent, prompt),
        place=(1, len(parent.children)),
    )


def job(handle: SubagentHandle) -> Job:
    assert isinstance(handle.work, Job)
    return handle.work


def status(handle: SubagentHandle) -> SubagentStatus:
    """Return the task's current status (a call, so that the type checker does not narrow it)."""
    return handle.status


def id_of(parent: Parent, prompt: str) -> UUID:
    return uuid5(parent.parent_id, prompt)


async def settled() -> None:
    """Wait until everything waits for a timer or for the test."""
    ready: Any = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while ready:
        await asyncio.sleep(0)


def timers() -> list[float]:
    """Return when the timers of this loop are due, without cancelled ones and those of breakers."""
    scheduled: Any = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sorted(
        handle.when()
        for handle in scheduled
        if not handle.cancelled() and handle._callback.__qualname__ != "Breakers._start_probe"
    )


def is_empty(where: SubagentRegistry) -> bool:
    """Return true if no state is left of any task or parent."""
    queue, counts = where.scheduler._queue, where.counts
    left = (
        where._handles, where._parents, counts.queued_of, counts.queued_of_run,
        queue._in_line, queue._holding, queue._tenants, queue._tenants_in_turn,
        where.scheduler._running, counts.active_of,
    )  # fmt: skip
    return not any(left) and not where.scheduler.in_use


def shown(value: Any) -> Any:
    return json.loads(json.dumps(value))


__all__ = ["COST", "after", "coordinator", "dispatch"]
