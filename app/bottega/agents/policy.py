"""Policy of tool calls that a query must make before its answer is accepted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bottega.agents.messages import ToolResult, ToolStatus


@dataclass(frozen=True, slots=True)
class ToolRequirement:
    """A tool that a query must call.

    Attributes:
        min_calls: least number of calls.
        require_success: if true, only successful calls count.
        error_message: text for the model in place of the built-in one.
    """

    tool_name: str
    min_calls: int = 1
    require_success: bool = False
    error_message: str | None = None


def unmet(policy: Iterable[ToolRequirement], results: Sequence[ToolResult]) -> str | None:
    """Return a text with one line per unmet requirement; ``None`` if all are met."""
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
