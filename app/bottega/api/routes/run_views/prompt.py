"""The route that shows the prompt of a model call."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query

from bottega.api.errors import problems
from bottega.api.schemas.messages import Prompt
from bottega.api.shared.deps import Tenant, Transaction
from bottega.runs import prompts

router = APIRouter(prefix="/v1/runs", tags=["runs"])
_MOST = 2**31 - 1


@router.get(
    "/{run_id}/prompt",
    operation_id="get_run_prompt",
    summary="Read the prompt of a model call",
    description=(
        "The messages that a model got, in their order, with the origin of each: the agent's "
        "system message, what other agents and memory gave, the question, and the conversation "
        "before the call. Turns of earlier runs, and changes by plugins, are not in it."
    ),
    response_model=Prompt,
    responses=problems(404),
)
async def prompt(
    tx: Transaction,
    tenant: Tenant,
    run_id: Annotated[UUID, Path(description="The run's id.")],
    task_id: Annotated[
        UUID | None, Query(description="Task of the call; without, the run's own agent.")
    ] = None,
    call: Annotated[
        int | None, Query(ge=1, le=_MOST, description="Its number; without, the last one.")
    ] = None,
) -> Any:
    return await prompts.prompt(tx, tenant, run_id, task_id, call)
