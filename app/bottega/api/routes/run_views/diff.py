"""The route that compares two runs."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from bottega.api.errors import headers, problems
from bottega.api.schemas.run_graphs import RunDiff
from bottega.api.shared.deps import ServiceDep, Tenant
from bottega.api.shared.pages import LINK, PageQuery
from bottega.runs.diff import compare, differences, totals

router = APIRouter(prefix="/v1/runs", tags=["runs"])


class DiffQuery(PageQuery):
    """Query parameters of a comparison."""

    with_: Annotated[UUID, Field(alias="with", description="Id of the other run, the `after`.")]
    limit: Annotated[int, Field(ge=1, le=50, description="Agents on a page.")] = 50


@router.get(
    "/{run_id}/diff",
    operation_id="compare_runs",
    summary="Compare two runs, agent by agent",
    description=(
        "The run in the path is `before`, the other one `after`. The runs may be of different "
        "agents, and may be under way: then it shows what their logs have so far."
    ),
    response_model=RunDiff,
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def diff(
    service: ServiceDep,
    tenant: Tenant,
    run_id: Annotated[UUID, Path(description="The run's id.")],
    query: Annotated[DiffQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    async with service.database.begin(tenant) as tx:
        before, after, pairs = await compare(
            tx,
            tenant,
            run_id,
            query.with_,
            place=query.place(str),
            descending=query.descending,
            limit=query.limit,
        )
    page = query.page(request, response, pairs, lambda pair: pair[0])
    return {
        "before": before,
        "after": after,
        "total": totals(before, after),
        "agents": await differences(before, after, pairs),
        "next_cursor": page["next_cursor"],
    }
