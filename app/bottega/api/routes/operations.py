"""Routes for operators: health, version, load of the workers, audit log, and usage."""

import asyncio
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator, Field

import bottega
from bottega.api.auth import acts_for
from bottega.api.errors import headers, problem_response, problems, storage_full
from bottega.api.routes.providers import default_model
from bottega.api.schemas.base import Answer, Page, PlaceInTime
from bottega.api.schemas.runs import SessionName, UsageSum
from bottega.api.server.connections import sent
from bottega.api.server.documents import CONSOLE, wants_page
from bottega.api.shared.deps import (
    AdminTenant,
    NoBody,
    PrincipalDep,
    ReadTenant,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.pages import (
    LINK,
    MetadataPairs,
    PageQuery,
    QueriedUser,
    pairs_of,
    storable,
)
from bottega.container import Service
from bottega.db.migrate import require_current
from bottega.engine import workers
from bottega.engine.workers import any_alive
from bottega.errors import BottegaError
from bottega.events.data import Failure
from bottega.events.types import WaitReason
from bottega.metrics import CONTENT_TYPE
from bottega.runs import read
from bottega.tenants import audit
from bottega.tenants.retention import days_kept

router = APIRouter(tags=["operations"])


class Root(Answer):
    """The service at this address."""

    name: str = "bottega"
    """Always `bottega`."""
    version: str
    """Version of the server."""
    docs: str
    """Path of the documentation of the API."""


class Health(Answer):
    """Confirmation that the process answers."""

    status: Literal["ok"] = "ok"
    """Always `ok`."""


class Readiness(Answer):
    """Confirmation that the service is ready for work."""

    status: Literal["ready"] = "ready"
    """Always `ready`; a service that is not ready returns a problem."""
    worker: Literal["here", "elsewhere", "none"]
    """The process that executes runs: `here`: this process; `elsewhere`: another process; `none`:
    no process, so runs wait until a worker starts."""


class Retention(Answer):
    """Number of days for which data is kept; null: for ever."""

    runs: float | None
    """Days after a run's end for which the run, its events, tasks and files are kept."""
    audit: float | None
    """Days for which an entry of the audit log is kept."""
    episodes: float | None
    """Days after the end of its run for which an archived episode is kept."""


class Info(Answer):
    """The server's version, and the default model."""

    name: str = "bottega"
    """Always `bottega`."""
    version: str
    """Version of the server."""
    model: str
    """The model of agents that name no model; `provider/MODEL` if the tenant has chosen a model."""
    demo_model: bool
    """True: `model` is the built-in demo model, because no model server is configured."""
    docs_url: str
    """Path of the documentation of the API."""
    openapi_url: str
    """Path of the OpenAPI document."""
    retention: Retention
    """Time for which this tenant's data is kept; the operator sets this time."""


@router.get(
    "/",
    operation_id="get_root",
    dependencies=[NoBody],
    summary="Read name and version",
    description="Browsers are redirected to the console instead.",
    response_model=Root,
)
async def root(service: ServiceDep, request: Request) -> Root | Response:
    if wants_page(request):
        return RedirectResponse(f"{CONSOLE}/")
    return Root(version=bottega.__version__, docs=f"{service.settings.root_path}/docs")


@router.get(
    "/healthz",
    operation_id="get_health",
    dependencies=[NoBody],
    summary="Check that the process is alive",
    description="For a supervisor that restarts processes that do not answer.",
    response_model=Health,
)
async def health() -> Health:
    return Health()


_READ_ONLY = (
    "the database is read-only (default_transaction_read_only is on, or it is a standby): nothing "
    "is stored until its operator changes that"
)


@router.get(
    "/readyz",
    operation_id="get_readiness",
    dependencies=[NoBody],
    summary="Check the database, its migrations, the background services and the worker",
    description="For a load balancer: answers 503 with the reason while the service cannot work.",
    response_model=Readiness,
    responses=problems(),
)
async def ready(service: ServiceDep) -> Readiness | Response:
    return await readiness(service)


async def readiness(service: Service) -> Readiness | Response:
    """Confirm that this process can work, or return a problem that says why it cannot."""
    try:
        async with asyncio.timeout(3.0):
            await require_current(service.database.pool)
            other_alive = await any_alive(service.database.pool)
            if await service.database.is_read_only():
                return problem_response(503, "database_unavailable", _READ_ONLY)
            if not await service.database.has_room():
                return storage_full()
    except TimeoutError:
        return problem_response(503, "database_unavailable", "the database does not answer")
    except BottegaError as error:
        return problem_response(503, error.code, error.detail)
    for name, deaths in service.services.failing().items():
        return problem_response(
            503,
            "service_failing",
            f"the background service '{name}' keeps dying, {deaths} times in a row: the process's "
            "log says why",
        )
    if service.wakeups.handed_over:
        return Readiness(
            worker="elsewhere"
        )  # a newer process has replaced this process, and executes runs
    if service.wakeups.closed.is_set() or service.stop_working.is_set():
        return problem_response(503, "stopping", "this process is about to stop")
    if service.working:
        return Readiness(worker="here")
    return Readiness(worker="elsewhere" if other_alive else "none")


@router.get("/metrics", include_in_schema=False)
async def metrics(service: ServiceDep, request: Request) -> Response:
    """Report metrics of all tenants to Prometheus. The request needs a separate token."""
    report = await service.scraping.report(sent(request.scope, b"authorization"))
    return Response(report, media_type=CONTENT_TYPE)


@router.get(
    "/v1/info",
    operation_id="get_info",
    summary="Read the server's version and model",
    description="Shows which version of the server and which default model answer.",
    response_model=Info,
    responses=problems(),
)
async def info(service: ServiceDep, tx: Transaction, tenant: ReadTenant) -> Info:
    root = service.settings.root_path
    model, is_demo = await default_model(service, tx, tenant)
    return Info(
        docs_url=f"{root}/docs",
        openapi_url=f"{root}/openapi.json",
        version=bottega.__version__,
        model=model,
        demo_model=is_demo,
        retention=Retention(**await days_kept(tx, tenant, service.settings.retention_days)),
    )


load_router = APIRouter(prefix="/v1/scheduler", tags=["operations"])

ByPriority = Annotated[
    dict[str, int],
    Field(description="Waiting tasks by priority.", examples=[{"1": 2, "5": 9}]),
]
Parked = Annotated[
    int,
    Field(description="Started tasks without a slot; they wait for other tasks or for a slot."),
]


class Pool(Answer):
    """Numbers of tasks in a worker, for all tenants together."""

    size: int = 0
    """Number of slots."""
    min: int = 0
    """Minimum number of slots."""
    max: int = 0
    """Maximum number of slots."""
    busy: int = 0
    """Slots that tasks hold."""
    parked: Parked = 0
    queued: int = 0
    """Tasks that wait for a slot."""
    queue: ByPriority = Field(default_factory=dict)
    runs: int = 0
    """Runs that the worker executes."""
    totals: Annotated[
        dict[str, float],
        Field(examples=[{"subagent.dispatch.count": 12, "subagent.status.completed": 11}]),
    ] = Field(default_factory=dict)
    """Counters since the worker's start, by name. A histogram has its count, its sum, and
    cumulative counts up to bounds (`le_`). Times are in milliseconds."""


class Breaker(Answer):
    """A run's circuit breaker, which stops new tasks of an agent whose tasks keep failing."""

    run_id: UUID
    """The run whose tasks fail."""
    agent: str
    """The agent whose tasks keep failing."""
    state: Literal["open", "half_open"]
    """`open`: no task of the agent may start. `half_open`: one task may start, as a test."""
    failures: int
    """Number of recent failures when the breaker opened, plus failed tests since then."""
    retry_after_ms: int | None = None
    """Milliseconds until an open breaker lets one task start; null: the breaker is not open."""


class OwnTasks(Answer):
    """Numbers of tasks in a worker, for the caller's tenant only."""

    running: int = 0
    """Started tasks, including parked tasks."""
    parked: Parked = 0
    queued: int = 0
    """Tasks that wait for a slot."""
    queue: ByPriority = Field(default_factory=dict)
    breakers: list[Breaker] = Field(default_factory=list)
    """Breakers that are not closed."""


class Worker(Answer):
    """A worker that is alive."""

    id: UUID
    """Id of the worker process."""
    started_at: datetime
    version: str
    """Version of Bottega that the worker runs."""
    seen_at: datetime
    """Time of the worker's last report."""
    pool: Pool
    """The worker's tasks, for all tenants together."""
    tenant: OwnTasks
    """The worker's tasks of the caller's tenant."""


class QueuedRuns(Answer):
    """The number of the tenant's queued runs of one priority."""

    priority: int
    """Priority of these runs; runs of priority 1 start first."""
    queued: int
    """Number of runs that wait for a slot."""
    oldest_at: datetime
    """Time at which the oldest of these runs was queued."""


class WaitingRuns(Answer):
    """The number of the tenant's runs of one agent that wait for one reason."""

    reason: WaitReason
    """Reason for which the runs wait."""
    agent: str
    """Agent or graph of the runs."""
    runs: int
    """Number of runs; child runs do not count."""
    oldest_at: datetime
    """Time at which the first of these runs began to wait."""
    error: Failure | None
    """Error of the newest run's last failed model call; null: no wait for a model."""


class Quota(Answer):
    """A limit of the caller's tenant, and the used amount."""

    name: Literal[
        "concurrent_runs", "queued_runs", "tokens_per_day", "cost_per_day", "storage_bytes"
    ]
    """Name of the limit."""
    used: Decimal
    """Number of runs, tokens of today (UTC), US dollars of today, or stored bytes."""
    limit: Decimal | None
    """Value of the limit; null: no limit."""


class Storage(Answer):
    """Number of bytes that the caller's tenant stores, as counted some seconds ago."""

    definitions: int = 0
    """Bytes of definitions, including deleted and earlier versions."""
    episodes: int = 0
    """Bytes of episodes, including episodes in object storage."""
    files: int = 0
    """Bytes of uploaded files."""
    runs: int = 0
    """Bytes of runs with their logs. For an unfinished run, this counts only the request."""
    sessions: int = 0
    """Bytes of sessions: their metadata and shared memory."""


class Workers(Answer):
    """The live workers, and the load and limits of the caller's tenant."""

    workers: list[Worker]
    """Workers that are alive, oldest first."""
    runs: list[QueuedRuns]
    """Queued runs by priority, most urgent first."""
    waiting: list[WaitingRuns]
    """Waiting runs by reason and agent, most runs first: at most 20 groups, from 10,000 runs."""
    quotas: list[Quota]
    """Limits of the tenant and their used amounts."""
    storage: Storage
    """Data that the tenant stores."""


@load_router.get(
    "",
    operation_id="get_scheduler",
    summary="Read the workers' load",
    description=(
        "The live workers with their asynchronous tasks, for all tenants together and for the "
        "caller's tenant; the tenant's queued and waiting runs, and its limits."
    ),
    response_model=Workers,
    responses=problems(),
)
async def get(tx: Transaction, tenant: Tenant) -> dict[str, Any]:
    rows = await workers.alive(tx)
    load = await workers.load_of(tx, tenant)
    return {"workers": [{**row, "tenant": row["state"] or {}} for row in rows], **load}


audit_router = APIRouter(prefix="/v1/audit", tags=["operations"])


class AuditEntry(Answer):
    """An action that the audit log recorded."""

    id: UUID
    """Id of the entry."""
    at: datetime
    """Time of the action."""
    actor: str
    """The actor: `key:` with the prefix of a key, `user:` with a person or an end user, `local`
    (while there are no keys), or `cli`."""
    action: str
    """Kind of action: `run.cancel`, `session.delete` …"""
    target: str
    """Id or name of the object that the action changed."""
    details: dict[str, Any]
    """Further facts, which depend on the action."""


class AuditQuery(PageQuery):
    action: Annotated[
        str | None, Field(pattern=r"^[a-z_]{1,32}\.[a-z_]{1,32}$", description="Only this action.")
    ] = None
    noted_after: PlaceInTime | None = None
    noted_before: PlaceInTime | None = None


@audit_router.get(
    "",
    operation_id="list_audit_log",
    summary="List the audit log",
    description=(
        "Keys and secrets made or revoked, runs and tasks cancelled, feedback, changes of "
        "patterns, learning and maintenance on demand, and deletions. Each entry is stored in "
        "the transaction of its action. The API cannot change the log."
    ),
    response_model=Page[AuditEntry],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: AdminTenant,
    query: Annotated[AuditQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await audit.page(
        tx,
        tenant,
        action=query.action,
        noted_after=query.noted_after,
        noted_before=query.noted_before,
        **query.window(UUID),
    )
    return query.page(request, response, rows, lambda entry: entry["id"])


usage_router = APIRouter(prefix="/v1/usage", tags=["operations"])


class UsageQuery(PageQuery):
    by: Annotated[
        str,
        Field(
            pattern=rf"^({'|'.join(read.USAGE_BY)}|metadata:[^:]{{1,64}})$",
            description=f"One of {', '.join(read.USAGE_BY)}, or `metadata:` and a metadata key.",
        ),
        AfterValidator(storable),
    ] = "day"
    since: Annotated[
        PlaceInTime | None,
        Field(
            description=(
                "Only runs created at this time or later; by default 30 days before `until`."
            )
        ),
    ] = None
    until: Annotated[
        PlaceInTime | None, Field(description="Only runs created before this time; by default now.")
    ] = None
    agent: Annotated[
        str | None,
        Field(max_length=128, description="Only model calls of this agent."),
        AfterValidator(storable),
    ] = None
    model: Annotated[
        str | None,
        Field(max_length=300, description="Only model calls of this model."),
        AfterValidator(storable),
    ] = None
    user: QueriedUser = None
    session_id: Annotated[SessionName | None, Field(description="Only runs of this session.")] = (
        None
    )
    metadata: MetadataPairs


@usage_router.get(
    "",
    operation_id="sum_usage",
    summary="Sum up tokens and cost of runs",
    description=(
        "Sums by agent, model, session, day (UTC), key, user, batch, or the values of a metadata "
        "key. Only runs that are over count, also those that failed or were cancelled before they "
        "asked a model; deleted runs do not. Model calls that a retry copied count once. Child "
        "runs and a batch's items count as their parent run. The period is at most a year."
    ),
    response_model=Page[UsageSum],
    response_model_exclude_unset=True,
    responses={**problems(), 200: headers(Link=LINK)},
)
async def sum_usage(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    query: Annotated[UsageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    acts_for(principal, query.user, None)
    by, _, key = query.by.partition(":")
    only = read.UsageFilter(
        agent=query.agent,
        model=query.model,
        user=query.user,
        session=query.session_id,
        metadata=pairs_of(query.metadata),
        key=key or None,
    )
    rows = await read.usage_page(
        tx, tenant, by, only, since=query.since, until=query.until, **query.window(str)
    )
    return query.page(request, response, rows, lambda item: item[by] or "")
