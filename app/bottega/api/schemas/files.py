"""Files on the wire."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer


class File(Answer):
    """A stored file."""

    id: UUID
    name: str | None
    size: Annotated[int, Field(description="In bytes.")]
    sha256: Annotated[str, Field(description="Of its bytes, in hexadecimal.")]
    media_type: Annotated[str, Field(description="Found in its bytes.")]
    tokens: Annotated[int, Field(description="Estimate of its tokens in a prompt.")]
    session_id: Annotated[str | None, Field(description="The session that it is deleted with.")]
    created_at: datetime
