"""Decisions of people, however they come: by HTTP or by a WebSocket."""

from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.api.auth import Principal, acts_for
from bottega.api.schemas.interrupts import NewDecision
from bottega.errors import NotFoundError
from bottega.runs import interrupts
from bottega.tenants import keys


async def decide(
    tx: AsyncConnection,
    principal: Principal,
    interrupt_id: UUID,
    body: NewDecision,
    *,
    run_id: UUID | None = None,
) -> dict[str, Any]:
    """Resolve an interrupt, if the caller's scopes allow it; return it.

    Args:
        run_id: the only run that it may be of; ``None``: any.

    Raises:
        ForbiddenError: ``insufficient_scope``.
        UserRequiredError: the key must name a user.
        ConflictError: ``session_user``.
        NotFoundError: it is unknown, or of another run.
        InvalidInputError, ConflictError: see :func:`bottega.runs.interrupts.resolve`.
    """
    principal.need("run", "approve")
    acting = acts_for(principal, body.user)
    interrupt = await interrupts.get(tx, principal.tenant_id, interrupt_id)
    if run_id not in (None, interrupt["run_id"]):
        raise NotFoundError(f"there is no interrupt {interrupt_id} of this run")
    acting.refuse_other(interrupt["user"], f"the run of interrupt {interrupt_id}")
    if interrupt["kind"] == "approval":
        principal.need("approve")
    by: dict[str, Any] = {"key_id": None, "name": principal.actor}
    if principal.key_id is not None:
        key = await keys.get(tx, principal.tenant_id, principal.key_id)
        by = {"key_id": key["id"], "name": key["name"]}
    return await interrupts.resolve(tx, interrupt, body.said, by=by, actor=principal.actor)
