"""Decisions on a run's result, one for each of its agent's success checks."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import to_json

from bottega.agents.threads import run_in_thread
from bottega.errors import BottegaError
from bottega.json_schema.output import OutputSchema, output_schema
from bottega.json_schema.schema import Problem

LONGEST_REASON = 500
LONGEST_JUDGED = 100_000
"""Characters of a result, and of a task, that a judge reads."""

Check = Mapping[str, Any]
"""A check as an agent's definition has it."""


@dataclass(frozen=True, slots=True)
class EndResult:
    """The result of a run.

    Attributes:
        task: the run's input.
        output: the answer.
    """

    task: Any
    output: Any

    @property
    def text(self) -> str:
        """The answer as text."""
        return self.output if isinstance(self.output, str) else to_json(self.output).decode()


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The decision of one check.

    Attributes:
        passed: ``None``: it could not be decided.
        reason: empty for a simple check that passed.
    """

    type: str
    passed: bool | None
    reason: str = ""

    def clean(self, remove_secrets: Callable[[str], str]) -> "CheckVerdict":
        """Return it without secrets, with a reason of bounded length."""
        # PostgreSQL stores no NUL in JSON.
        reason = remove_secrets(self.reason.replace("\x00", " "))
        return CheckVerdict(self.type, self.passed, reason[:LONGEST_REASON])


Ask = Callable[[Check, EndResult], Awaitable[tuple[bool, str]]]
"""Function (check, result) → (passed, reason), of something outside: a model, a plugin."""


async def decide(check: Check, result: EndResult, outside: Mapping[str, Ask]) -> CheckVerdict:
    """Decide a check.

    Args:
        outside: by type of check.
    """
    kind: Literal["equals", "contains", "json_schema", "judge", "python"] = check["type"]
    try:
        match kind:
            case "equals" if isinstance(check["value"], str):
                said = _equals(result.text, check["value"])
            case "equals":
                said = await _fits({"const": check["value"]}, result.text)
            case "contains":
                said = _contains(result.text, check["value"])
            case "json_schema":
                said = await _fits(check["schema"], result.text)
            case _:
                said = await outside[kind](check, result)
    except BottegaError as error:
        return CheckVerdict(kind, None, error.detail)
    return CheckVerdict(kind, *said)


def passed(verdicts: Sequence[CheckVerdict]) -> bool | None:
    """Return whether all checks passed; ``None``: some are undecided, and none failed."""
    if any(each.passed is False for each in verdicts):
        return False
    return True if all(each.passed for each in verdicts) else None


def _equals(text: str, wanted: str) -> tuple[bool, str]:
    equal = text.strip() == wanted.strip()
    return equal, "" if equal else f"the answer is not {_quoted(wanted)}"


def _contains(text: str, wanted: str) -> tuple[bool, str]:
    found = wanted in text
    return found, "" if found else f"the answer does not contain {_quoted(wanted)}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


async def _fits(schema: Mapping[str, Any], text: str) -> tuple[bool, str]:
    checked = await run_in_thread(lambda: output_schema(schema))
    problems = await run_in_thread(lambda: _problems(checked, text))
    return not problems, "; ".join(map(str, problems))


def _problems(schema: OutputSchema, text: str) -> list[Problem]:
    return schema.read(text)[1]
