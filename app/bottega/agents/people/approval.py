"""Rules that say which calls of a tool a person must approve. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bottega.conditions import Condition, ConditionCheck, can_compare, holds, tests_of
from bottega.errors import InvalidInputError

_FEATURE = re.compile(r"arguments(\.[^.\x00-\x1f]{1,64}){1,8}")
_RULE = "a feature is arguments.NAME or arguments.NAME.NAME, with names of at most 64 characters"


@dataclass(frozen=True, slots=True)
class Approval:
    """A rule for the calls of a tool.

    Attributes:
        when: condition on the arguments; ``None``: every call.
        why: what people read; else they read the condition.
    """

    when: Condition | None = None
    why: str | None = None

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
    """Validate a rule as JSON: ``never``, ``always`` or ``{when: condition}``.

    Raises:
        InvalidInputError: it is another, or the condition is not valid.
    """
    if approval in ("never", "always"):
        return
    if not isinstance(approval, Mapping) or set(approval) != {"when"}:
        raise InvalidInputError("expected 'never', 'always' or {\"when\": CONDITION}")
    ConditionCheck(_FEATURE, _RULE).condition(approval["when"], "/when")


def approval_of(approval: Any, why: str | None = None) -> Approval | None:
    """Return a checked rule; ``None``: it asks for no approval."""
    if approval in (None, "never"):
        return None
    return Approval(None if approval == "always" else approval["when"], why)


def _value(arguments: Mapping[str, Any], feature: str) -> Any:
    """Return the argument at a feature's path, or ``None``; an object if the path cannot go on."""
    found: Any = arguments
    for name in feature.split(".")[1:]:
        if found is None:
            break
        found = found.get(name) if isinstance(found, Mapping) else {}
    return found
