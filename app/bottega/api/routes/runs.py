"""Routes of runs: start, read, compare, cancel, retry and steer runs."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from bottega.api.auth import Acting, Principal, acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.agents import EffectiveLimits
from bottega.api.schemas.base import NAME_PATTERN, Answer, Body, OwnUser, Page, PlaceInTime
from bottega.api.schemas.messages import Message, MessageSent, NewMessage, Prompt
from bottega.api.schemas.runs import (
    Context,
    NewFork,
    NewRun,
    Run,
    RunDiff,
    RunGraph,
    RunSummary,
    SessionName,
    Task,
    TaskProgress,
)
from bottega.api.server.connections import sent
from bottega.api.shared import idempotency
from bottega.api.shared.definitions import PartOf
from bottega.api.shared.deps import (
    Actor,
    PrincipalDep,
    ReviewTenant,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.idempotency import HEADER, OnceDep, is_key
from bottega.api.shared.new_runs import start_run
from bottega.api.shared.pages import (
    LINK,
    MessagePart,
    MetadataPairs,
    OwnerNamed,
    PageQuery,
    QueriedUser,
    Seq,
    ViewQuery,
    encoded_page,
    pairs_of,
    storable,
)
from bottega.api.shared.run_control import refuse_other_user, send_message
from bottega.api.shared.run_follower import until_rest
from bottega.clock import monotonic
from bottega.container import Service
from bottega.db.failures import is_transient
from bottega.db.pool import AsyncConnection, acting_as
from bottega.errors import ForbiddenError
from bottega.events.data import OutcomeValue, Status, TaskStatus, Usage
from bottega.events.types import WaitReason
from bottega.files.store import owner_of_run
from bottega.runs import forks, graphs, messages, prompts, read
from bottega.runs.control import request_cancel, request_task_cancel
from bottega.runs.diff import compare, differences, node_differences, totals
from bottega.runs.forks import Fork
from bottega.runs.retry import retry as repeat
from bottega.runs.submit import OnceKey

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[UUID, Path(description="The run's id.")]


class Retry(Body):
    """The point from which a retry repeats a run."""

    from_: Annotated[Literal["start", "last_step"], Field(alias="from")] = "start"
    """`start` repeats the whole run; `last_step` keeps the steps that succeeded."""
    user: OwnUser = None


class StoppedTask(Answer):
    """The result of cancelling a task."""

    task_id: UUID
    status: Literal["stopped", "already_final", "stopping"]
    """Status of the task: just stopped, over before the request, or not stopped yet."""


class StoppedTasks(Answer):
    """The cancelled task, and all its sub-tasks."""

    items: list[StoppedTask]
    """The cancelled task, and all tasks below it in the tree."""


@router.post(
    "/{run_id}/cancel",
    operation_id="cancel_run",
    summary="Cancel a run",
    description=(
        "The request is stored, and takes effect within a second in the process that executes the "
        "run: running model calls are cut off, and no further calls are made. 200: the run was "
        "over already."
    ),
    status_code=202,
    response_model=Run,
    responses={
        **problems(404, 409),
        200: {"model": Run, "description": "The run was over already."},
    },
)
async def cancel(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    run_id: RunId,
    response: Response,
    user: OwnerNamed = None,
) -> Any:
    await refuse_other_user(service, principal, run_id, user)
    if await request_cancel(service.database, tenant, run_id, actor):
        response.status_code = 200
    async with service.database.begin(tenant) as tx:
        return await read.get(tx, tenant, run_id)


@router.post(
    "/{run_id}/tasks/{task_id}/cancel",
    operation_id="cancel_run_task",
    summary="Cancel a task and all tasks below it",
    description=(
        "The request is stored, and the response waits up to a second for the worker. The run "
        "goes on: the agent that called the task reads that the task was cancelled. 202: some "
        "tasks have not stopped yet."
    ),
    response_model=StoppedTasks,
    responses={
        **problems(404, 409),
        202: {"model": StoppedTasks, "description": "Some tasks have not stopped yet."},
    },
)
async def cancel_task(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    run_id: RunId,
    task_id: Annotated[UUID, Path(description="The task's id.")],
    response: Response,
    user: OwnerNamed = None,
) -> Any:
    await refuse_other_user(service, principal, run_id, user)
    before = await request_task_cancel(service.database, tenant, run_id, task_id, actor)
    stopping = {task for task, was_over in before.items() if not was_over}
    until = monotonic() + 1.0
    while stopping := stopping - await _over(service, tenant, run_id, stopping):
        if monotonic() >= until:
            response.status_code = 202
            break
        await asyncio.sleep(0.02)
    return {
        "items": [
            {"task_id": task, "status": _cancel_status(task, was_over, stopping)}
            for task, was_over in before.items()
        ]
    }


def _cancel_status(task: UUID, was_over: bool, stopping: set[UUID]) -> str:
    if was_over:
        return "already_final"
    return "stopping" if task in stopping else "stopped"


async def _over(service: Service, tenant: UUID, run_id: UUID, tasks: set[UUID]) -> set[UUID]:
    async with acting_as(service.database.pool, tenant) as connection:
        rows = await connection.fetch(
            "SELECT id FROM tasks WHERE tenant_id = $1 AND run_id = $2 AND id = ANY($3)"
            " AND ended_at IS NOT NULL",
            tenant,
            run_id,
            list(tasks),
        )
    return {row["id"] for row in rows}


@router.post(
    "/{run_id}/messages",
    operation_id="send_run_message",
    summary="Send a message to a run that is not over",
    description=(
        "The run's own agent gets the user's message before its next model call. If its last model "
        "call is in progress, the agent makes one more call. A run that is queued or waits for "
        "people gets the message when it goes on; the message does not wake it. 409 `final`: the "
        "run is over; `no_root`: the run has the mode `dag`; `too_many_messages`: the run has got "
        "100 messages; `session_user`: the run belongs to another user."
    ),
    status_code=202,
    response_model=MessageSent,
    responses=problems(400, 404, 409, 413, 415),
)
async def send(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    run_id: RunId,
    body: NewMessage,
    response: Response,
    once: OnceDep,
) -> Any:
    return await send_message(service, principal, run_id, body, (once, response))


@router.post(
    "/{run_id}/retry",
    operation_id="retry_run",
    summary="Repeat a finished run",
    description=(
        "Starts a new run (`retry_of` names this run) with the same input and pinned versions. "
        "With `last_step`, the new run takes over this run's log up to the last successful step, "
        "and goes on from there."
    ),
    status_code=202,
    response_model=Run,
    responses={**problems(400, 404, 409, 413, 415), 202: headers(Location="Path of the new run.")},
)
async def retry(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    run_id: RunId,
    body: Retry,
    response: Response,
    once: OnceDep,
) -> Any:
    from_last_step = body.from_ == "last_step"
    settings, pool = service.settings, service.database.pool
    async with _repeating(service, principal, run_id, body.user) as tx:

        async def accept() -> dict[str, Any]:
            run = await repeat(
                tx,
                pool,
                tenant,
                run_id,
                from_last_step=from_last_step,
                memory=settings.memory,
                principal=principal.actor,
                limits=principal.limits,
            )
            response.headers["Location"] = _path(run)
            return run

        return await once(tx, response, Run, accept)


@asynccontextmanager
async def _repeating(
    service: Service, principal: Principal, run_id: UUID, user: str | None
) -> AsyncIterator[AsyncConnection]:
    tenant = principal.tenant_id
    acting = acts_for(principal, user)
    async with service.database.begin(tenant) as tx:
        owner = await owner_of_run(tx, tenant, run_id)
        acting.refuse_other(owner.user, f"run {run_id}")
        if principal.token is not None:
            source = await read.get(tx, tenant, run_id)
            principal.token.need_run_of(source["agent"], source["graph"], source["session_id"])
        yield tx


@router.post(
    "/{run_id}/fork",
    operation_id="fork_run",
    summary="Repeat a part of a run",
    description=(
        "Starts a new run (`fork_of` names this run) that takes over the first part of this run's "
        "log: all events before a node of its graph, if this run is over; or all events up to an "
        "event, if this run is over or waits. For that part, no models and tools are called, and "
        "you do not pay again (`taken_over`). People are asked again for answers that the caller "
        "may not give. "
        "With `publication` the node publishes this text, and its agent is not asked. The new run "
        "has no session unless the request names one, but knows what this run's session had "
        "published. 409 `not_final`, `child_run`; `no_graph`: this run has no nodes, or is a "
        "batch. 422 `unknown_node`; `node_skipped`: the node would be skipped again."
    ),
    status_code=202,
    response_model=Run,
    responses={**problems(400, 404, 409, 413, 415), 202: headers(Location="Path of the new run.")},
)
async def fork(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    run_id: RunId,
    body: NewFork,
    response: Response,
    once: OnceDep,
) -> Any:
    if body.agent is not None:
        principal.need("define")
    if (token := principal.token) and (body.session_id or token.sessions is not None):
        raise ForbiddenError(
            "a token cannot fork a run into a session; a token for certain sessions cannot fork a "
            "run at all: use a key",
            code="insufficient_scope",
        )
    changes = None if body.agent is None else body.agent.changes
    own = body.publication, changes, body.input, body.session_id
    wanted = Fork(body.node, body.at_seq, *own)
    acting = acts_for(principal, body.user)
    settings, pool = service.settings, service.database.pool
    async with _repeating(service, principal, run_id, body.user) as tx:

        async def accept() -> dict[str, Any]:
            run = await forks.fork(
                tx,
                pool,
                tenant,
                run_id,
                wanted,
                memory=settings.memory,
                principal=principal.actor,
                limits=principal.limits,
                may_give=partial(_refuse_giving, acting),
            )
            response.headers["Location"] = _path(run)
            return run

        return await once(tx, response, Run, accept)


def _refuse_giving(acting: Acting, node: Mapping[str, Any], user: str | None) -> None:
    who, token = node.get("who", "run"), acting.principal.token
    if token is not None:
        token.need("answer")
    if who == "approve":
        acting.principal.need("approve")
    if who == "user":
        if acting.user is None or acting.user != user:
            raise ForbiddenError("only the run's end user may decide", code="not_the_user")
    elif token is not None:
        raise ForbiddenError(
            "a token of an end user may not answer for a node: use a key",
            code="insufficient_scope",
        )


class DiffQuery(PageQuery):
    with_: Annotated[
        UUID,
        Field(
            alias="with",
            description="Id of the run to compare with; it is `after` in the response.",
        ),
    ]
    limit: Annotated[int, Field(ge=1, le=50, description="Agents on a page.")] = 50


@router.get(
    "/{run_id}/diff",
    operation_id="compare_runs",
    summary="Compare two runs, agent by agent",
    description=(
        "The run in the path is `before`, the run in `with` is `after`. The runs may have "
        "different agents. For a run that is not over, the comparison uses its log so far."
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
            after_key=query.place(str),
            descending=query.descending,
            limit=query.limit,
        )
        nodes = await node_differences(tx, tenant, run_id, query.with_)
    page = query.page(request, response, pairs, lambda pair: pair[0])
    return {
        "before": before,
        "after": after,
        "total": totals(before, after),
        "agents": await differences(before, after, pairs),
        "nodes": nodes,
        "next_cursor": page["next_cursor"],
    }


@router.get(
    "/{run_id}/prompt",
    operation_id="get_run_prompt",
    summary="Read the prompt of a model call",
    description=(
        "The messages that a model got, in order, each with its origin: the agent's system "
        "message, texts of other agents and of memory, the question, and the conversation before "
        "the call. Turns of earlier runs and changes by plugins are left out."
    ),
    response_model=Prompt,
    responses=problems(404),
)
async def prompt(
    tx: Transaction,
    tenant: Tenant,
    run_id: Annotated[UUID, Path(description="The run's id.")],
    task_id: Annotated[
        UUID | None,
        Query(description="Task of the model call; default: the task of the run's own agent."),
    ] = None,
    call: Annotated[
        int | None,
        Query(ge=1, le=2**31 - 1, description="Number of the model call; default: the last one."),
    ] = None,
) -> Any:
    return await prompts.prompt(tx, tenant, run_id, task_id, call)


Handle = Callable[[Request], Awaitable[Response]]


class _CreateRoute(APIRoute):
    """Route of ``POST /v1/runs`` that answers most requests with :func:`_create_directly`.

    This route skips FastAPI's dependencies, because they cost a third more CPU time per request.
    The route answers a request directly if the request has a valid JSON body, no query but a usual
    ``wait``, and at most one valid ``Idempotency-Key``. All other requests go through FastAPI to
    :func:`create`, so that FastAPI makes the validation errors.
    """

    def get_route_handler(self) -> Handle:  # type: ignore[override]
        usual: Handle = super().get_route_handler()

        async def handle(request: Request) -> Response:
            body = await _sole_body(request)
            return await (usual(request) if body is None else _create_directly(request, body))

        return handle


_WAIT = re.compile(rb"(?:wait=([1-5]?[0-9]|60))?")


async def _sole_body(request: Request) -> NewRun | None:
    scope = request.scope
    headers = dict(scope["headers"])
    if (
        not _WAIT.fullmatch(scope["query_string"])
        or headers.get(b"content-type") != b"application/json"
        or not _may_be_keys(sent(scope, HEADER.encode()))
    ):
        return None
    try:
        return NewRun.model_validate(from_json(await request.body()))
    except (ValueError, ClientDisconnect):
        return None


def _may_be_keys(values: Sequence[bytes]) -> bool:
    return len(values) < 2 and all(is_key(value.decode("latin-1")) for value in values)


_SEARCHED = f"Searches the newest {read.SEARCHED_RUNS:,} runs that the other filters find."
_SEVERAL = f"If given several times, a run needs one of the values. {_SEARCHED}"


class RunFilters(BaseModel):
    """Query parameters that select runs."""

    status: Annotated[list[Status], Query(default_factory=list, max_length=7, description=_SEVERAL)]
    waiting_for: Annotated[
        WaitReason | None, Query(description="Only runs that wait for this reason.")
    ] = None
    agent: Annotated[
        list[Annotated[str, Field(pattern=NAME_PATTERN)]],
        Query(default_factory=list, max_length=20, description=_SEVERAL),
    ]
    session_id: SessionName | None = None
    user: QueriedUser = None
    parent_run_id: Annotated[
        UUID | None,
        Query(description="Only child runs of this run; other lists leave child runs out."),
    ] = None
    created_after: PlaceInTime | None = None
    created_before: PlaceInTime | None = None
    metadata: MetadataPairs
    q: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=500,
            description="Text in the first 300 characters of the question; case and accents do not "
            f"matter; no wildcards. {_SEARCHED}",
        ),
        AfterValidator(storable),
    ] = None
    error_code: Annotated[
        str | None,
        Query(max_length=100, description=f"Code of the error. {_SEARCHED}"),
        AfterValidator(storable),
    ] = None
    outcome: Annotated[
        list[OutcomeValue], Query(default_factory=list, max_length=5, description=_SEVERAL)
    ]
    judged_by: Annotated[
        read.JudgeKind | None,
        Query(description=f"Judge of the run; see the field `judged_by`. {_SEARCHED}"),
    ] = None
    memory_draw: Annotated[
        read.MemoryDraw | None,
        Query(description=f"Only runs with this `memory_draw`. {_SEARCHED}"),
    ] = None
    outcome_reason: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=500,
            description="Text in the reason of the outcome; case and accents do not matter. "
            f"{_SEARCHED}",
        ),
        AfterValidator(storable),
    ] = None
    longer_than_s: Annotated[
        float | None,
        Query(
            ge=0,
            le=1e9,
            allow_inf_nan=False,
            description=(
                "Only runs that took more seconds than this, from start to end or until now. "
                f"{_SEARCHED}"
            ),
        ),
    ] = None
    cost_over: Annotated[
        float | None,
        Query(ge=0, le=1e9, allow_inf_nan=False, description=f"US dollars. {_SEARCHED}"),
    ] = None
    version: Annotated[
        int | None,
        Query(ge=1, le=2**31 - 1, description=f"Version of the run's agent or graph. {_SEARCHED}"),
    ] = None
    retrying: Annotated[
        bool | None,
        Query(
            description=(
                f"True: only runs whose last model call failed and will be repeated. {_SEARCHED}"
            )
        ),
    ] = None
    rated: Annotated[
        bool | None, Query(description=f"True: only runs that a person rated. {_SEARCHED}")
    ] = None
    draft: Annotated[
        bool, Query(description="True: only drafts' runs; other lists leave these runs out.")
    ] = False

    def filters(self) -> read.RunFilter:
        search = read.RunSearch(
            statuses=_several(self.status),
            agents=_several(self.agent),
            text=self.q,
            error_code=self.error_code,
            outcomes=tuple(dict.fromkeys(self.outcome)),
            judged_by=self.judged_by,
            memory_draw=self.memory_draw,
            outcome_reason=self.outcome_reason,
            longer_than_s=self.longer_than_s,
            cost_over=self.cost_over,
            version=self.version,
            retrying=self.retrying,
            rated=self.rated,
        )
        return read.RunFilter(
            search=None if search == read.RunSearch() else search,
            status=_only(self.status),
            waiting_for=self.waiting_for,
            agent=_only(self.agent),
            session_id=self.session_id,
            user=self.user,
            parent_run_id=self.parent_run_id,
            created_after=self.created_after,
            created_before=self.created_before,
            metadata=pairs_of(self.metadata),
            draft=self.draft,
        )


class RunQuery(ViewQuery, RunFilters):
    """Query parameters of the list of runs."""


class CountedRuns(Answer):
    """Sums over all runs of a list."""

    runs: int
    """Number of runs."""
    failed: int
    """Number of these runs that failed or timed out."""
    usage: Usage
    """Usage of these runs with their sub-agents; runs that have not ended do not count."""
    complete: bool
    """False: the period has more runs than a request searches; the sums are of the newest runs."""


def _only(values: Sequence[str]) -> str | None:
    """Return a filter's value if the filter has exactly one value; otherwise ``None``."""
    return values[0] if len(values) == 1 else None


