"""Fields of tools' definitions about what people decide."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, StringConstraints

from bottega.agents.approval import EXPIRES_S, Approval, approval_of, check_approval
from bottega.errors import InvalidInputError

MOST_EXPIRES_S = 31_536_000.0


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
            "properties": {"when": {"type": "object"}},
            "required": ["when"],
            "additionalProperties": False,
        }
    ),
]
ApprovalField = Annotated[Literal["never", "always"] | _Rule, BeforeValidator(_checked)]
ExpiresS = Annotated[
    float,
    Field(
        gt=0,
        le=MOST_EXPIRES_S,
        strict=False,
        description="Seconds that people have to decide; then the call is denied.",
    ),
]


class Approvable(BaseModel):
    """Fields of a tool whose calls people may have to approve."""

    approval: Annotated[
        ApprovalField | None,
        Field(
            description=(
                "Calls that a person must approve first: `never`, `always`, or `{when: "
                "CONDITION}`, as in patterns, with features `arguments.NAME`. Null: as the agent "
                "says."
            )
        ),
    ] = None
    approval_reason: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=500)] | None,
        Field(description="What the person reads; null: the condition."),
    ] = None
    expires_s: ExpiresS = EXPIRES_S

    def rule(self, agents: Any) -> Approval | None:
        """Return the rule for its calls; ``agents`` is the agent's own, if any."""
        wanted = agents if self.approval is None else self.approval
        return approval_of(wanted, self.approval_reason)
