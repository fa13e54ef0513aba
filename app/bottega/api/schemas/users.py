"""Bodies of the users' routes."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from bottega.api.schemas.base import Answer


class User(Answer):
    """An end user, and the erasure of the user's data if one is under way."""

    user: str
    status: Annotated[
        Literal["active", "erasing"],
        Field(description="`erasing`: nothing new of this user is accepted."),
    ]
    requested_at: datetime | None
    removed: Annotated[
        dict[str, int],
        Field(
            description="Number of rows removed so far, by table.",
            examples=[{"runs": 300, "run_steps": 2410}],
        ),
    ]
