"""Bodies of requests and responses about a run's messages and prompts."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, ConfigDict, Field

from bottega.api.schemas.base import Answer, Body, Content, OwnUser, Role, ShownPart
from bottega.events.data import ModelToolCall, ShortenedPrompt, Usage


class NewMessage(Body):
    """A user's message for a run that has not ended."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "In euros, please."}]})

    content: Content
    """A text, or parts; maximum size 100,000 bytes, without the data of files."""
    user: OwnUser = None


class SendMessage(NewMessage):
    """A user's message for the run."""

    type: Literal["message"]


class MessageSent(Answer):
    """Confirmation that a message is stored, with the id that is in the message's events."""

    message_id: UUID


_ModelCall = Annotated[
    ModelToolCall, AfterValidator(lambda call: {"arguments": {}, "malformed": None, **call})
]


class _Said(Answer):
    role: Role
    """Author of the message; `system`: the run's input, or another agent (`source`)."""
    content: str
    """Text of the message; if the message has `parts`, the text of its text parts."""
    parts: list[ShownPart] = Field(default_factory=list)
    """The whole content, if the message is more than text."""
    tool_calls: list[_ModelCall] = Field(default_factory=list)
    """Tool calls of the model's answer."""
    usage: Usage | None = None
    """Tokens of a model's answer."""
    tool_call_id: str | None = None
    """The tool call that a message of a tool answers."""
    name: str | None = None
    """Name of the tool."""
    status: Literal["success", "error"] | None = None
    """Status of the tool call."""
    source: str | None = None
    """Name of the agent, pattern or episode from which the message comes; null: none of these."""
    version: int | None = None
    """Number of the agent's publication; null: the message is not a publication."""
    message_id: UUID | None = None
    """Id of a user's message that was sent during the run."""


class Message(_Said):
    """A message of a conversation, from the run's log."""

    seq: int
    """Number of the message's event; all messages of an input share one event."""
    at: datetime
    """Time of the message's event."""


class PromptMessage(_Said):
    """A message of a prompt, and the message's origin."""

    seq: int | None = None
    """Number of the message's event; null: the message comes from a definition."""
    at: datetime | None = None
    """Time of the message's event; null: the message comes from a definition."""
    origin: Literal["agent", "graph", "context", "memory", "input", "user", "model", "tool"]
    """Source of the message. `agent`: the agent's system message; `graph`: the order of the agent's
    sub-agents; `context`: another agent's publication; `memory`: earlier runs; `input`: the run's
    input; `user`: a user's message that was sent during the run; `model`, `tool`: answers of the
    model or of a tool."""


class PromptTool(Answer):
    """A tool of the agent's definition, a sub-agent, or a tool of the run's client."""

    name: str
    """Name of the tool, as the model sees it."""
    type: Literal["builtin", "http", "mcp", "client", "agent"]
    """Kind of the tool; `agent`: a sub-agent."""
    description: str | None
    """Purpose of the tool, as the model reads it."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments."""


class Prompt(Answer):
    """The prompt of a model call, made from the run's log and the run's pinned definitions."""

    task_id: UUID | None
    agent: str
    """Name of the agent that called the model."""
    version: int | None
    """Version of the agent's definition; null: the task has no definition."""
    call: int
    attempt: int
    provider: str | None
    """Name of the provider; null: the call did not begin."""
    model: str | None
    """Name of the model; null: the call did not begin."""
    params: dict[str, Any]
    """Parameters of the agent and of the run, merged."""
    tools: list[PromptTool]
    """Tools that the model could call."""
    shortened: ShortenedPrompt | None
    """Shortening of the prompt; null: the prompt was not shortened."""
    messages: list[PromptMessage]
    """Messages of the prompt, in order."""
    more: bool
    """True: the response leaves out messages between the first 100 and the last 200."""
