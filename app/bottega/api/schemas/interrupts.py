"""Bodies of requests and responses about interrupts: tool calls that wait for people."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from bottega.api.schemas.base import Answer, Body, OwnUser
from bottega.events.data import Answerers, InterruptStatus, Kind


class InterruptItem(Answer):
    """A tool call that waits, or waited, for people."""

    model_config = ConfigDict(populate_by_name=True)

    id: UUID
    kind: Kind
    """`approval`: a person decides whether the tool may be called; `question`: a person answers the
    agent; `client_tool`: the run's client executes the tool."""
    status: InterruptStatus
    """`pending`: people have not decided; `resolved`: people decided; `expired`: nobody decided in
    time; `cancelled`: the run ended."""
    run_id: UUID
    session_id: str | None
    user: str | None
    """End user of the run; null: the run has no user."""
    task_id: UUID | None
    """Task whose agent called the tool; null: the run's first agent called the tool."""
    agent: str | None
    """Name of the agent that called the tool."""
    tool: str
    """Name of the called tool."""
    tool_call_id: str
    arguments: dict[str, Any]
    """Arguments of the call, as the model sent them."""
    question: str | None
    answer_schema: Annotated[dict[str, Any] | None, Field(alias="schema")]
    """JSON Schema of an answer, or of edited arguments."""
    reason: str | None
    """Reason why the call needs an approval."""
    confirm_above: dict[str, float] | None
    """Maximum values by argument, `arguments.NAME`: a person must confirm larger values; null: no
    maximum values."""
    server: str | None
    """The MCP server that asks the question; null: the agent itself asks."""
    node: str | None
    """The node of a graph that asks the question; null: a tool call asks."""
    who: Answerers | None
    """People who may answer a node's question: with the scope `run` or `approve`, with `approve`
    only, or only the run's user."""
    created_at: datetime
    """Time at which the call began to wait."""
    expires_at: datetime
    """Time at which the call is denied if nobody has decided."""
    resolved_at: datetime | None
    """Time of the decision; null: no decision yet."""
    resolved_by: dict[str, Any] | None
    """`key_id` and `name` of the key that decided."""
    resolution: dict[str, Any] | None


class NewDecision(Body):
    """A decision, whose fields depend on the interrupt's kind."""

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

    decision: Literal["approve", "deny"] | None = None
    """Decision on an approval."""
    arguments: dict[str, JsonValue] | None = None
    """With `approve`: arguments that replace the model's arguments."""
    comment: Annotated[str, StringConstraints(max_length=2000)] | None = None
    """Comment on an approval; the model reads it if the call is denied."""
    answer: JsonValue = None
    """Answer to a question."""
    result: JsonValue = None
    """Result of a client's tool."""
    error: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    """Error of the client's tool, if the tool failed."""
    user: OwnUser = None

    @property
    def said(self) -> dict[str, Any]:
        """Return the fields that the client sent; leave out nulls that mean an absent field."""
        optional = ("decision", "arguments", "comment", "error")
        fields = self.model_fields_set & set(NewDecision.model_fields) - {"user"}
        sent = self.model_dump(include=fields)
        return {name: sent[name] for name in sent if name not in optional or sent[name] is not None}


class Resolve(NewDecision):
    """A decision on a tool call for which the run waits; the kind determines the fields."""

    type: Literal["resolve"]
    interrupt_id: Annotated[UUID, Field(strict=False)]
    """Id of the interrupt to decide."""
