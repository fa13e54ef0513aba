"""The data of events about tool calls, on the wire."""

from typing import Annotated, Any, Literal

from pydantic import Field

from bottega.api.schemas.events.data import AnswerSeq, Call, EventData
from bottega.api.schemas.parts import ContentPart


class ToolCallData(EventData):
    """Data of a tool call."""

    call: Call
    tool_call_id: str
    name: str


class ToolStartedData(ToolCallData):
    """Data of a tool call that begins."""

    arguments: dict[str, Any]


class ToolErrorData(EventData):
    """An error of a tool call."""

    type: Annotated[
        str,
        Field(
            description="A code, such as `timeout`, `invalid_arguments` or `http_error`, that of a "
            "sub-agent's error, or an exception's class. `tool_error`: the text alone tells."
        ),
    ]
    message: str
    status: Annotated[int | None, Field(description="Of HTTP.")] = None


class ToolEndedData(ToolCallData):
    """Data of a tool call's end."""

    status: Literal["success", "error"]
    result: Any
    error: Annotated[ToolErrorData | None, Field(description="Only of `tool.failed`.")]
    answer_seq: AnswerSeq = None
    output: str | None = None  # a sub-agent's answer
    parts: Annotated[list[ContentPart], Field(description="Images and files, by reference.")] = (
        Field(default_factory=list)
    )
    annotations: Annotated[
        dict[str, Any] | None, Field(description="Metadata for what the agent publishes.")
    ] = None
