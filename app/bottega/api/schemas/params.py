"""Bodies of requests and responses about tools, parameters of models and schemas of answers."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError, to_json

from bottega.agents.params import Effort, Verbosity
from bottega.api.schemas.base import Body
from bottega.definitions.agents import MOST_MODELS
from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import shown_schema
from bottega.json_schema.output import check_length
from bottega.json_schema.values import WHOLE
from bottega.tools.builtin import BuiltinName
from bottega.tools.http import HttpToolDefinition, ToolParameters, ToolPurpose
from bottega.tools.http import ToolName as HttpToolName
from bottega.tools.mcp import McpToolDefinition
from bottega.tools.people import Approvable

_LONGEST_EXTRA = 16_384


class BuiltinTool(Body, Approvable):
    """A tool that is built into the server."""

    type: Literal["builtin"]
    name: BuiltinName
    """Name of the tool, as the model sees it."""


class ClientToolDefinition(Body, Approvable):
    """A tool that the run's client executes; the run waits for the result."""

    type: Literal["client"]
    name: HttpToolName
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
    """A tool of the client, defined in the request for a run."""

    description: Annotated[str, StringConstraints(min_length=1, max_length=20_000)]
    """Purpose of the tool, for the model to read."""
    client_name: Annotated[str | None, StringConstraints(min_length=1, max_length=200)] = None
    """The client's own name of the tool, if models refuse this name; only for OpenAI's API."""


ToolDefinition = Annotated[
    BuiltinTool | HttpToolDefinition | ClientToolDefinition | McpToolDefinition,
    Field(discriminator="type"),
]


def _short(extra: dict[str, Any]) -> dict[str, Any]:
    if len(to_json(extra)) > _LONGEST_EXTRA:
        raise PydanticCustomError("too_long", f"longer than {_LONGEST_EXTRA} bytes")
    return extra


def short_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema of more than 64 KiB."""
    try:
        check_length(schema)
    except InvalidInputError as error:
        raise PydanticCustomError("output_schema", "{why}", {"why": error.detail}) from None
    return schema


OutputSchemaField = Annotated[dict[str, JsonValue], AfterValidator(short_schema)]
"""A JSON Schema of an answer, at most 64 KiB, for :func:`api.shared.schemas.check_schema`."""


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object":
        raise PydanticCustomError(
            "input_schema", 'arguments are always an object: the schema needs "type": "object"'
        )
    return schema


ToolInputSchema = Annotated[
    OutputSchemaField,
    AfterValidator(_of_an_object),
    Field(
        json_schema_extra={
            "properties": {
                "type": {"const": "object", "description": "The arguments are an object."}
            },
            "required": ["type"],
        },
        description=(
            "JSON Schema (2020-12) of the arguments if the agent is a tool at `/mcp`; the run's "
            "input is then the arguments as JSON. Null: the tool has one argument, the text "
            "`input`."
        ),
    ),
]


class ToolName(Body):
    """A parameter that chooses one tool."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """Name of the tool."""


class Parameters(Body):
    """Parameters of model calls. For a missing parameter, the model's default applies.

    The server refuses a parameter that the model's API does not have.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"temperature": 0.2, "max_output_tokens": 2000}]}
    )

    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    """Randomness of the answer; 0 means the least randomness."""
    top_p: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    """Tokens are chosen from the most probable tokens, which together have this probability."""
    max_output_tokens: Annotated[int, Field(ge=1, le=10_000_000), WHOLE] | None = None
    """Maximum number of output tokens of one model call; a budget may set a lower limit."""
    reasoning_effort: Effort | None = None
    """Amount of thinking of a reasoning model before its answer."""
    verbosity: Verbosity | None = None
    """Length of the answer."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    """Number that makes answers repeatable, if the model's server supports it."""
    stop: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=256)]],
            Field(min_length=1, max_length=16),
        ]
        | None
    ) = None
    """Texts that end the answer."""
    parallel_tool_calls: bool | None = None
    """False: the model calls one tool at a time."""
    tool_choice: Literal["required", "none"] | ToolName | None = None
    """`required`: the model must call a tool; `none`: the model must not call a tool; an object
    names the tool that the model must call. The choice applies to the model calls in
    `tool_choice_scope`."""
    service_tier: Annotated[str | None, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = (
        None
    )
    """Price and speed class of the model's API."""
    extra_body: (
        Annotated[dict[str, JsonValue], Field(max_length=50), AfterValidator(_short)] | None
    ) = None
    """Further fields of the request, under the names of the model's API."""

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """Show only parameters that were sent. (A return annotation would replace the fields'
        schema.)"""
        return {name: value for name, value in handler(self).items() if name in self.names_sent}

    @property
    def names_sent(self) -> set[str]:
        """Names of the parameters that the client sent, including parameters that are null."""
        return self.model_fields_set


def _distinct(tools: list[RunToolDefinition]) -> list[RunToolDefinition]:
    names = [tool.name for tool in tools]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise PydanticCustomError(
            "duplicate_tool", "two tools have the name '{name}'", {"name": repeated}
        )
    return tools


_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=265)]
ModelNames = _ModelName | Annotated[list[_ModelName], Field(min_length=1, max_length=MOST_MODELS)]
"""References to models; see :mod:`bottega.definitions.agents`."""
SystemMessage = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
MaxIterations = Annotated[int, Field(ge=1, le=100), WHOLE]


class AgentChanges(Body):
    """Fields of an agent's definition that one run changes."""

    system_message: SystemMessage | None = None
    """Instructions at the beginning of each of the agent's model calls."""
    model: ModelNames | None = None
    """Models, of providers that the run has pinned."""
    max_iterations: MaxIterations | None = None
    """Maximum number of model calls per query."""
    params: Parameters | None = None
    """Parameters that replace the agent's parameters; null means the model's default."""

    @property
    def changes(self) -> dict[str, Any]:
        """Return the fields that the client sent."""
        values = self.model_dump(exclude_none=True)
        return values if self.params is None else values | {"params": self.params.model_dump()}


class AgentOverrides(Body):
    """Changes to one agent for one run."""

    params: Parameters = Field(default_factory=Parameters)
    """Each parameter replaces the agent's parameter of that name; null means the model's default.
    """
    tools: Annotated[list[RunToolDefinition], Field(max_length=128), AfterValidator(_distinct)] = (
        Field(default_factory=list)
    )
    """Tools of this run's client, in addition to the agent's own tools; all names must differ."""
    instructions: Annotated[str | None, StringConstraints(min_length=1, max_length=500_000)] = None
    """Text that this run adds to the agent's system message. Later runs of the conversation do not
    get this text."""

    @model_serializer(mode="wrap")
    def _with_more(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """Leave out empty fields except ``params``. (A return annotation would replace the
        schema.)"""
        value = handler(self)
        return {name: each for name, each in value.items() if each or name == "params"}


class ShownOverrides(AgentOverrides, AgentChanges):
    """Changes to one agent for one run, including the changes of a fork."""

    params: Parameters = Field(default_factory=Parameters)
    """Parameters that replace the agent's parameters."""
