"""Models whose calls wait for the test, guards of their dispatches, a record of their events."""

import asyncio
from collections.abc import Callable
from typing import Any

from bottega.agents import AssistantMessage
from bottega.agents.messages import check_history
from bottega.subagents.handle import DispatchParams, Parent, SubagentHandle
from bottega.subagents.plugins import PluginContext, Refused
from tests.domain.scripted import COST
from tests.domain.subagents import Heard, results


class Marks:
    """Guard that marks each text, and refuses some."""

    guard = True

    async def before_dispatch(self, ctx: PluginContext, params: DispatchParams) -> Any:
        if "bad" in params.prompt:
            return Refused("not here")
        return None if params.prompt.endswith("!") else {"prompt": f"{params.prompt}!"}


class Softens:
    """Guard that changes a word after each mark."""

    guard = True

    async def before_dispatch(self, ctx: PluginContext, params: DispatchParams) -> Any:
        soft = params.prompt.replace("hard", "soft")
        return None if soft == params.prompt else {"prompt": soft}


def guarded(prompt: str) -> str:
    """Return a prompt as the guards change it."""
    return f"{prompt.replace('hard', 'soft')}!"


class Asked:
    """A model call under way, which ends when the test says so."""

    def __init__(self, messages: Any) -> None:
        self.messages = list(messages)
        self.said = [m.content for m in messages if m.role == "user"]
        self.prompt: str = self.said[0].partition("\n")[0]
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def ids(self) -> list[str]:
        """Ids of the caller's own tasks."""
        fan_outs = (each["tasks"] for each in results(self.messages) if _is_fan_out(each))
        return [task["task_id"] for tasks in fan_outs for task in tasks if "task_id" in task]


def _is_fan_out(result: Any) -> bool:
    return isinstance(result, dict) and any("index" in task for task in result.get("tasks", ()))


class Puppet:
    """Model whose calls wait for the test."""

    def __init__(self, hear: Callable[[Asked], object]) -> None:
        self.open: dict[Asked, None] = {}
        self.hear = hear

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        check_history(messages)
        asked = Asked(messages)
        self.hear(asked)
        self.open[asked] = None
        try:
            answer = await asked.answer
        finally:
            del self.open[asked]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return AssistantMessage(content=answer, usage=COST)
        return AssistantMessage(tool_calls=(answer,), usage=COST)


class Ears(Heard):
    """Record of the events that first calls the test with each."""

    def __init__(
        self,
        happens: Callable[[SubagentHandle, str], object],
        refuses: Callable[[Parent, dict[str, Any]], object],
    ) -> None:
        super().__init__()
        self.happens = happens
        self.refuses = refuses

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        self.happens(handle, event)
        super().on_event(handle, event, data)

    def refused(self, parent: Parent, data: dict[str, Any]) -> None:
        self.refuses(parent, data)
        super().refused(parent, data)
