"""Settings of working and episodic memory."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings


class MemorySettings(BaseSettings):
    """A group of :class:`app.settings.Settings`."""

    memory: Annotated[
        Literal["off", "read", "full"],
        Field(
            description="What runs may do with memory: nothing, be given what earlier runs taught, "
            "or add to it too. Runs and agents may ask for less."
        ),
    ] = "full"
    memory_inline_bytes: Annotated[
        int,
        Field(
            ge=1024,
            le=1_000_000,
            description="Traces and texts of an episode beyond this move to the object store.",
        ),
    ] = 16_384
