"""Rules for calls that a person must approve."""

from typing import Any

import pytest

from bottega.agents.approval import approval_of, check_approval
from bottega.errors import InvalidInputError

AMOUNT = {"feature": "arguments.amount", "op": "gt", "value": 100}
DEEP = {"feature": "arguments.to.country", "op": "ne", "value": "IT"}


@pytest.mark.parametrize(
    ("condition", "arguments", "needed"),
    [
        (AMOUNT, {"amount": 101}, True),
        (AMOUNT, {"amount": 100}, False),
        (AMOUNT, {"amount": "101"}, True),
        (AMOUNT, {"amount": [101]}, True),
        (AMOUNT, {"amount": True}, True),
        (AMOUNT, {"amount": float("nan")}, True),
        (AMOUNT, {"amount": None}, False),
        (AMOUNT, {}, False),
        (AMOUNT | {"op": "ge"}, {"amount": 100}, True),
        (AMOUNT | {"op": "lt"}, {"amount": 1.5}, True),
        (AMOUNT | {"op": "le"}, {"amount": 101}, False),
        (AMOUNT | {"op": "eq", "value": 1}, {"amount": True}, True),
        (DEEP, {"to": {"country": "FR"}}, True),
        (DEEP, {"to": "FR"}, True),
        (DEEP, {"to": {"country": {}}}, True),
        (DEEP, {"to": {}}, False),
        (DEEP | {"op": "not_in", "value": ["FR"]}, {"to": {"country": 5}}, True),
        (DEEP | {"op": "in", "value": ["IT", "FR"]}, {"to": {"country": "FR"}}, True),
        (DEEP | {"op": "not_in", "value": ["IT"]}, {"to": {"country": "FR"}}, True),
        (DEEP | {"op": "contains", "value": "R"}, {"to": {"country": "FR"}}, True),
        (DEEP | {"op": "contains", "value": "R"}, {"to": {"country": ["R"]}}, True),
        ({"feature": "arguments.x", "op": "exists"}, {"x": {}}, True),
        ({"not": AMOUNT}, {}, True),
        ({"any": [AMOUNT, DEEP]}, {"amount": 101}, True),
        ({"all": [AMOUNT, DEEP]}, {"amount": 101}, False),
        ({"not": AMOUNT}, {"amount": 500}, False),
        ({"not": AMOUNT}, {"amount": "500"}, True),
    ],
)
def test_a_condition_decides_by_the_arguments(
    condition: Any, arguments: dict[str, Any], needed: bool
) -> None:
    rule = {"when": condition}
    check_approval(rule)
    approval = approval_of(rule)
    assert approval is not None
    assert (approval.reason(arguments) is not None) is needed


def test_a_rule_says_why() -> None:
    assert approval_of("never") is None
    always = approval_of("always", "Money leaves.")
    assert always is not None
    assert always.reason({}) == "Money leaves."
    when = approval_of({"when": AMOUNT})
    assert when is not None
    assert "arguments.amount" in (when.reason({"amount": 500}) or "")


NO_THRESHOLDS: list[Any] = [
    *(None, {}, [], {"amount": 1}, {"arguments.x": "1"}, {"arguments.x": True}),
    *({"arguments.x": float("inf")}, {f"arguments.x{n}": 1 for n in range(9)}),
]


@pytest.mark.parametrize("kind", [{"always": True}, {"when": AMOUNT}])
def test_a_rule_names_numbers_to_confirm(kind: dict[str, Any]) -> None:
    rule = kind | {"confirm_above": {"arguments.amount": 1000}}
    check_approval(rule)
    approval = approval_of(rule)
    assert approval is not None
    assert approval.confirm_above == {"arguments.amount": 1000}


@pytest.mark.parametrize(
    "rule",
    [
        {"confirm_above": {"arguments.amount": 1}},
        *({"always": False}, {"always": 1}, {"always": True, "when": AMOUNT}),
        *({"always": True, "confirm_above": thresholds} for thresholds in NO_THRESHOLDS),
        *("sometimes", {}, [], 1, {"when": AMOUNT, "else": 1}, {"when": {}}, {"when": None}),
        {"when": AMOUNT | {"feature": "amount"}},
        {"when": AMOUNT | {"feature": "arguments."}},
        {"when": AMOUNT | {"op": "like"}},
    ],
)
def test_a_bad_rule_is_refused(rule: Any) -> None:
    with pytest.raises(InvalidInputError):
        check_approval(rule)
