"""Settings of working and episodic memory."""

from pydantic_settings import BaseSettings


class MemorySettings(BaseSettings):
    """A group of :class:`app.settings.Settings`."""
