"""Validation of a query's answer against the agent's output schema and tool policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from bottega.agents.messages import AssistantMessage, ToolResult, ToolStatus
from bottega.agents.threads import run_in_thread

OUTPUT_INVALID = "output_invalid"
"""Code and stop reason of a query whose answer does not fit the agent's output schema."""
MOST_CORRECTIONS = 2
"""Number of times that one query asks the model to correct an invalid answer."""
_CORRECT = (
    "Your answer does not fit the required JSON Schema. Answer again, with all of the JSON and "
    "nothing else. What is wrong, by JSON Pointer:"
)


class _Problem(Protocol):
    @property
    def pointer(self) -> str:
        """The position of the wrong value, as a JSON Pointer."""

    @property
    def message(self) -> str:
        """Text that describes how the value violates the schema."""


class AnswerSchema(Protocol):
    """Port to an answer's schema; ``bottega.json_schema.output`` implements this port."""

    schema: dict[str, Any]

    @property
    def unchecked(self) -> Sequence[str]:
        """Positions of the schema's ``pattern`` keywords that are not checked."""

    def read(self, text: str) -> tuple[Any, list[Any]]:
        """Parse an answer; return its value and its violations of the schema."""

    def json_in(self, text: str) -> str:
        """Return the part of an answer that :meth:`read` parses."""


class Objection(NamedTuple):
    """The reason why an answer is rejected.

    Attributes:
        error: text for people.
        answer: text for the model.
        is_final: true if the query fails; false if the model may answer again.
    """

    code: str
    error: str
    answer: str
    is_final: bool


def answer_schema(schema: Mapping[str, Any]) -> AnswerSchema:
    """Check a JSON Schema of an agent's answer.

    Raises:
        InvalidInputError: the schema is not valid, or exceeds a limit of Bottega.
    """
    # The import is here, because the library loads slowly and most agents have no schema.
    from bottega.json_schema.output import output_schema

    return output_schema(schema)


class OutputCheck:
    """The validation of one query's answers.

    Attributes:
        value: the last valid answer, parsed.
    """

    def __init__(self, schema: AnswerSchema | None) -> None:
        self.schema = schema
        self.value: Any = None
        self._valid: str | None = None
        self._rejected = 0

    def json_in(self, message: AssistantMessage) -> AssistantMessage:
        """Remove all text around an answer's JSON, if there is a schema."""
        text = message.content if self.schema is None else self.schema.json_in(message.content)
        if text == message.content:
            return message
        return message.model_copy(update={"content": text, "state": {}})

    async def accepts(self, text: str) -> bool:
        """Return true if a text fits the schema; do not count a wrong text as a rejected answer."""
        return not await self._problems(text)

    async def objection(self, text: str) -> Objection | None:
        """Return the reason to reject an answer, or ``None`` if the answer fits the schema."""
        problems = await self._problems(text)
        if not problems:
            return None
        self._rejected += 1
        lines = [f"{each.pointer or 'the whole answer'}: {each.message}" for each in problems]
        error = f"the answer does not fit its output_schema: {'; '.join(lines)}"
        answer = "\n".join((_CORRECT, *lines))
        return Objection(OUTPUT_INVALID, error, answer, self._rejected > MOST_CORRECTIONS)

    async def _problems(self, text: str) -> list[Any]:
        if self.schema is None or text == self._valid:
            return []
        value, problems = await run_in_thread(partial(self.schema.read, text))
        if not problems:
            self.value, self._valid = value, text
        return problems


@dataclass(frozen=True, slots=True)
class ToolRequirement:
    """A tool that a query must call.

    Attributes:
        min_calls: minimum number of calls.
        require_success: if true, only successful calls count towards ``min_calls``.
        error_message: text that the model reads if a call is missing; by default a built-in text.
    """

    tool_name: str
    min_calls: int = 1
    require_success: bool = False
    error_message: str | None = None


def unmet(policy: Iterable[ToolRequirement], results: Sequence[ToolResult]) -> str | None:
    """Return a text with one line per unmet requirement, or ``None`` if no requirement is unmet."""
    lines = []
    for requirement in policy:
        count = sum(
            result.tool_name == requirement.tool_name
            and (not requirement.require_success or result.status is ToolStatus.SUCCESS)
            for result in results
        )
        if count < requirement.min_calls:
            lines.append(requirement.error_message or _sentence(requirement, count))
    return "\n".join(lines) or None


def _sentence(requirement: ToolRequirement, count: int) -> str:
    how = "successfully " if requirement.require_success else ""
    return (
        f"Before you answer, call the tool '{requirement.tool_name}' {how}at least "
        f"{requirement.min_calls} time(s); so far it was {count}."
    )


Check = Mapping[str, Any]
"""A check, as an object of an agent's definition."""
ALONE = frozenset(("equals", "contains", "json_schema"))
"""Types of the checks that :func:`decide_alone` decides."""
LONGEST_JUDGED = 100_000
"""Maximum number of characters of a result, and of a task, that a judge reads."""


async def decide_alone(check: Check, text: str) -> tuple[bool, str]:
    """Return whether an answer passes a check, and the reason if the answer fails.

    Args:
        check: a check of a type in :data:`ALONE`, which needs no model.

    Raises:
        LookupError: the check has another type.
    """
    match check["type"]:
        case "equals" if isinstance(check["value"], str):
            equal = text.strip() == check["value"].strip()
            return equal, "" if equal else f"the answer was not {quoted(check['value'])}"
        case "equals":
            return await _fits({"const": check["value"]}, text)
        case "contains":
            found = check["value"] in text
            return found, "" if found else f"the answer did not contain {quoted(check['value'])}"
        case "json_schema":
            return await _fits(check["schema"], text)
    raise LookupError(f"a check of type {check['type']!r} needs more than the answer")


async def unmet_check(checks: Sequence[Check], text: str) -> str | None:
    """Return the reason of the first failed check, or ``None`` if the answer passes all checks."""
    for check in checks:
        passed, reason = await decide_alone(check, text)
        if not passed:
            return reason
    return None


def quoted(text: str) -> str:
    """Return a text in quotes, cut to 100 characters."""
    return f'"{text if len(text) <= 100 else f"{text[:100]}…"}"'


async def _fits(schema: Mapping[str, Any], text: str) -> tuple[bool, str]:
    # The import is here, because the library loads slowly.
    from bottega.json_schema.output import output_schema

    problems = await run_in_thread(lambda: output_schema(schema).read(text)[1])
    return not problems, "; ".join(map(str, problems))
