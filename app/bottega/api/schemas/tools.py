"""Tools in definitions of agents."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, field_validator

from bottega.api.schemas.base import Body
from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import shown_schema
from bottega.tools.http import HttpToolDefinition, ToolName, ToolParameters, ToolPurpose
from bottega.tools.mcp import McpToolDefinition
from bottega.tools.people import Approvable


class BuiltinTool(Body, Approvable):
    """A tool that is built into the server."""

    type: Literal["builtin"]
    name: Annotated[
        Literal["current_time", "calculator", "http_get", "read_shared_memory", "ask_user"],
        Field(description="The model sees it under this name."),
    ]


class ClientToolDefinition(Body, Approvable):
    """A tool that the run's client executes; its run waits for the result."""

    type: Literal["client"]
    name: ToolName
    description: ToolPurpose
    parameters: ToolParameters = Field(default_factory=dict)

    @field_validator("parameters")
    @classmethod
    def _can_be_shown(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            shown_schema(parameters)
        except InvalidInputError as error:
            raise ValueError(error.detail) from None
        return parameters


class RunToolDefinition(ClientToolDefinition):
    """A tool that a run brings with it."""

    description: Annotated[
        str,
        StringConstraints(min_length=1, max_length=20_000),
        Field(description="Purpose of the tool, for the model."),
    ]
    client_name: Annotated[
        str | None,
        StringConstraints(min_length=1, max_length=200),
        Field(
            description="The client's own name of the tool, if models refuse it; OpenAI's API "
            "calls it so."
        ),
    ] = None


ToolDefinition = Annotated[
    BuiltinTool | HttpToolDefinition | ClientToolDefinition | McpToolDefinition,
    Field(discriminator="type"),
]