def _several(values: Sequence[str]) -> Sequence[str]:
    """Return a filter's values if the filter has several values; otherwise no values."""
    different = tuple(dict.fromkeys(values))
    return different if len(different) > 1 else ()


def _path(run: Mapping[str, Any]) -> str:
    return f"{router.prefix}/{run['id']}"


async def _create_directly(request: Request, body: NewRun) -> Response:
    """Start a run without FastAPI's dependencies; see :class:`_CreateRoute`."""
    principal: Principal = request.scope["state"]["principal"]
    principal.need("run")
    key = request.headers.get(idempotency.HEADER)
    once = None if key is None else await idempotency.once_key(request, key)
    wait = int(request.query_params.get("wait", 0))
    run = await _create(request.scope["app"].state.service, principal, body, once, wait)
    content = Run.model_validate(run).model_dump_json()
    return Response(content, 202, {"Location": _path(run)}, "application/json")


async def _create(
    service: Service, principal: Principal, body: NewRun, once: OnceKey | None, wait: float
) -> Any:
    """Start a run; return the run as it is at its end, or after ``wait`` seconds."""
    run = await start_run(service, principal, body, once)
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
        return run  # the run is accepted, but this process cannot wait for the run's end now
    async with service.database.begin(principal.tenant_id) as tx:
        return await read.get(tx, principal.tenant_id, run_id)


