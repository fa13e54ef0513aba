"""MCP servers on the wire."""

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import NAME_PATTERN, Answer, Body, Name
from bottega.json_schema.values import WHOLE
from bottega.settings.providers import is_endpoint, may_be_sent
from bottega.tools.http import SecretHeader

_Url = Annotated[
    str,
    StringConstraints(min_length=1, max_length=2000),
    AfterValidator(is_endpoint),
    Field(description="Of the endpoint for streamable HTTP. Redirects are not followed."),
]
_Command = Annotated[
    str,
    StringConstraints(pattern=NAME_PATTERN),
    Field(description="A key of the operator's setting BOTTEGA_MCP_STDIO: a local program."),
]
_Headers = Annotated[
    dict[str, str | SecretHeader],
    AfterValidator(may_be_sent),
    Field(max_length=50, description='Sent with each request: text or `{"secret": "NAME"}`.'),
]


class McpServerBody(Body):
    """An MCP server's definition; its name may be repeated."""

    model_config = ConfigDict(
        hide_input_in_errors=True,
        json_schema_extra={
            "examples": [
                {"url": "https://mcp.example.com/mcp", "headers": {"x-key": {"secret": "MCP_KEY"}}},
                {"command": "time"},
            ]
        },
    )

    name: Annotated[Name | None, Field(description="Null, or the name in the path.")] = None
    url: _Url | None = None
    command: _Command | None = None
    headers: _Headers = Field(default_factory=dict)
    timeout_s: Annotated[
        float,
        Field(gt=0, le=600, allow_inf_nan=False, description="Seconds for one call of a tool."),
    ] = 30.0
    max_bytes: Annotated[
        int, Field(ge=1000, le=20_000_000, description="Longest message of the server."), WHOLE
    ] = 1_000_000

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise PydanticCustomError(
                "one_way", "give either the url of a server, or the command of a local one"
            )
        if self.command is not None and self.headers:
            raise PydanticCustomError("headers", "headers are sent to a url: leave them out")
        return self


class NewMcpServer(McpServerBody):
    """An MCP server to create."""

    name: Name


class McpServerSummary(Answer):
    """One version of an MCP server, without its headers and tools."""

    name: str
    version: int
    url: str | None
    command: str | None
    timeout_s: float
    max_bytes: int
    tools_at: Annotated[
        datetime | None,
        Field(description="Time of the refresh that brought its tools; null: none has yet."),
    ]
    stale: Annotated[
        bool,
        Field(
            description="The server has said, in a run, that its tools are others by now: send "
            "`POST /v1/mcp-servers/{name}/refresh`."
        ),
    ] = False
    created_at: Annotated[datetime, Field(description="Time at which this version was stored.")]


class McpServerTool(Answer):
    """A tool of an MCP server, for models."""

    name: Annotated[str, Field(description="At the server.")]
    description: str
    input_schema: Annotated[dict[str, Any], Field(description="JSON Schema of the arguments.")]


class McpServer(McpServerSummary):
    """One version of an MCP server."""

    headers: dict[str, str | SecretHeader]
    tools: Annotated[
        list[McpServerTool] | None, Field(description="As of the last refresh; null: none yet.")
    ]
    warnings: Annotated[
        list[str], Field(description="Parts of the tools that had to be changed or left out.")
    ]


class McpServerTools(Answer):
    """The tools that an MCP server has now."""

    version: Annotated[int, Field(description="Of the server; a new one if the tools changed.")]
    tools: list[McpServerTool]
    warnings: list[str]
