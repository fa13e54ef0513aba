"""Port for working memory: selects the messages of a prompt.

Without a memory the prompt is the whole history. Only the root agent of a run may have a memory.
The history itself is never shortened.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bottega.agents.messages import StandardMessage
from bottega.agents.provider import ToolSchema

if TYPE_CHECKING:
    from bottega.agents.query import Query
    from bottega.agents.tools import ToolBase


class PromptMemory(Protocol):
    """The memory of one agent; copies of the agent have none."""

    @property
    def tools(self) -> "Sequence[ToolBase]":
        """Additional tools of the agent; may change with each :meth:`compose`."""

    def compose(self, query: "Query", schemas: Sequence[ToolSchema]) -> Sequence[StandardMessage]:
        """Return the prompt's messages in place of ``query.agent.conversation_history``.

        Called before every model call, replayed ones included. The result depends only on the
        history, so a resumed run has the same prompts. Reports omissions in ``query.composed``.

        Args:
            schemas: schemas of all tools in the prompt.
        """
