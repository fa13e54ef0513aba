"""Routes of memory maintenance and its reports."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page
from bottega.api.schemas.memory.maintenance import MaintenanceJob, MemoryReport
from bottega.api.shared.deps import Actor, AdminTenant, Tenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.db.driver import driver_of
from bottega.memory.learning import maintenance as jobs
from bottega.tenants import audit

router = APIRouter(prefix="/v1/memory", tags=["memory"])

ReportId = Annotated[UUID, Path(description="The report's id.")]


@router.post(
    "/maintenance",
    operation_id="maintain_memory",
    summary="Start a maintenance job of the tenant's memory",
    description=(
        "Does the work of the nightly job: age and consolidate episodes; mine, validate and "
        "refine patterns; maintain indexes; write a report. A worker does it beside the runs. "
        "While a job is open, it is returned instead of a new one, so there is no "
        "`Idempotency-Key`."
    ),
    status_code=202,
    response_model=MaintenanceJob,
    responses={**problems(409), 202: headers(Location="Path of its report.")},
)
async def maintain(tx: Transaction, tenant: AdminTenant, actor: Actor, response: Response) -> Any:
    driver = await driver_of(tx)
    job_id, new = await jobs.order(driver, tenant)
    if new:
        await audit.note(tx, tenant, actor, "memory.maintain", str(job_id))
    response.headers["Location"] = f"/v1/memory/reports/{job_id}"
    return await jobs.get(driver, tenant, job_id)


@router.get(
    "/reports",
    operation_id="list_memory_reports",
    summary="List maintenance jobs by age",
    description="The last 400. Read a job's own report for its results.",
    response_model=Page[MaintenanceJob],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await jobs.page(
        await driver_of(tx),
        tenant,
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda job: job.id)


@router.get(
    "/reports/{report_id}",
    operation_id="get_memory_report",
    summary="Read a maintenance job's report",
    description="While the job is open, it shows the progress.",
    response_model=MemoryReport,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, report_id: ReportId) -> Any:
    driver = await driver_of(tx)
    return await jobs.get(driver, tenant, report_id)
