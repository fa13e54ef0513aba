"""Tool calls that wait for a person's approval or answer, or for a client's result. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from bottega.agents.messages import ToolCall, ToolResult, ToolStatus
from bottega.conditions import Condition, ConditionCheck, can_compare, holds, tests_of
from bottega.errors import InvalidInputError, shortened
from bottega.events.data import Answerers, Kind

_KINDS = ({"always"}, {"when"})
_MOST_THRESHOLDS = 8
_FEATURE = re.compile(r"arguments(\.[^.\x00-\x1f]{1,64}){1,8}")
_RULE = "a feature is arguments.NAME or arguments.NAME.NAME, with names of at most 64 characters"


@dataclass(frozen=True, slots=True)
class Approval:
    """A rule that says which calls of a tool a person must approve.

    Attributes:
        when: condition on the call's arguments. Without a condition, every call needs an approval.
        why: reason that people read; by default the text of the condition.
        confirm_above: thresholds, by the path of the argument. If an argument exceeds its
            threshold, a person must confirm the approval a second time.
    """

    when: Condition | None = None
    why: str | None = None
    confirm_above: Mapping[str, float] | None = None

    def reason(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the reason why a call needs an approval, or ``None`` if the call needs none.

        A call also needs an approval if an argument has a type that the condition cannot compare.
        """
        if self.when is None:
            return self.why or "always"
        if holds(self.when, lambda feature: _value(arguments, feature)):
            return self.why or json.dumps(self.when, ensure_ascii=False)
        for test in tests_of(self.when):
            found = _value(arguments, test["feature"])
            if found is not None and not can_compare(found, test["op"], test.get("value")):
                return f"the condition cannot compare the type of {test['feature']}"
        return None


def check_approval(approval: Any) -> None:
    """Validate an approval rule in its JSON form.

    Valid rules are ``never``, ``always``, and an object with ``always: true`` or
    ``when: condition``. The object may also have ``confirm_above: {arguments.NAME: number}``.

    Raises:
        InvalidInputError: the rule has an unknown form, or its condition is not valid.
    """
    if approval in ("never", "always"):
        return
    if not isinstance(approval, Mapping) or set(approval) - {"confirm_above"} not in _KINDS:
        raise InvalidInputError(
            "expected 'never', 'always', {\"always\": true} or {\"when\": CONDITION}; each object "
            'may also have "confirm_above"'
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
            f"expected an object with 1 to {_MOST_THRESHOLDS} numbers, each for one argument",
            pointer="/confirm_above",
        )
    for feature, number in thresholds.items():
        pointer = f"/confirm_above/{feature}"[:200]
        if not _FEATURE.fullmatch(feature):
            raise InvalidInputError(_RULE, pointer=pointer)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number):
            raise InvalidInputError("expected a number", pointer=pointer)


def approval_of(approval: Any, why: str | None = None) -> Approval | None:
    """Convert a valid rule from JSON; return ``None`` for the rule ``never``."""
    if approval in (None, "never"):
        return None
    if approval == "always":
        return Approval(why=why)
    return Approval(approval.get("when"), why, approval.get("confirm_above"))


def _value(arguments: Mapping[str, Any], feature: str) -> Any:
    found: Any = arguments
    for name in feature.split(".")[1:]:
        if found is None:
            break
        found = found.get(name) if isinstance(found, Mapping) else {}
    return found


EXPIRES_S = 604_800.0
"""Seconds after which a call without a decision is denied."""
EDITED = "(arguments edited by a person)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Request to people; a tool call or a graph's node waits for their answer.

    Attributes:
        question: text that people read, if the kind is ``question``.
        schema: JSON Schema of the answer, or of the arguments that people may edit.
        reason: why an approval is needed.
        confirm_above: see :class:`Approval`.
        server: the MCP server that asks, or ``None`` if the agent asks.
        node: the node of a graph that asks, or ``None`` if a tool call asks.
        who: group of people who may answer the request of a node: ``run``, ``approve`` or ``user``.
        number: number of the question among all questions of the running tool, from 1; 0 for a
            request before the tool runs.
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
    who: Answerers | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """The decision of people on a tool call.

    Attributes:
        said: fields of the decision. An approval has ``decision``, ``arguments`` and ``comment``;
            a question has ``answer``; a call of a client's tool has ``result`` or ``error``.
    """

    said: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments that a person edited, or ``None`` if nobody edited them."""
        edited = self.said.get("arguments")
        return dict(edited) if isinstance(edited, Mapping) else None

    def result(self, call: ToolCall) -> ToolResult | None:
        """Return the call's result; ``None``: people approved the call, so the tool must run."""
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
    """Add a note for the model to a result: a person has edited the arguments of the call."""
    if result.error is not None:
        return result.model_copy(update={"error": f"{EDITED}\n{result.error}"})
    return result.model_copy(update={"result": f"{EDITED}\n{result.text}"})


def _denial(answer: Mapping[str, Any]) -> str:
    if answer.get("reason") == "expired":
        return "denied: nobody decided in time"
    comment = answer.get("comment")
    return f"denied by a person: {comment}" if comment else "denied by a person"


def _failed(call: ToolCall, error: str, error_type: str | None = None) -> ToolResult:
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        status=ToolStatus.ERROR,
        error=shortened(error),
        error_type=error_type,
    )
