"""Settings of retention: how long finished things are kept."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

_Days = Annotated[float | None, Field(gt=0, le=36_500)]


class RetentionSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    retention_runs_days: Annotated[
        _Days,
        Field(
            description="Days after its end for which a run is kept, with its events, tasks and "
            "files. Unset: for ever."
        ),
    ] = None
    retention_audit_days: Annotated[
        _Days, Field(description="Days for which the audit log is kept. Unset: for ever.")
    ] = None
    retention_episodes_days: Annotated[
        _Days,
        Field(
            description="Days after its run's end for which an archived episode is kept. Unset: "
            "for ever."
        ),
    ] = None

    @property
    def retention_days(self) -> dict[str, float | None]:
        """Days by kind; ``None``: for ever. A tenant may have its own."""
        return {
            "runs": self.retention_runs_days,
            "audit": self.retention_audit_days,
            "episodes": self.retention_episodes_days,
        }