# `_CreateRoute` answers most requests without a call of this function.
async def create(
    once: OnceDep,
    service: ServiceDep,
    principal: PrincipalDep,
    _: Tenant,
    body: NewRun,
    response: Response,
    wait: Annotated[float, Query(ge=0, le=60.0, description="Seconds to wait for the end.")] = 0,
) -> Any:
    run = await _create(service, principal, body, await once.key_with_hash(), wait)
    response.headers["Location"] = _path(run)
    return run


router.add_api_route(
    "",
    create,
    methods=["POST"],
    route_class_override=_CreateRoute,
    operation_id="create_run",
    summary="Start a run",
    description=(
        "Stores and queues the run, and responds at once. With `wait` the response comes when the "
        "run has ended or waits for people, or after `wait` seconds; `status` shows the state. If "
        "the `Idempotency-Key` was used before, the response is the existing run."
    ),
    status_code=202,
    response_model=Run,
    responses={**problems(400, 404, 409, 413, 415), 202: headers(Location="Path of the run.")},
)


@router.get(
    "",
    operation_id="list_runs",
    summary="List runs by age",
    description=(
        "Finds runs by status, agent, session, user, time or metadata; newest last, unless `order` "
        "says otherwise."
    ),
    response_model=Page[Run] | Page[RunSummary],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: ReviewTenant,
    principal: PrincipalDep,
    query: Annotated[RunQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    acts_for(principal, query.user, None)
    rows = await read.page(
        tx,
        tenant,
        query.filters(),
        **query.window(UUID),
        full=query.full,
    )
    page = query.page(request, response, rows, lambda run: run["id"])
    return await encoded_page(page, Run if query.full else RunSummary, response)


@router.get(
    "/totals",
    operation_id="get_run_totals",
    summary="Count runs and sum up what they spent",
    description=(
        "Of the runs that the list of runs finds with the same parameters. Reads at most "
        f"{read.SEARCHED_RUNS:,} runs, the newest."
    ),
    response_model=CountedRuns,
    responses=problems(),
)
async def get_totals(
    tx: Transaction,
    tenant: ReviewTenant,
    principal: PrincipalDep,
    query: Annotated[RunFilters, Query()],
) -> Any:
    acts_for(principal, query.user, None)
    return await read.totals(tx, tenant, query.filters())


class RunInFull(Run):
    """A run with the limits and the progress of its tasks."""

    effective_limits: EffectiveLimits | None
    tasks: TaskProgress | None
    """Progress of the run's tasks; null: it has started no tasks."""


@router.get(
    "/{run_id}",
    operation_id="get_run",
    summary="Read a run",
    description=(
        "Returns the run's status, its answer once it is over, and the limits that apply to it."
    ),
    response_model=RunInFull,
    responses=problems(404),
)
async def get(service: ServiceDep, tenant: ReviewTenant, run_id: RunId) -> Any:
    async with service.database.begin(tenant) as tx:
        run = await read.get_in_full(tx, tenant, run_id)
    limits = service.settings.subagent_limits
    return run | {"effective_limits": limits.of_agent(run.pop("subagents"))}


class TaskQuery(PageQuery):
    status: TaskStatus | None = None


@router.get(
    "/{run_id}/tasks",
    operation_id="list_run_tasks",
    summary="List a run's tasks in the order of their creation",
    description=(
        "Shows how the work was divided: each call of a sub-agent and each node of a graph is a "
        "task."
    ),
    response_model=Page[Task],
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def tasks(
    service: ServiceDep,
    tenant: ReviewTenant,
    run_id: RunId,
    query: Annotated[TaskQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    window = query.window(tuple[PlaceInTime, UUID])
    async with service.database.begin(tenant) as tx:
        rows = await read.tasks_page(tx, tenant, run_id, status=query.status, **window)
    talking = [task for task in rows if task["status"] in read.TALKING]
    if service.nats is not None and talking:  # without NATS, the query has already read the text
        runs = list({task["child_run_id"] or run_id for task in talking})
        answers = await asyncio.gather(*(service.nats.text_of(tenant, each) for each in runs))
        texts = dict(zip(runs, answers, strict=True))
        for task in talking:
            of_run = texts[task["child_run_id"] or run_id]
            task["partial_output"] = of_run.get(None if task["child_run_id"] else task["id"])
    return query.page(request, response, rows, lambda task: [task["created_at"], task["id"]])


class MessageQuery(PageQuery):
    task_id: Annotated[
        UUID | None,
        Field(description="Task of the conversation; default: the task of the run's own agent."),
    ] = None


@router.get(
    "/{run_id}/messages",
    operation_id="list_run_messages",
    summary="List a run's messages",
    description=(
        "The conversation of the run's own agent, or of a task, from its log: the question, "
        "messages from other agents, the model's answers, and the tools' answers. The agent's "
        "system message is left out; it is in the agent's definition."
    ),
    response_model=Page[Message],
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def list_messages(
    tx: Transaction,
    tenant: ReviewTenant,
    run_id: RunId,
    query: Annotated[MessageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await messages.page(
        tx, tenant, run_id, query.task_id, **query.window(tuple[Seq, MessagePart])
    )
    return query.page(request, response, rows, lambda message: [message["seq"], message["part"]])


@router.get(
    "/{run_id}/graph",
    operation_id="get_run_graph",
    summary="Read the state of the run's graph, now or at an earlier event",
    description=(
        "Shows what each node has done and published; with `seq`, the state after this event of "
        "the run. With `node`, the nodes are the parts of this node: its elements (`pages/0`), the "
        "turns of its loop (`improve/1`), or the nodes of its graph (`improve/1/draft`), with "
        "their names in the run's log. The graph of a child run that executes an element is this "
        "element."
    ),
    response_model=RunGraph,
    responses=problems(404),
)
async def graph(
    tx: Transaction,
    tenant: ReviewTenant,
    run_id: RunId,
    seq: Annotated[
        int | None,
        Query(
            ge=1,
            le=2**31 - 1,
            description="Number of the last event to include; default: all events.",
        ),
    ] = None,
    node: PartOf = None,
) -> Any:
    return await graphs.graph(tx, tenant, run_id, seq, node)


@router.get(
    "/{run_id}/context/{agent}",
    operation_id="get_run_context",
    summary="List the answers that an agent received from other agents",
    description=(
        "Shows what an agent knew when it answered: the texts, and the edges along which they came."
    ),
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
