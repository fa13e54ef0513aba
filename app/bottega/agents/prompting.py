"""What of its history an agent's model is given (the port that working memory fills in).

Without a memory that is the history itself. The root agent of a run may have one, which chooses;
the history is never cut.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bottega.agents.messages import StandardMessage
from bottega.agents.provider import ToolSchema

if TYPE_CHECKING:
    from bottega.agents.recording import Query
    from bottega.agents.tools import ToolBase


class PromptMemory(Protocol):
    """Of one agent; its copies have none."""

    @property
    def tools(self) -> "Sequence[ToolBase]":
        """Tools that the agent has for as long as they are named here."""

    def compose(self, query: "Query", schemas: Sequence[ToolSchema]) -> Sequence[StandardMessage]:
        """What the model is given in place of ``query.agent.conversation_history``.

        Called before every model call, also before one that a record answers; it does nothing but
        follow from the history, so that a run that is resumed has the same prompts. What it left
        out it tells in ``query.composed``.

        Args:
            schemas: of all tools that the model is given.
        """
