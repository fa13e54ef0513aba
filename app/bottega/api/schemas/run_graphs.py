"""A run's graph, what its agents received from others, and two runs compared, on the wire."""

from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer
from bottega.api.schemas.usage import Cost

T = TypeVar("T")

Metadata = Annotated[
    dict[str, Any],
    Field(default_factory=dict, description="What the agent's tools and hooks annotated."),
]


class Published(Answer):
    """The last publication of an agent in the graph."""

    version: int
    content: str
    task_id: Annotated[UUID | None, Field(description="Null: from an earlier run of the session.")]
    published_at: datetime
    metadata: Metadata


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
    metadata: Metadata


class Context(Answer):
    """All answers that an agent received from other agents."""

    items: list[ContextItem]


class RunGraph(Answer):
    """The run's own copy of its graph."""

    name: str
    version: int
    nodes: list[RunNode]
    edges: list[dict[str, Any]]


class BeforeAfter(Answer, Generic[T]):
    """A value of the run in the path, and of the run that it is compared with."""

    before: T
    after: T


class OutputDiff(BeforeAfter[str | None]):
    """An agent's last answer in both runs."""

    before: Annotated[str | None, Field(description="At most 10,000 characters of it.")]
    after: Annotated[str | None, Field(description="At most 10,000 characters of it.")]
    diff: Annotated[
        str, Field(description="Unified diff of at most 400 lines of each; empty: no difference.")
    ]
    truncated: Annotated[bool, Field(description="An output is longer than one of these limits.")]


class ReceivedDiff(Answer):
    """Context that an agent received from one source, in both runs."""

    source: str
    version: Annotated[
        BeforeAfter[int | None], Field(description="Its last version; null: nothing was received.")
    ]
    times: Annotated[BeforeAfter[int], Field(description="Number of times that it was received.")]
    is_same: Annotated[bool, Field(description="The texts of both runs are equal, in their order.")]


class AgentDiff(Answer):
    """An agent in both runs, without its sub-agents."""

    agent: str
    version: Annotated[
        BeforeAfter[int | None], Field(description="Version of its definition; null: not in it.")
    ]
    output: OutputDiff
    tokens: Annotated[BeforeAfter[int], Field(description="Sent and received in model calls.")]
    cost: BeforeAfter[Cost]
    duration_ms: Annotated[
        BeforeAfter[int | None],
        Field(description="Sum of its ended queries, sub-agents included; null: there is none."),
    ]
    model_calls: BeforeAfter[int]
    tool_calls: BeforeAfter[int]
    queries: Annotated[BeforeAfter[int], Field(description="Number of times that it was asked.")]
    received: list[ReceivedDiff]
    received_more: Annotated[
        bool, Field(description="There are more sources than the 100 in `received`.")
    ]


class ComparedRun(Answer):
    """One of the compared runs."""

    id: UUID
    status: str
    agent: str | None
    graph: str | None
    mode: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class RunTotals(Answer):
    """Two runs as wholes; null: known once the run has ended."""

    tokens: BeforeAfter[int | None]
    cost: BeforeAfter[Cost | None]
    duration_ms: BeforeAfter[int | None]
    model_calls: BeforeAfter[int | None]
    tool_calls: BeforeAfter[int | None]


class RunDiff(Answer):
    """Two runs compared: as wholes, and agent by agent."""

    before: ComparedRun
    after: ComparedRun
    total: RunTotals
    agents: Annotated[list[AgentDiff], Field(description="Agents that did something, by name.")]
    next_cursor: Annotated[
        str | None, Field(description="Pass it as `cursor` for more agents; null on the last page.")
    ] = None
