"""Routes of a run's working memory, its learning, and feedback on it."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path

from bottega.api.auth import acts_for
from bottega.api.errors import problems
from bottega.api.schemas.memory.feedback import Feedback, NewFeedback
from bottega.api.schemas.memory.learning import RunLearning
from bottega.api.schemas.memory.working_memory import WorkingMemory
from bottega.api.shared.deps import Actor, PrincipalDep, Tenant, Transaction
from bottega.errors import ConflictError
from bottega.events.types import UNFINISHED
from bottega.runs import learning, read
from bottega.runs.working_memory import working_memory
from bottega.tenants import audit

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[UUID, Path(description="The run's id.")]


@router.post(
    "/{run_id}/feedback",
    operation_id="give_run_feedback",
    summary="Give feedback on a run's result",
    description=(
        "Only for a run that is over. The `outcome` becomes the run's, and replaces that of its "
        "episode wherever episodes are read or searched; the episode itself stays as it is. New "
        "feedback replaces the old as a whole. 409 `not_final`."
    ),
    response_model=Feedback,
    responses=problems(400, 404, 409, 413, 415),
)
async def give_feedback(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    run_id: RunId,
    body: NewFeedback,
) -> Any:
    acting = acts_for(principal, body.user)
    run = await read.get(tx, tenant, run_id)
    acting.refuse_other(run["user"], f"run {run_id}")
    if run["status"] in UNFINISHED:
        raise ConflictError(
            f"run {run_id} is not over (it is {run['status']}): wait for its end",
            code="not_final",
        )
    said = body.model_dump(exclude={"user"})
    given = await learning.give_feedback(tx, tenant, run_id, actor, **said)
    details = {"outcome": body.outcome, "score": body.score}
    await audit.note(tx, tenant, actor, "run.feedback", str(run_id), details)
    return given


@router.get(
    "/{run_id}/working-memory",
    operation_id="get_run_working_memory",
    summary="Read a run's working memory",
    description=(
        "Computed from the run's log, during the run and after it: the definition, task and "
        "progress of its own agent, and the answers of its tools and sub-agents (in a DAG, its "
        "agents). Each section keeps within its budget of tokens; all answers have references."
    ),
    response_model=WorkingMemory,
    responses=problems(404),
)
async def get_working_memory(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    return await working_memory(tx, tenant, run_id)


@router.get(
    "/{run_id}/learning",
    operation_id="get_run_learning",
    summary="Read the learning from a run",
    description=(
        "After the run's end, rules or a model learn from it in the background: insights, "
        "patterns found in it, and results of patterns that it was given. Failures are retried. "
        "After the last try `status` is `failed`, until feedback or `POST "
        "/v1/memory/maintenance` requests learning again. The run itself never changes."
    ),
    response_model=RunLearning,
    responses=problems(404),
)
async def get_learning(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    await read.get(tx, tenant, run_id)
    return await learning.learnt(tx, tenant, run_id)
