"""The tool call that the running code belongs to.

A sub-agent is a tool and receives only its arguments. Through these variables it finds the query
that called it, and the query that it starts finds its place in the tree.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from bottega.agents.recording import Query


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """A tool call that is being executed.

    Attributes:
        query: the query that made the call.
        index: index among the calls of the message.
        id: the call's id from the model.
    """

    query: Query
    index: int
    id: str = ""


current_call: ContextVar[CurrentCall | None] = ContextVar("current_call", default=None)

next_query: ContextVar[Query | None] = ContextVar("next_query", default=None)
"""The query that a sub-agent wrapper is about to start."""


def take_next_query(agent: object) -> Query | None:
    """Return the query prepared for ``agent``; ``None`` if there is none or it has started."""
    query = next_query.get()
    if query is None or query.agent is not agent or query.messages:
        return None
    return query
