"""Tool calls that wait for people: for an approval, an answer, or the client's result. Pure.

Rules say which calls of a tool a person must approve.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from bottega.agents.messages import ToolCall, ToolResult, ToolStatus
from bottega.conditions import Condition, ConditionCheck, can_compare, holds, tests_of
from bottega.errors import InvalidInputError, shortened

_KINDS = ({"always"}, {"when"})
_MOST_THRESHOLDS = 8
_FEATURE = re.compile(r"arguments(\.[^.\x00-\x1f]{1,64}){1,8}")
_RULE = "a feature is arguments.NAME or arguments.NAME.NAME, with names of at most 64 characters"


@dataclass(frozen=True, slots=True)
class Approval:
    """A rule for the calls of a tool.

    Attributes:
        when: condition on the arguments; ``None``: every call.
        why: what people read; else they read the condition.
        confirm_above: numbers by feature: who approves a larger argument is asked once more.
    """

    when: Condition | None = None
    why: str | None = None
    confirm_above: Mapping[str, float] | None = None

    def reason(self, arguments: Mapping[str, Any]) -> str | None:
        """Return why a call needs an approval; ``None``: it needs none.

        An argument of a type that the condition cannot compare needs one, too.
        """
        if self.when is None:
            return self.why or "always"
        if holds(self.when, lambda feature: _value(arguments, feature)):
            return self.why or json.dumps(self.when, ensure_ascii=False)
        for test in tests_of(self.when):
            found = _value(arguments, test["feature"])
            if found is not None and not can_compare(found, test["op"], test.get("value")):
                return f"{test['feature']} has another type than its condition"
        return None


def check_approval(approval: Any) -> None:
    """Validate a rule as JSON.

    It is ``never``, ``always``, or an object with ``always: true`` or ``when: condition``, and
    perhaps ``confirm_above: {feature: number}``.

    Raises:
        InvalidInputError: it is another, or the condition is not valid.
    """
    if approval in ("never", "always"):
        return
    if not isinstance(approval, Mapping) or set(approval) - {"confirm_above"} not in _KINDS:
        raise InvalidInputError(
            "expected 'never', 'always', {\"always\": true} or {\"when\": CONDITION}, each object "
            'perhaps with "confirm_above"'
        )
    if "when" in approval:
        ConditionCheck(_FEATURE, _RULE).condition(approval["when"], "/when")
    elif approval["always"] is not True:
        raise InvalidInputError("expected true", pointer="/always")
    if "confirm_above" in approval:
        _check_thresholds(approval["confirm_above"])


def _check_thresholds(thresholds: Any) -> None:
    if not isinstance(thresholds, Mapping) or not 0 < len(thresholds) <= _MOST_THRESHOLDS:
        raise InvalidInputError(
            f"expected an object of one to {_MOST_THRESHOLDS} numbers by argument",
            pointer="/confirm_above",
        )
    for feature, number in thresholds.items():
        pointer = f"/confirm_above/{feature}"[:200]
        if not _FEATURE.fullmatch(feature):
            raise InvalidInputError(_RULE, pointer=pointer)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number):
            raise InvalidInputError("expected a number", pointer=pointer)


def approval_of(approval: Any, why: str | None = None) -> Approval | None:
    """Return a checked rule; ``None``: it asks for no approval."""
    if approval in (None, "never"):
        return None
    if approval == "always":
        return Approval(why=why)
    return Approval(approval.get("when"), why, approval.get("confirm_above"))


def _value(arguments: Mapping[str, Any], feature: str) -> Any:
    """Return the argument at a feature's path, or ``None``; an object if the path cannot go on."""
    found: Any = arguments
    for name in feature.split(".")[1:]:
        if found is None:
            break
        found = found.get(name) if isinstance(found, Mapping) else {}
    return found


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
        confirm_above: as of :class:`Approval`.
        server: the MCP server that asks; ``None``: the agent does.
        node: the node of a graph that asks; ``None``: a tool call does.
        who: of a node: who may answer, ``run``, ``approve`` or ``user``.
        number: of a tool's own question: the first of a call is 1; 0: the call itself asks.
    """

    kind: Kind
    question: str | None = None
    schema: Mapping[str, Any] | None = None
    reason: str | None = None
    confirm_above: Mapping[str, float] | None = None
    server: str | None = None
    expires_s: float = EXPIRES_S
    number: int = 0
    node: str | None = None
    who: str | None = None


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
