"""Work of tasks that linked runs do, on any worker: what crosses to them, and what comes back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bottega.agents.messages import AgentUsage
from bottega.subagents.handle import SubagentHandle, SubagentOutcome


@dataclass(frozen=True, slots=True)
class LinkedWork:
    """The work of a task, as strings.

    Attributes:
        agent: a defined agent: the task's, or that whose helper does it.
        is_helper: the agent of the task is a helper of ``agent``.
        question: the first message that the task's agent reads.
        most_steps: number of its model calls.
        files: shared files that it reads, by path.
    """

    agent: str
    is_helper: bool
    instructions: str | None
    question: str
    most_steps: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LinkedEnd:
    """The end of a linked run.

    Attributes:
        files: what it wrote below its task's folder, by path.
    """

    outcome: SubagentOutcome
    usage: AgentUsage = AgentUsage()
    files: Mapping[str, str] = field(default_factory=dict)


class Elsewhere(Protocol):
    """The linked runs of one run's tasks."""

    async def do(
        self, handle: SubagentHandle, work: LinkedWork, pay: Callable[[AgentUsage], None]
    ) -> LinkedEnd:
        """Do a task's work as a linked run, and wait for its end.

        Args:
            pay: called with what it used, even if the task is cancelled before its end.
        """

    async def tell(self, handle: SubagentHandle, message_id: str, text: str) -> bool:
        """Send a message to a task's linked run, once; return false if that is over."""
