"""Interrupts on the wire: tool calls that wait for people."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue, StringConstraints
from pydantic.config import JsonDict

from bottega.agents.approval import Kind
from bottega.api.schemas.base import Answer, Body, OwnUser

InterruptStatus = Literal["pending", "resolved", "expired", "cancelled"]

_EXAMPLE: JsonDict = {
    "id": "5b0f5b0e-3d6c-5f0e-9a53-0b8a0c2f4d11",
    "kind": "approval",
    "status": "pending",
    "run_id": "01980c52-9f10-7a51-9c56-2f8d3f0f2c77",
    "session_id": None,
    "user": "ada",
    "task_id": None,
    "agent": "support",
    "tool": "refund",
    "tool_call_id": "call_1",
    "arguments": {"order": "A-17", "amount": 240},
    "question": None,
    "schema": {"type": "object", "properties": {"amount": {"type": "number"}}},
    "reason": "Refunds above 100 need a person.",
    "server": None,
    "created_at": "2026-11-02T08:30:00Z",
    "expires_at": "2026-11-09T08:30:00Z",
    "resolved_at": None,
    "resolved_by": None,
    "resolution": None,
}


class InterruptItem(Answer):
    """A tool call that waits, or waited, for people."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]}, populate_by_name=True)

    id: UUID
    kind: Annotated[
        Kind,
        Field(
            description=(
                "`approval`: may the tool be called; `question`: the agent asks; `client_tool`: "
                "the run's client executes it."
            )
        ),
    ]
    status: InterruptStatus
    run_id: UUID
    session_id: str | None
    user: Annotated[str | None, Field(description="Of its run.")]
    task_id: Annotated[UUID | None, Field(description="Null: the run's first agent.")]
    agent: str | None
    tool: str
    tool_call_id: str
    arguments: dict[str, Any]
    question: str | None
    answer_schema: Annotated[
        dict[str, Any] | None,
        Field(alias="schema", description="JSON Schema of an answer, or of edited arguments."),
    ]
    reason: Annotated[str | None, Field(description="Why an approval is needed.")]
    server: Annotated[
        str | None, Field(description="The MCP server that asks; null: the agent itself.")
    ]
    created_at: datetime
    expires_at: Annotated[datetime, Field(description="The call is denied then.")]
    resolved_at: datetime | None
    resolved_by: Annotated[
        dict[str, Any] | None, Field(description="`key_id` and `name` of the key.")
    ]
    resolution: dict[str, Any] | None


class NewDecision(Body):
    """A decision; its fields depend on the interrupt's kind."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"decision": "approve", "arguments": {"order": "A-17", "amount": 100}},
                {"decision": "deny", "comment": "The order was delivered."},
                {"answer": "the red one"},
                {"result": {"done": True}},
            ]
        }
    )

    decision: Annotated[Literal["approve", "deny"] | None, Field(description="On an approval.")] = (
        None
    )
    arguments: Annotated[
        dict[str, JsonValue] | None,
        Field(description="With `approve`: other arguments than the model's."),
    ] = None
    comment: Annotated[
        Annotated[str, StringConstraints(max_length=2000)] | None,
        Field(description="On an approval; the model reads that of a denial."),
    ] = None
    answer: Annotated[JsonValue, Field(description="To a question.")] = None
    result: Annotated[JsonValue, Field(description="Of a client's tool.")] = None
    error: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None,
        Field(description="Of a client's tool that failed."),
    ] = None
    user: OwnUser = None

    @property
    def said(self) -> dict[str, Any]:
        """The fields that were sent; those that are null and need a value are left out."""
        optional = ("decision", "arguments", "comment", "error")
        told = self.model_fields_set & set(NewDecision.model_fields) - {"user"}
        sent = self.model_dump(include=told)
        return {name: sent[name] for name in sent if name not in optional or sent[name] is not None}


class Resolve(NewDecision):
    """A decision on a tool call of the run that waits; its fields depend on the kind."""

    type: Literal["resolve"]
    interrupt_id: Annotated[UUID, Field(strict=False)]
