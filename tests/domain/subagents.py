"""Small words for tests of asynchronous sub-agents: agents of virtual time, and what they heard."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from app.agents import AssistantMessage, BaseAgent, StandardMessage, ToolCall, ToolMessage
from app.subagents.handle import Parent, SubagentHandle
from app.subagents.limits import SchedulerOptions, SubagentLimits
from app.subagents.registry import SubagentRegistry
from app.subagents.scheduler import SubagentScheduler
from app.subagents.tools import use_async_subagents
from tests.domain.scripted import COST, ScriptedModel, call

Event = tuple[str, str, dict[str, Any]]


class Heard:
    """Writes down what happens, as (task's prompt, event, data)."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def happened(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        self.events.append((handle.prompt, event, data))

    def refused(self, parent: Parent, data: dict[str, Any]) -> None:
        self.events.append((parent.agent, "backpressure", data))

    def of(self, event: str) -> list[str]:
        return [prompt for prompt, kind, _ in self.events if kind == event]

    def moves(self, prompt: str) -> list[str]:
        return [
            str(data["to"])
            for which, kind, data in self.events
            if which == prompt and kind == "status_changed"
        ]


def registry(limits: SubagentLimits | None = None, **options: Any) -> SubagentRegistry:
    """With a pool of two by default, that never grows."""
    chosen = SchedulerOptions(**{"min_workers": 2, "max_workers": 2, **options})
    return SubagentRegistry(limits, SubagentScheduler(chosen))


def dispatch(prompt: str, id: str | None = None, **arguments: Any) -> ToolCall:
    return call("dispatch_subagent", id or prompt, prompt=prompt, **arguments)


def results(messages: Sequence[StandardMessage]) -> list[Any]:
    """What the tools answered, oldest first."""
    found = []
    for message in messages:
        if isinstance(message, ToolMessage):
            result = message.tool_results[0]
            found.append(result.result if result.error is None else result.error)
    return found


def ids(messages: Sequence[StandardMessage]) -> list[str]:
    """Of the tasks that were dispatched."""
    return [
        r["task_id"] for r in results(messages) if isinstance(r, dict) and "queue_position" in r
    ]


def await_all(messages: Sequence[StandardMessage]) -> ToolCall:
    return call("await_subagent", f"await{len(messages)}", task_ids=ids(messages))


def poll_all(messages: Sequence[StandardMessage]) -> ToolCall:
    return call("poll_subagent", f"poll{len(messages)}", task_ids=ids(messages))


async def passed(seconds: float) -> None:
    """Return when virtual time has come so far."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, future.set_result, None)
    try:
        await future
    finally:
        timer.cancel()


def after(seconds: float, answer: Any) -> Callable[..., Any]:
    """An answer that the model takes its time for."""

    async def answered(messages: Any) -> Any:
        await passed(seconds)
        return answer(messages) if callable(answer) else answer

    return answered


class Model(ScriptedModel):
    """Answers by prompt: the script of whichever agent asks is found by its first question."""

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
    """An agent that dispatches."""
    limits = config.pop("limits", None)
    made = BaseAgent("You coordinate.", provider=model, agent_name="lead", **config)
    use_async_subagents(made, where, agents, limits=limits)
    return made


def shown(value: Any) -> Any:
    return json.loads(json.dumps(value))


__all__ = ["COST", "after", "coordinator", "dispatch"]
