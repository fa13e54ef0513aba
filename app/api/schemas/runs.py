"""Runs, their tasks and events on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from app.api.schemas.base import Answer, Body, Metadata, Name

Status = Literal["queued", "running", "completed", "failed", "timeout", "cancelled"]
Text = Annotated[str, StringConstraints(min_length=1, max_length=500_000)]


class InputMessage(Body):
    """A message of a run's input."""

    role: Literal["system", "user", "assistant"]
    content: Text


class NewRun(Body):
    """A run to start."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"agent": "coordinator", "graph": "software", "input": "Build a todo app."}
            ]
        }
    )

    mode: Annotated[
        Literal["orchestrated"],
        Field(description="`orchestrated`: the agent calls the others as it sees fit."),
    ] = "orchestrated"
    agent: Name
    graph: Name | None = None
    input: Annotated[
        Text | list[InputMessage],
        Field(description="The question, or messages of which exactly one has the role `user`."),
    ]
    priority: Annotated[int, Field(ge=1, le=10, description="1 goes first.")] = 5
    timeout_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=604_800,
            description="Wall time from the first start; null takes the server's default.",
        ),
    ] = None
    metadata: Metadata = Field(default_factory=dict)

    @field_validator("input")
    @classmethod
    def _one_question(cls, value: Any) -> Any:
        if isinstance(value, list):
            if len(value) > 500:
                raise PydanticCustomError("too_long", "at most 500 messages")
            users = sum(message.role == "user" for message in value)
            if users != 1:
                raise PydanticCustomError(
                    "one_user_message",
                    "exactly one message must have the role 'user', found {users}",
                    {"users": users},
                )
        return value


class Attempt(Answer):
    """One worker's go at a run."""

    number: int
    cause: Annotated[
        Literal["start", "crash", "drain"],
        Field(description="Why it began: the first start, or how the previous attempt ended."),
    ]
    started_at: datetime
    ended_at: datetime | None


class Failure(Answer):
    """Why something failed: a stable code, and a text for people."""

    code: str
    message: str


class Run(Answer):
    """A run."""

    id: UUID
    status: Status
    mode: str
    agent: str | None
    graph: str | None
    input: str | list[InputMessage]
    output: Annotated[Any, Field(description="The final answer; null while there is none.")]
    stop_reason: str | None
    error: Failure | None
    usage: dict[str, Any] | None
    attempts: list[Attempt]
    priority: int
    timeout_s: float
    metadata: Metadata
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class Task(Answer):
    """One call of a sub-agent."""

    id: UUID
    parent_id: Annotated[UUID | None, Field(description="Null: called by the run's own agent.")]
    agent: str
    depth: int
    status: str
    output: str | None
    error: Failure | None
    usage: dict[str, Any] | None
    started_at: datetime
    ended_at: datetime | None


class Event(Answer):
    """One entry of a run's log."""

    seq: Annotated[int, Field(description="1, 2, 3 … without gaps over the whole run.")]
    type: str
    run_id: UUID
    task_id: UUID | None
    agent: str | None
    parent_task_id: UUID | None
    at: datetime
    data: dict[str, Any]


class Published(Answer):
    """What an agent of the graph published last."""

    version: int
    content: str
    task_id: UUID | None
    published_at: datetime


class RunNode(Answer):
    """An agent of a run's graph."""

    agent: str
    ttl_s: float | None
    published: Published | None


class RunGraph(Answer):
    """The run's own copy of its graph."""

    name: str
    version: int
    nodes: list[RunNode]
    edges: list[dict[str, Any]]
