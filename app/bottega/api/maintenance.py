"""Routes of memory maintenance and its reports."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response

from bottega.api.deps import Actor, AdminTenant, Tenant, Transaction
from bottega.api.errors import headers, problems
from bottega.api.pages import LINK, PageQuery
from bottega.api.schemas.base import Page
from bottega.api.schemas.maintenance import MaintenanceJob, MemoryReport
from bottega.memory import jobs
from bottega.tenants import audit

router = APIRouter(prefix="/v1/memory", tags=["memory"])

ReportId = Annotated[UUID, Path(description="The id of the look through the memory.")]


@router.post(
    "/maintenance",
    operation_id="maintain_memory",
    summary="Look through the tenant's memory now",
    description=(
        "What is done every night: episodes age and become one with others, patterns are looked "
        "for, judged and refined, indexes are looked after, and a report is written. A worker does "
        "it beside the runs. While one is under way, the same one is answered, whoever ordered it: "
        "that is why this takes no `Idempotency-Key`."
    ),
    status_code=202,
    response_model=MaintenanceJob,
    responses={**problems(409), 202: headers(Location="Path of its report.")},
)
async def maintain(tx: Transaction, tenant: AdminTenant, actor: Actor, response: Response) -> Any:
    driver = (await tx.get_raw_connection()).driver_connection
    job_id, new = await jobs.order(driver, tenant)
    if new:
        await audit.note(tx, tenant, actor, "memory.maintain", str(job_id))
    response.headers["Location"] = f"/v1/memory/reports/{job_id}"
    return await jobs.get(driver, tenant, job_id)


@router.get(
    "/reports",
    operation_id="list_memory_reports",
    summary="List the looks through the memory by age",
    description="The last 400; what they found is in each one's report.",
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
        (await tx.get_raw_connection()).driver_connection,
        tenant,
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda job: job.id)


@router.get(
    "/reports/{report_id}",
    operation_id="get_memory_report",
    summary="Read what a look through the memory did and found",
    description="While it is under way, how far it is.",
    response_model=MemoryReport,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, report_id: ReportId) -> Any:
    driver = (await tx.get_raw_connection()).driver_connection
    return await jobs.get(driver, tenant, report_id)
