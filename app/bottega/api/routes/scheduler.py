"""Load of the workers, from their reports."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from bottega.api.errors import problems
from bottega.api.schemas.base import Answer
from bottega.api.shared.deps import Tenant, Transaction
from bottega.engine import workers

router = APIRouter(prefix="/v1/scheduler", tags=["operations"])

ByPriority = Annotated[
    dict[str, int],
    Field(description="Waiting tasks by priority.", examples=[{"1": 2, "5": 9}]),
]
Parked = Annotated[
    int,
    Field(description="Started tasks without a slot: they wait for tasks, or for one."),
]


class Pool(Answer):
    """A worker's tasks, of all tenants together."""

    size: Annotated[int, Field(description="Number of slots.")] = 0
    min: int = 0
    max: int = 0
    busy: Annotated[int, Field(description="Slots that tasks hold.")] = 0
    parked: Parked = 0
    queued: Annotated[int, Field(description="Tasks that wait for a slot.")] = 0
    queue: ByPriority = Field(default_factory=dict)
    runs: Annotated[int, Field(description="Runs that it executes.")] = 0
    totals: Annotated[
        dict[str, float],
        Field(
            description=(
                "Counters since the worker's start, by name; a histogram has its count, its sum, "
                "and cumulative counts up to bounds (le_). Times in milliseconds."
            ),
            examples=[{"subagent.dispatch.count": 12, "subagent.status.completed": 11}],
        ),
    ] = Field(default_factory=dict)


class Breaker(Answer):
    """A circuit breaker: it stops the dispatch of an agent's tasks that keep failing in a run."""

    run_id: Annotated[UUID, Field(description="The run whose tasks fail.")]
    agent: Annotated[str, Field(description="The agent whose tasks fail.")]
    state: Annotated[
        Literal["open", "half_open"],
        Field(description="`open`: none is dispatched. `half_open`: one is tried."),
    ]
    failures: int
    retry_after_ms: Annotated[
        int | None,
        Field(description="Of an open breaker: time until one task is let through."),
    ] = None


class OwnTasks(Answer):
    """A worker's tasks of the caller's tenant."""

    running: Annotated[int, Field(description="Started tasks, including parked ones.")] = 0
    parked: Parked = 0
    queued: Annotated[int, Field(description="Tasks that wait for a slot.")] = 0
    queue: ByPriority = Field(default_factory=dict)
    breakers: Annotated[list[Breaker], Field(description="Breakers that are not closed.")] = Field(
        default_factory=list
    )


class Worker(Answer):
    """A worker that is alive."""

    id: UUID
    started_at: datetime
    version: Annotated[str, Field(description="Of Bottega, as it runs there.")]
    seen_at: Annotated[datetime, Field(description="Its last report.")]
    pool: Pool
    tenant: OwnTasks


class QueuedRuns(Answer):
    """The caller's queued runs of one priority."""

    priority: int
    queued: Annotated[int, Field(description="Number of runs that wait for a place.")]
    oldest_at: Annotated[datetime, Field(description="Since when the oldest of them waits.")]


class Quota(Answer):
    """A limit of the caller's tenant, and how much of it is used."""

    name: Literal[
        "concurrent_runs", "queued_runs", "tokens_per_day", "cost_per_day", "storage_bytes"
    ]
    used: Annotated[
        Decimal,
        Field(description="Runs, tokens of today (UTC), US dollars of today, or stored bytes."),
    ]
    limit: Annotated[Decimal | None, Field(description="Null: there is none.")]


class Storage(Answer):
    """Bytes that the caller's tenant stores, as they were some seconds ago."""

    definitions: Annotated[int, Field(description="With deleted and earlier ones.")] = 0
    episodes: int = 0
    files: int = 0
    runs: Annotated[int, Field(description="With their logs; of one under way, its request.")] = 0
    sessions: Annotated[int, Field(description="Metadata and shared memory.")] = 0


class Workers(Answer):
    """The workers that are alive, oldest first, and what the caller's tenant waits for."""

    workers: list[Worker]
    runs: Annotated[list[QueuedRuns], Field(description="Queued runs, the first to go first.")]
    quotas: list[Quota]
    storage: Storage


@router.get(
    "",
    operation_id="get_scheduler",
    summary="Read the workers' load",
    description=(
        "The workers that are alive, and their asynchronous tasks: "
        "totals of all tenants, and the caller's own part; its queued runs, and its limits."
    ),
    response_model=Workers,
    responses=problems(),
)
async def get(tx: Transaction, tenant: Tenant) -> dict[str, Any]:
    found = await workers.alive(tx)
    load = await workers.load_of(tx, tenant)
    return {"workers": [{**row, "tenant": row["state"] or {}} for row in found], **load}
