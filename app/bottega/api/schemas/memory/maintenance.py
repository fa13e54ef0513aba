"""Maintenance jobs of a memory, and their reports, on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue

from bottega.api.schemas.base import Answer

_JOB: dict[str, JsonValue] = {
    "id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "cause": "nightly",
    "tick": "2026-11-02T03:00:00Z",
    "status": "done",
    "stage": 6,
    "error": None,
    "created_at": "2026-11-02T03:00:00Z",
    "started_at": "2026-11-02T03:00:00Z",
    "ended_at": "2026-11-02T03:00:04Z",
}


class MaintenanceJob(Answer):
    """A maintenance job of the tenant's memory."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})

    id: UUID
    cause: Annotated[
        Literal["nightly", "demand"],
        Field(description="`nightly`: by schedule; `demand`: on request."),
    ]
    tick: Annotated[datetime | None, Field(description="Scheduled time; null: on request.")]
    status: Annotated[
        Literal["pending", "running", "done", "failed"],
        Field(description="The next job continues a failed one."),
    ]
    stage: Annotated[int, Field(description="Number of finished stages, of six.")]
    error: Annotated[str | None, Field(description="Last error, until the job succeeds.")]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class MemoryReport(MaintenanceJob):
    """A maintenance job with its progress and report."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                _JOB
                | {
                    "progress": {"episodes": {"mature": 3, "ms": 41}},
                    "report": {
                        "episodes": {"stored": 120, "by_state": {"active": 117, "mature": 3}},
                        "patterns": {"by_state": {"CANDIDATE": 2, "VALIDATED": 1}},
                    },
                }
            ]
        }
    )

    progress: Annotated[
        dict[str, Any],
        Field(
            description=(
                "Counts and duration (`ms`) of each finished stage: `episodes`, `mining`, "
                "`validation`, `refinement`, `indices`, `report`."
            )
        ),
    ]
    report: Annotated[
        dict[str, Any] | None,
        Field(
            description=(
                "Contents of the memory after the job: episodes, storage, patterns, "
                "applications, learning from runs. Null until it is done."
            )
        ),
    ]
