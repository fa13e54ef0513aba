"""Sessions on the wire."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer


class Session(Answer):
    """A session: memory that several runs share."""

    id: str
    user: Annotated[str | None, Field(description="User of its first run; it never changes.")]
    created_at: datetime
    updated_at: datetime


class SessionItem(Answer):
    """The last publication of an agent in a session."""

    agent: str
    version: int
    content: str
    run_id: UUID
    published_at: datetime


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
