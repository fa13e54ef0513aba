"""Settings of files, and of all that a tenant stores."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings


class FileSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    tenant_storage_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**15,
            description="Bytes of all definitions, episodes, files, runs and sessions of a tenant. "
            "Beyond them nothing new is taken in. Unset: no limit.",
        ),
    ] = None
    files_bytes: Annotated[
        int, Field(ge=1, le=10**15, description="Bytes of all files of a tenant.")
    ] = 10_000_000_000
    files_count: Annotated[
        int, Field(ge=1, le=1_000_000, description="Number of files of a tenant.")
    ] = 10_000
    files_days: Annotated[
        float,
        Field(
            gt=0,
            le=36_500,
            description="Days after its last use for which a file without a session is kept.",
        ),
    ] = 30.0
