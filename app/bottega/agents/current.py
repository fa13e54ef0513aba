"""Which tool call the running code belongs to.

A sub-agent is a tool like any other and is told nothing but its call; this is how it finds the
query that made the call, and how the query it starts finds its place in the tree.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from bottega.agents.recording import Query


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """A tool call being executed.

    Attributes:
        query: whose model asked for it.
        index: its place among the calls of that message.
        id: the model's own, for the call.
    """

    query: Query
    index: int
    id: str = ""


current_call: ContextVar[CurrentCall | None] = ContextVar("current_call", default=None)

next_query: ContextVar[Query | None] = ContextVar("next_query", default=None)
"""Prepared by a sub-agent wrapper for the query it is about to start."""


def take_next_query(agent: object) -> Query | None:
    """The query that was prepared for ``agent``, if it was not taken yet."""
    query = next_query.get()
    if query is None or query.agent is not agent or query.messages:
        return None
    return query
