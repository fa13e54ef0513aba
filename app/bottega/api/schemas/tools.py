"""Tools in definitions of agents."""

import json
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, field_validator

from bottega.api.schemas.base import Body
from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import argument_schema
from bottega.tools.approvals import Approvable
from bottega.tools.http import HttpToolDefinition


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
    name: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"),
        Field(description="Name of the tool, for the model."),
    ]
    description: Annotated[
        str,
        StringConstraints(min_length=1, max_length=2000),
        Field(description="Purpose of the tool, for the model."),
    ]
    parameters: Annotated[
        dict[str, JsonValue],
        Field(description="JSON Schema (2020-12) of the arguments, an object."),
    ] = Field(default_factory=dict)

    @field_validator("parameters")
    @classmethod
    def _is_schema(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            argument_schema(json.dumps(parameters))
        except InvalidInputError as error:
            raise ValueError(error.detail) from None
        return parameters


ToolDefinition = Annotated[
    BuiltinTool | HttpToolDefinition | ClientToolDefinition, Field(discriminator="type")
]
