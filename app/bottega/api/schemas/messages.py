"""Messages of a run on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field

from bottega.api.schemas.base import Answer, Body
from bottega.api.schemas.parts import Content, ContentPart
from bottega.api.schemas.usage import Usage


class NewMessage(Body):
    """A user's message for a run under way."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "In euros, please."}]})

    content: Annotated[
        Content,
        Field(description="A text, or parts; at most 100,000 bytes, but for the data of files."),
    ]


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


class Message(Answer):
    """A message of a conversation, from the run's log."""

    seq: Annotated[int, Field(description="Number of its event; one for all messages of an input.")]
    at: datetime
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
