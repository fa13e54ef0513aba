"""Routes of runs."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from bottega.api.auth import Principal, acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import NAME_PATTERN, Page, PlaceInTime
from bottega.api.schemas.messages import Message
from bottega.api.schemas.run_graphs import Context, RunGraph
from bottega.api.schemas.runs import (
    NewRun,
    Run,
    RunSummary,
    SessionName,
    Status,
    Task,
    TaskStatus,
)
from bottega.api.schemas.teams.subagents import EffectiveLimits
from bottega.api.shared import idempotency
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.followed import until_rest
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.new_runs import submit
from bottega.api.shared.pages import LINK, PageQuery, ViewQuery, encoded_page
from bottega.api.shared.plain import plain_route
from bottega.api.shared.wanted import MessagePart, MetadataPairs, QueriedUser, Seq, pairs_of
from bottega.db.failures import is_transient
from bottega.definitions.agents import first_subagents
from bottega.runs import messages, read

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[UUID, Path(description="The run's id.")]
MAX_WAIT_S = 60.0


class RunQuery(ViewQuery):
    """Query parameters of the list of runs."""

    status: Status | None = None
    agent: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None
    session_id: SessionName | None = None
    user: QueriedUser = None
    parent_run_id: Annotated[
        UUID | None,
        Query(description="Only this run's linked runs, which are not listed else."),
    ] = None
    created_after: PlaceInTime | None = None
    created_before: PlaceInTime | None = None
    metadata: MetadataPairs

    def wanted(self) -> read.RunFilter:
        return read.RunFilter(
            status=self.status,
            agent=self.agent,
            session_id=self.session_id,
            user=self.user,
            parent_run_id=self.parent_run_id,
            created_after=self.created_after,
            created_before=self.created_before,
            metadata=pairs_of(self.metadata),
        )


def _path(run: Mapping[str, Any]) -> str:
    return f"{router.prefix}/{run['id']}"


async def _create_plain(request: Request, body: NewRun) -> Response:
    principal: Principal = request.scope["state"]["principal"]
    principal.need("run")
    key = request.headers.get(idempotency.HEADER)
    once = None if key is None else await idempotency.once_key(request, key)
    run = await submit(request.scope["app"].state.service, principal, body, once)
    content = Run.model_validate(run).model_dump_json()
    return Response(content, 202, {"Location": _path(run)}, "application/json")


async def create(
    once: OnceDep,
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: NewRun,
    response: Response,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the end.")
    ] = 0,
) -> Any:
    run = await submit(service, principal, body, await once.sent())
    response.headers["Location"] = _path(run)
    if not wait:
        return run
    run_id = UUID(str(run["id"]))
    try:
        async with asyncio.timeout(wait):
            await until_rest(service, principal, run_id)
    except TimeoutError:
        pass
    except Exception as error:
        if not is_transient(error):
            raise
        return run  # the run is accepted, though it cannot be watched now
    async with service.database.begin(tenant) as tx:
        return await read.get(tx, tenant, run_id)


router.add_api_route(
    "",
    create,
    methods=["POST"],
    route_class_override=plain_route(NewRun, _create_plain),
    operation_id="create_run",
    summary="Start a run",
    description=(
        "Stores and queues the run, and responds at once. With `wait` it responds when the run "
        "has ended or waits for people, or when the wait is over; the status shows which. With "
        "a repeated `Idempotency-Key` it returns, and waits for, the existing run."
    ),
    status_code=202,
    response_model=Run,
    responses={**problems(400, 404, 409, 413, 415), 202: headers(Location="Path of the run.")},
)


@router.get(
    "",
    operation_id="list_runs",
    summary="List runs by age",
    response_model=Page[Run] | Page[RunSummary],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    query: Annotated[RunQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    acts_for(principal, query.user, None)
    found = await read.page(
        tx,
        tenant,
        query.wanted(),
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
        full=query.full,
    )
    page = query.page(request, response, found, lambda run: run["id"])
    return await encoded_page(page, Run if query.full else RunSummary, response)


class RunInFull(Run):
    """A run, with the limits of its first agent's tasks."""

    effective_limits: EffectiveLimits | None


@router.get(
    "/{run_id}",
    operation_id="get_run",
    summary="Read a run",
    response_model=RunInFull,
    responses=problems(404),
)
async def get(service: ServiceDep, tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    run = await read.get(tx, tenant, run_id)
    subagents = await first_subagents(tx, tenant, run["pinned"], run["agent"])
    return run | {"effective_limits": service.settings.subagent_limits.of_agent(subagents)}


class TaskQuery(PageQuery):
    """Query parameters of the list of a run's tasks."""

    status: TaskStatus | None = None


@router.get(
    "/{run_id}/tasks",
    operation_id="list_run_tasks",
    summary="List a run's tasks in the order of their creation",
    response_model=Page[Task],
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def tasks(
    tx: Transaction,
    tenant: Tenant,
    run_id: RunId,
    query: Annotated[TaskQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await read.tasks_page(
        tx,
        tenant,
        run_id,
        status=query.status,
        after=query.place(tuple[PlaceInTime, UUID]),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda task: [task["created_at"], task["id"]])


class MessageQuery(PageQuery):
    """Query parameters of a run's messages."""

    task_id: Annotated[
        UUID | None, Field(description="Task of the conversation; without, the run's own agent.")
    ] = None


@router.get(
    "/{run_id}/messages",
    operation_id="list_run_messages",
    summary="List a run's messages",
    description=(
        "The conversation of the run's own agent, or of a task, from its log: the question, "
        "messages from other agents, the model's answers, and the tools' answers. An agent's own "
        "system message is in its definition."
    ),
    response_model=Page[Message],
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def list_messages(
    tx: Transaction,
    tenant: Tenant,
    run_id: RunId,
    query: Annotated[MessageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await messages.page(
        tx,
        tenant,
        run_id,
        query.task_id,
        after=query.place(tuple[Seq, MessagePart]),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda message: [message["seq"], message["part"]])


@router.get(
    "/{run_id}/graph",
    operation_id="get_run_graph",
    summary="Read the run's graph, with its agents' publications",
    response_model=RunGraph,
    responses=problems(404),
)
async def graph(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    return await read.graph(tx, tenant, run_id)


@router.get(
    "/{run_id}/context/{agent}",
    operation_id="get_run_context",
    summary="List the answers that an agent received from others",
    response_model=Context,
    responses=problems(404),
)
async def context(
    tx: Transaction,
    tenant: Tenant,
    run_id: RunId,
    agent: Annotated[str, Path(pattern=NAME_PATTERN)],
) -> Any:
    return {"items": await read.context(tx, tenant, run_id, agent)}
