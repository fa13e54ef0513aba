"""A run's graph, and what its agents received from others, on the wire."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer


class Published(Answer):
    """The last publication of an agent in the graph."""

    version: int
    content: str
    task_id: Annotated[UUID | None, Field(description="Null: from an earlier run of the session.")]
    published_at: datetime


class RunNode(Answer):
    """An agent of a run's graph."""

    agent: str
    ttl_s: float | None
    published: Published | None


class ContextItem(Answer):
    """An answer that an agent received from another agent."""

    seq: Annotated[int, Field(description="Number of its event.")]
    task_id: UUID | None
    source: str
    version: int
    edge: Annotated[list[str] | None, Field(description="Null: recalled, not read directly.")] = (
        None
    )
    policy: str | None = None
    score: Annotated[
        float | None, Field(description="Only if recalled: similarity to the query, -1 to 1.")
    ] = None
    content: str


class Context(Answer):
    """All answers that an agent received from other agents."""

    items: list[ContextItem]


class RunGraph(Answer):
    """The run's own copy of its graph."""

    name: str
    version: int
    nodes: list[RunNode]
    edges: list[dict[str, Any]]
