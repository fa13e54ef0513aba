"""Routes that cancel, retry or steer runs, and cancel tasks."""

import asyncio
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Response
from pydantic import Field

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Body, OwnUser
from bottega.api.schemas.messages import MessageSent, NewMessage
from bottega.api.schemas.runs import Run
from bottega.api.shared.deps import Actor, PrincipalDep, ServiceDep, Tenant
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.owners import refuse_other_user
from bottega.api.shared.sent_messages import send_message
from bottega.api.shared.wanted import OwnerNamed
from bottega.clock import monotonic
from bottega.container import Service
from bottega.db.engine import acting_as
from bottega.files.rows import owner_of_run
from bottega.runs import read
from bottega.runs.control import request_cancel, request_task_cancel
from bottega.runs.retry import retry as repeat

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[UUID, Path(description="The run's id.")]
_CONFIRMED_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.02


class Retry(Body):
    """The point from which to repeat a run."""

    from_: Annotated[
        Literal["start", "last_step"],
        Field(
            alias="from",
            description="`last_step` keeps the successful steps.",
        ),
    ] = "start"
    user: OwnUser = None


class StoppedTask(Answer):
    """The result of cancelling a task."""

    task_id: UUID
    status: Literal["stopped", "already_final", "stopping"]


class StoppedTasks(Answer):
    """The cancelled task, and all tasks below it."""

    items: list[StoppedTask]


@router.post(
    "/{run_id}/cancel",
    operation_id="cancel_run",
    summary="Cancel a run",
    description=(
        "The request is stored and takes effect within a second, in any process: running model "
        "calls are cut off, and no further ones are made. 200: the run was over already."
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
        "goes on: the agent that called the task reads that it was cancelled. 202: some tasks "
        "have not stopped yet."
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
    until = monotonic() + _CONFIRMED_WITHIN_S
    while stopping := stopping - await _over(service, tenant, run_id, stopping):
        if monotonic() >= until:
            response.status_code = 202
            break
        await asyncio.sleep(_LOOK_EVERY_S)
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
    summary="Send a message to a run under way",
    description=(
        "The run's own agent gets the user's message before its next model call; while its last "
        "one is under way, the agent makes another call. A run that is queued or waits for people "
        "gets it when it goes on; the message does not wake it. 409 `final`: the run is over; "
        "`no_root`: the run is of the mode `dag`; `too_many_messages`: it has got 100; "
        "`session_user`: the run is of another user."
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
        "Starts a new run (`retry_of` names this one) with the same input and pinned versions. "
        "`last_step`: it takes over this run's log up to the last successful step, and goes on "
        "from there."
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
    acting = acts_for(principal, body.user)
    async with service.database.begin(tenant) as tx:
        owner = await owner_of_run(tx, tenant, run_id)
        acting.refuse_other(owner.user, f"run {run_id}")

        async def accept() -> dict[str, Any]:
            pool = service.database.pool
            run = await repeat(
                tx,
                pool,
                tenant,
                run_id,
                from_last_step=from_last_step,
                memory=service.settings.memory,
                principal=principal.actor,
            )
            response.headers["Location"] = f"/v1/runs/{run['id']}"
            return run

        return await once(tx, response, Run, accept)
