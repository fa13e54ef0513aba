"""A scripted model, and short helpers for its answers."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from bottega.agents import (
    AssistantMessage,
    BaseAgent,
    HumanMessage,
    Query,
    Recorder,
    StandardMessage,
    ToolCall,
    ToolMessage,
    ToolSchema,
    Usage,
)
from bottega.agents.messages import check_history
from bottega.agents.provider import ModelOptions, OnDelta
from bottega.events import data as wire

Answer = str | AssistantMessage | ToolCall | list[ToolCall] | Exception | Callable[..., Any]


def tokens(read: int, written: int) -> wire.Usage:
    """Build usage as the wire has it."""
    return Usage(input=read, output=written).to_dict()


class ScriptedModel:
    """Model that gives one scripted answer per call.

    An answer is text, tool calls, a whole message, an error to raise, or a function of the
    messages that returns one of those.

    Each call costs 10 input and 5 output tokens.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[list[StandardMessage]] = []
        self.tools: list[list[str]] = []
        self.options: list[ModelOptions | None] = []

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions | None = None,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage:
        check_history(messages)
        self.requests.append(list(messages))
        self.tools.append([schema.name for schema in tools])
        self.options.append(options)
        answer: Any = self.answers.pop(0)
        if callable(answer):
            answer = answer(messages)
            if inspect.isawaitable(answer):
                answer = await answer
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, AssistantMessage):
            return answer
        if isinstance(answer, str):
            return AssistantMessage(content=answer, usage=COST)
        calls = (answer,) if isinstance(answer, ToolCall) else tuple(answer)
        return AssistantMessage(tool_calls=calls, usage=COST)

    @property
    def last(self) -> list[str]:
        """The texts of the last request."""
        return texts(self.requests[-1])


COST = Usage(input=10, output=5)


def agent(*answers: Answer, **config: Any) -> BaseAgent:
    """Create an agent with a scripted model."""
    return BaseAgent("system", provider=ScriptedModel(*answers), **config)


def team(*answers: Any, stateless: bool = False, **members: BaseAgent) -> BaseAgent:
    """Create an agent with sub-agents by tool name; their ids are the same names."""
    lead = agent(*answers, agent_name="lead")
    for name, member in members.items():
        member.agent_id = name
        lead.register_agent(member, name=name, description=f"does {name}", stateless=stateless)
    return lead


def model_of(agent: BaseAgent) -> ScriptedModel:
    assert isinstance(agent.provider, ScriptedModel)
    return agent.provider


def call(name: str, id: str | None = None, **arguments: Any) -> ToolCall:
    """Build a tool call; its id defaults to the name."""
    return ToolCall(id=id or name, name=name, arguments=arguments)


def ask(name: str, query: str = "go", **arguments: Any) -> ToolCall:
    """Build a call of a sub-agent."""
    return call(name, query=query, **arguments)


def texts(messages: Sequence[StandardMessage]) -> list[str]:
    return [message.content for message in messages]


def shape(agent: BaseAgent) -> list[str]:
    """Return the history after the system message, as ``role: text`` (tool calls as ``->name``)."""
    return [
        f"{message.role}: {message.content}"
        + "".join(f"->{each.name}" for each in getattr(message, "tool_calls", ()))
        for message in agent.conversation_history[1:]
    ]


def answers_in(agent: BaseAgent) -> list[str]:
    """Return the tools' answers in the history."""
    return [m.content for m in agent.conversation_history if isinstance(m, ToolMessage)]


def human(text: str) -> Callable[[Any], HumanMessage]:
    """Return a factory for ``inject``."""
    return lambda status: HumanMessage(content=text)


async def let_others_run() -> None:
    """Let the event loop run everything that is ready, once."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()


class Notes(Recorder):
    """Recorder that notes each call, by agent."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []

    def note(self, query: Query, *words: str) -> None:
        self.lines.append((query.agent.agent_id or query.agent.agent_name, *words))

    def about(self, what: str) -> list[tuple[str, ...]]:
        return [(line[0], *line[2:]) for line in self.lines if line[1] == what]

    def query_started(self, query: Query) -> None:
        self.note(query, "started")

    def query_ended(self, query: Query, response: Any) -> None:
        self.note(query, "ended", response.stop_reason)

    async def model_call(self, query: Query, invoke: Any) -> AssistantMessage:
        self.note(query, "model", str(query.model_calls))
        message: AssistantMessage = await super().model_call(query, invoke)
        return message

    async def tool_call(self, query: Query, tool_call: Any, tool: Any, execute: Any) -> Any:
        self.note(query, "tool", tool_call.name, "known" if tool else "unknown")
        return await execute()

    def injected(self, query: Query, items: Any) -> None:
        self.note(query, "injected", *(f"{item.source_id}@{item.version}" for item in items))

    def recalled(self, query: Query, items: Any) -> None:
        self.note(query, "recalled", *(f"{item.source_id}@{item.version}" for item, _ in items))

    def published(self, query: Query, publication: Any) -> None:
        self.note(query, "published", f"{publication.agent_id}@{publication.version}")

    def warning(self, query: Query, code: str, message: str) -> None:
        self.note(query, "warning", code, message)
