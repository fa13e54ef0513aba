"""Tools in definitions of agents."""

import json
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from bottega.api.schemas.base import Body
from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import argument_schema
from bottega.tools.approvals import Approvable
from bottega.tools.http import HttpToolDefinition, ToolName, ToolParameters, ToolPurpose
from bottega.tools.mcp import McpToolDefinition


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
    def _is_schema(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            argument_schema(json.dumps(parameters))
        except InvalidInputError as error:
            raise ValueError(error.detail) from None
        return parameters


ToolDefinition = Annotated[
    BuiltinTool | HttpToolDefinition | ClientToolDefinition | McpToolDefinition,
    Field(discriminator="type"),
]
