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
        Literal["nightly", "demand"], Field(description="The clock, or somebody who asked for it.")
    ]
    tick: Annotated[
        datetime | None, Field(description="The time of the clock that it is of; null: on demand.")
    ]
    status: Annotated[
        Literal["pending", "running", "done", "failed"],
        Field(description="A failed one goes on at the next: nothing of it is lost."),
    ]
    stage: Annotated[int, Field(description="So many of its six stages are done.")]
    error: Annotated[str | None, Field(description="What went wrong last, while it is.")]
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
            description="What each stage counted that is done, and how long it took: `episodes`, "
            "`mining`, `validation`, `refinement`, `indices`, `report`."
        ),
    ]
    report: Annotated[
        dict[str, Any] | None,
        Field(
            description="What the memory holds after it: episodes, storage, patterns, "
            "applications, what was learned of runs, the cache's hit rate. Null until it is done."
        ),
    ]
