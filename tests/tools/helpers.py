"""A name service for tests."""

from collections.abc import Sequence

from bottega.agents.messages import ToolCall, ToolResult, ToolStatus
from bottega.agents.tools import ToolBase


class Names:
    """Resolver that answers each look-up with the next of ``answers``, the last one for ever.

    Attributes:
        asked: the names that were looked up.
    """

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def call(tool: ToolBase, **arguments: object) -> ToolResult:
    """Call a tool as a model would."""
    return await tool.execute(ToolCall(id="1", name=tool.name, arguments=arguments))


async def result_of(tool: ToolBase, **arguments: object) -> object:
    """Return the result of a call that succeeds."""
    answer = await call(tool, **arguments)
    assert answer.status is ToolStatus.SUCCESS, answer.error
    return answer.result


async def error_of(tool: ToolBase, **arguments: object) -> str:
    """Return the error of a call that fails."""
    answer = await call(tool, **arguments)
    assert answer.status is ToolStatus.ERROR, answer.result
    assert answer.error is not None
    return answer.error
