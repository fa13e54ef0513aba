"""Events of a streamed query. They support ``match``: ``case TextDelta(text): …``."""

from dataclasses import dataclass, field

from bottega.agents.messages import AssistantResponse, ToolCall, ToolResult
from bottega.agents.query import Path


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """An event of a query or of one of its sub-agents; base class of all events.

    Attributes:
        agent: name of the agent.
        path: place of its query: ``()`` for the streamed query itself; per level of sub-agents
            (number of the model call, index of the tool call).
    """

    agent: str = field(kw_only=True)
    path: Path = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class TextDelta(QueryEvent):
    """A piece of a model's text; the pieces of one call join to its message.

    A message may be a draft that is not accepted, or come before tool calls. The accepted answer is
    in :class:`QueryAnswered`.

    Attributes:
        model_call: number of the model call within the query, from 1.
    """

    text: str
    model_call: int


@dataclass(frozen=True, slots=True)
class TextRestarted(QueryEvent):
    """A model call failed after it sent text and is tried again: discard the text of that call."""

    model_call: int


@dataclass(frozen=True, slots=True)
class ToolCalled(QueryEvent):
    """A tool call begins; a call to a sub-agent too."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolAnswered(QueryEvent):
    """A tool call has ended, with success or an error; hooks may still change the result."""

    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class SubAgentStarted(QueryEvent):
    """A sub-agent begins to work on ``query``."""

    query: str


@dataclass(frozen=True, slots=True)
class SubAgentEnded(QueryEvent):
    """A sub-agent has an answer or has failed; there is none for a cancelled one."""

    response: AssistantResponse


@dataclass(frozen=True, slots=True)
class QueryAnswered(QueryEvent):
    """The last event: the query's response, whose ``error`` is set if it failed."""

    response: AssistantResponse
