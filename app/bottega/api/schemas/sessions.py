"""Sessions on the wire."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer, Body, Metadata, OwnUser, UserName
from bottega.api.schemas.messages import Message
from bottega.api.schemas.runs import SessionName


class NewSession(Body):
    """A session to begin."""

    id: Annotated[SessionName | None, Field(description="Null: the server chooses one.")] = None
    user: Annotated[
        UserName | None, Field(description="Your own name for your end user; it never changes.")
    ] = None
    metadata: Metadata = Field(default_factory=dict)


class SessionChange(Body):
    """A change of a session."""

    metadata: Annotated[Metadata, Field(description="In place of all that it had.")]
    user: OwnUser = None


class SessionFork(Body):
    """The turns that a fork of a session takes over."""

    run_id: Annotated[
        UUID | None,
        Field(strict=False, description="The last of them; null: all that are completed."),
    ] = None
    user: OwnUser = None


class Session(Answer):
    """A session: conversations and memory that several runs share."""

    id: str
    user: Annotated[str | None, Field(description="Whose it is; it never changes.")]
    metadata: Metadata = Field(default_factory=dict)
    created_at: datetime
    updated_at: datetime


class SessionItem(Answer):
    """The last publication of an agent in a session."""

    agent: str
    version: int
    content: str
    run_id: UUID
    published_at: datetime
    metadata: Annotated[
        dict[str, Any],
        Field(default_factory=dict, description="What the agent's tools and hooks annotated."),
    ]


class SessionMemory(Session):
    """A session with all its publications."""

    memory: list[SessionItem]


class Erased(Answer):
    """The permanently deleted rows."""

    id: str
    removed: Annotated[
        dict[str, int],
        Field(
            description="Number of rows by table.",
            examples=[{"sessions": 1, "session_memory": 2, "runs": 1, "run_steps": 31}],
        ),
    ]


class SessionMessage(Message):
    """A message of a session's conversations."""

    run_id: UUID
    agent: Annotated[
        str | None, Field(description="Whose conversation it is in; null: a graph's question.")
    ]
    discarded: Annotated[
        bool,
        Field(
            description="True: its run failed or was cancelled, so later ones know nothing of it."
        ),
    ]
