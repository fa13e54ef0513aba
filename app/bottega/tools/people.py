"""Tools whose calls wait for people: approvals, questions to users, and tools of the client."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
)

from bottega.agents.approval import EXPIRES_S, Approval, Interrupt, approval_of, check_approval
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import ToolBase, error_result, refused_arguments
from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import shown_schema
from bottega.json_schema.described import DescribedModel
from bottega.json_schema.output import output_schema


def _checked(approval: Any) -> Any:
    try:
        check_approval(approval)
    except InvalidInputError as error:
        raise ValueError(f"{error.pointer or ''} {error.detail}".strip()) from None
    return approval


_Rule = Annotated[
    dict[str, JsonValue],
    Field(
        json_schema_extra={
            "properties": {
                "always": {"const": True, "description": "A person approves each call."},
                "when": {
                    "type": "object",
                    "additionalProperties": True,
                    "description": "Condition as in patterns, whose features are `arguments.NAME`: "
                    "a person approves the calls for which it is true.",
                },
                "confirm_above": {
                    "type": "object",
                    "additionalProperties": {"type": "number"},
                    "description": "Numbers by `arguments.NAME`: if the argument is larger, the "
                    "console asks the person a second time.",
                },
            },
            "oneOf": [{"required": ["always"]}, {"required": ["when"]}],
            "additionalProperties": False,
        }
    ),
]
ApprovalField = Annotated[Literal["never", "always"] | _Rule, BeforeValidator(_checked)]
ExpiresS = Annotated[
    float,
    Field(
        gt=0,
        le=31_536_000.0,  # a year
        strict=False,
        description="Seconds within which people must decide. After this time the call is denied.",
    ),
]


class Approvable(DescribedModel):
    """Fields in the definitions of tools whose calls may need a person's approval."""

    approval: ApprovalField | None = None
    """Calls that a person must approve first: `never`, `always`, `{always: true}`, or `{when:
    CONDITION}`: a condition as in patterns, whose features are `arguments.NAME`. An object may have
    `confirm_above: {arguments.NAME: NUMBER}`: if the argument is larger, the console asks the
    person a second time. Null means the agent's rule."""
    approval_reason: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = None
    """Reason that the person reads; null means the condition."""
    expires_s: ExpiresS = EXPIRES_S

    def rule(self, agents: Any) -> Approval | None:
        """Return the tool's approval rule; if the tool has none, the agent's rule (``agents``)."""
        value = agents if self.approval is None else self.approval
        return approval_of(value, self.approval_reason)


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1, description="What you want to know.")
    answer_schema: dict[str, Any] | None = Field(
        default=None, alias="schema", description="JSON Schema of the answer, if not free text."
    )
    expires_s: float = Field(
        default=EXPIRES_S, gt=0, le=31_536_000, description="Seconds until you need no answer."
    )

    @field_validator("answer_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            try:
                patterns = output_schema(schema).patterns
            except InvalidInputError as error:
                raise ValueError(error.detail) from None
            if patterns:
                raise ValueError("the schema of an answer must not have 'pattern'")
        return schema


class _PeoplesTool(ToolBase):
    timeout_s = None  # no limit, because ``expires_s`` limits the time for people
    idempotent = True
    local = True

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Return an error: a call is executed here only if it could not be sent to people."""
        return error_result(tool_call, "the call could not be sent to people")


class AskUser(_PeoplesTool):
    """A tool by which a model asks the user a question; the user may answer days later."""

    name = "ask_user"
    description = (
        "Asks the user a question and waits for the answer. Use it if you cannot go on without."
    )

    def create_schema(self) -> dict[str, Any]:
        return _Question.model_json_schema()

    def interrupt(self, tool_call: ToolCall) -> Interrupt | None:
        try:
            question = _Question.model_validate(tool_call.arguments)
        except ValidationError:
            return None
        return Interrupt(
            kind="question",
            question=question.question,
            schema=question.answer_schema,
            expires_s=question.expires_s,
        )

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            _Question.model_validate(tool_call.arguments)
        except ValidationError as error:
            return refused_arguments(tool_call, error)
        return await super().execute(tool_call)


class ClientTool(_PeoplesTool):
    """A tool that the run's client executes.

    Args:
        parameters: JSON Schema of the arguments.
        expires_s: seconds within which the client must send the result.
    """

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        expires_s: float = EXPIRES_S,
    ) -> None:
        self.name = name
        self.description = description
        self.expires_s = expires_s
        self._parameters = parameters

    def create_schema(self) -> dict[str, Any]:
        return shown_schema(self._parameters)

    def interrupt(self, tool_call: ToolCall) -> Interrupt | None:
        return Interrupt(kind="client_tool", expires_s=self.expires_s)
