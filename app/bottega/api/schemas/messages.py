"""Messages of a run on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field

from bottega.api.schemas.base import Answer, Body, OwnUser
from bottega.api.schemas.parts import Content, ContentPart
from bottega.api.schemas.runs import Usage


class NewMessage(Body):
    """A user's message for a run under way."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "In euros, please."}]})

    content: Annotated[
        Content,
        Field(description="A text, or parts; at most 100,000 bytes, but for the data of files."),
    ]
    user: OwnUser = None


class SendMessage(NewMessage):
    """A user's message for the run."""

    type: Literal["message"]


class MessageSent(Answer):
    """Confirmation that a message is stored; events name it by its id."""

    message_id: UUID


class MessageCall(Answer):
    """A tool call that a model made."""

    id: str
    name: str
    arguments: dict[str, Any]
    malformed: Annotated[
        str | None, Field(description="The model's text, if it is not a JSON object.")
    ] = None


class _Said(Answer):
    """The content of a message."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        Field(description="`system`: from the input, or passed on by another agent (`source`)."),
    ]
    content: Annotated[str, Field(description="Its text; with `parts` that of the text parts.")]
    parts: Annotated[
        list[ContentPart], Field(description="The whole content, if it is not only text.")
    ] = Field(default_factory=list)
    tool_calls: list[MessageCall] = Field(default_factory=list)
    usage: Annotated[Usage | None, Field(description="Tokens of a model's answer.")] = None
    tool_call_id: Annotated[str | None, Field(description="The call that a tool answers.")] = None
    name: Annotated[str | None, Field(description="Name of the tool.")] = None
    status: Annotated[
        Literal["success", "error"] | None, Field(description="The tool's status.")
    ] = None
    source: str | None = None
    version: int | None = None
    message_id: Annotated[
        UUID | None, Field(description="Id of a user's message that was sent during the run.")
    ] = None


class Message(_Said):
    """A message of a conversation, from the run's log."""

    seq: Annotated[int, Field(description="Number of its event; one for all messages of an input.")]
    at: datetime


class PromptMessage(_Said):
    """A message of a prompt, and its origin."""

    seq: Annotated[
        int | None, Field(description="Number of its event; null: from a definition.")
    ] = None
    at: datetime | None = None
    origin: Annotated[
        Literal["agent", "graph", "context", "memory", "input", "user", "model", "tool"],
        Field(
            description="`agent`: its system message; `graph`: the order of its sub-agents; "
            "`context`: another agent's publication; `memory`: of earlier runs; `user`: sent "
            "during the run."
        ),
    ]


class PromptTool(Answer):
    """A tool of the agent's definition, a sub-agent, or a tool of the run's client."""

    name: str
    type: Literal["builtin", "http", "mcp", "client", "agent"]
    description: str | None
    parameters: dict[str, Any] | None = None


class Shortened(Answer):
    """Effect of the working memory on a prompt that would be too long."""

    tokens: Annotated[int, Field(description="Estimated tokens of the prompt as sent.")]
    shrunk: Annotated[int, Field(description="Results that were replaced by a summary.")]
    left: Annotated[int, Field(description="Messages that were left out.")]


class Prompt(Answer):
    """The prompt of a model call, from the run's log and its pinned definitions."""

    task_id: UUID | None
    agent: str
    version: Annotated[
        int | None, Field(description="Version of its definition; null: a helper without one.")
    ]
    call: int
    attempt: int
    provider: str | None
    model: str | None
    params: Annotated[dict[str, Any], Field(description="The agent's and the run's, merged.")]
    tools: list[PromptTool]
    shortened: Annotated[
        Shortened | None, Field(description="Null: the prompt has the messages as they are.")
    ]
    messages: list[PromptMessage]
    more: Annotated[
        bool, Field(description="Messages between the first 100 and the last 200 are left out.")
    ]
