"""Tool calls that wait for people: for an approval, an answer, or the client's result. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bottega.agents.messages import ToolCall, ToolResult, ToolStatus
from bottega.errors import shortened

EXPIRES_S = 604_800.0
"""Seconds after which a call that nobody decided on is denied."""
EDITED = "(arguments edited by a person)"

Kind = Literal["approval", "question", "client_tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """A tool call's need for people, before it goes on.

    Attributes:
        question: for people; only of a question.
        schema: JSON Schema of the answer, or of an approval's arguments.
        reason: why an approval is needed.
        server: the MCP server that asks; ``None``: the agent does.
        number: of a tool's own question: the first of a call is 1; 0: the call itself asks.
    """

    kind: Kind
    question: str | None = None
    schema: Mapping[str, Any] | None = None
    reason: str | None = None
    server: str | None = None
    expires_s: float = EXPIRES_S
    number: int = 0


@dataclass(frozen=True, slots=True)
class Resolution:
    """The decision of people on a tool call.

    Attributes:
        said: of an approval ``decision``, ``arguments`` and ``comment``; of a question
            ``answer``; of a client's tool ``result`` or ``error``.
    """

    said: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments that a person put in place of the model's, if any."""
        edited = self.said.get("arguments")
        return dict(edited) if isinstance(edited, Mapping) else None

    def result(self, call: ToolCall) -> ToolResult | None:
        """Return the call's result; ``None``: the tool is to be executed."""
        said = self.said
        if said.get("decision") == "approve":
            return None
        if said.get("decision") == "deny":
            return _failed(call, _denial(said), "denied")
        if (error := said.get("error")) is not None:
            return _failed(call, str(error))
        value = said["answer"] if "answer" in said else said.get("result")
        return ToolResult(tool_call_id=call.id, tool_name=call.name, result=value)


def as_edited(result: ToolResult) -> ToolResult:
    """Return the result of a call with edited arguments, so that the model knows."""
    if result.error is not None:
        return result.model_copy(update={"error": f"{EDITED}\n{result.error}"})
    return result.model_copy(update={"result": f"{EDITED}\n{result.text}"})


def _denial(said: Mapping[str, Any]) -> str:
    if said.get("reason") == "expired":
        return "denied: nobody decided in time"
    comment = said.get("comment")
    return f"denied by a person: {comment}" if comment else "denied by a person"


def _failed(call: ToolCall, error: str, error_type: str | None = None) -> ToolResult:
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        status=ToolStatus.ERROR,
        error=shortened(error),
        error_type=error_type,
    )
