"""Sessions on the wire."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer


class Session(Answer):
    """Shared memory that outlives a run."""

    id: str
    user: Annotated[str | None, Field(description="Of the run that began it; it never changes.")]
    created_at: datetime
    updated_at: datetime


class SessionItem(Answer):
    """What an agent published last in a session."""

    agent: str
    version: int
    content: str
    run_id: UUID
    published_at: datetime


class SessionMemory(Session):
    """A session with all it holds."""

    memory: list[SessionItem]


class Erased(Answer):
    """What was removed, for good."""

    id: str
    removed: Annotated[
        dict[str, int],
        Field(
            description="How many rows, by table.",
            examples=[{"sessions": 1, "session_memory": 2, "runs": 1, "run_events": 31}],
        ),
    ]
