"""Helpers for the tests of hooks."""

from typing import Any

from bottega.agents import (
    AgentStatus,
    AssistantMessage,
    BaseAgent,
    tool,
)
from tests.domain.scripted import agent, call


@tool("add", "Adds.")
def add(a: int, b: int) -> int:
    return a + b


@tool("broken", "Fails.")
async def broken(code: int = 1) -> None:
    raise ValueError(f"error {code}")


def said(text: str) -> AssistantMessage:
    return AssistantMessage(content=text)


def message_of(status: AgentStatus) -> AssistantMessage:
    assert status.assistant_message is not None
    return status.assistant_message


def full(**config: Any) -> BaseAgent:
    """Create an agent whose query fires every event except ON_MAX_ITERATIONS."""
    return agent([call("add", a=1, b=2), call("broken")], "done", tools=[add, broken], **config)
