"""Decisions on interrupts, messages to runs and changes of runs, for HTTP and WebSockets."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from fastapi import Response

from bottega.api.auth import Acting, Principal, acts_for
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.schemas.messages import MessageSent, NewMessage
from bottega.api.shared.idempotency import IdempotencyGuard
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.errors import BottegaError, ForbiddenError, InvalidInputError, NotFoundError
from bottega.files.inputs import StoredInput, parts_of, stored_input
from bottega.files.store import owner_of_run
from bottega.runs import control, interrupts, read
from bottega.runs.pins import Pins, refuse_parts
from bottega.tenants import keys


async def decide(
    tx: AsyncConnection,
    principal: Principal,
    interrupt_id: UUID,
    body: NewDecision,
    *,
    run_id: UUID | None = None,
) -> dict[str, Any]:
    """Resolve an interrupt if the caller's scopes allow this, and return the interrupt.

    Args:
        run_id: the run to which the interrupt must belong; ``None``: any run.

    Raises:
        ForbiddenError: ``insufficient_scope``.
        UserRequiredError: the key requires an end user, but the body names no user.
        ConflictError: ``session_user``.
        NotFoundError: the interrupt is unknown, or belongs to another run.
        InvalidInputError, ConflictError: see :func:`bottega.runs.interrupts.resolve`.
    """
    principal.need("run", "approve")
    principal.need_action("answer")
    acting = acts_for(principal, body.user)
    interrupt = await interrupts.get(tx, principal.tenant_id, interrupt_id)
    if run_id not in (None, interrupt["run_id"]):
        raise NotFoundError(f"there is no interrupt {interrupt_id} of this run")
    acting.refuse_other(interrupt["user"], f"the run of interrupt {interrupt_id}")
    if interrupt["kind"] == "approval" or interrupt["who"] == "approve":
        principal.need("approve")
    if interrupt["who"] == "user" and (acting.user is None or acting.user != interrupt["user"]):
        raise ForbiddenError("only the run's end user may decide", code="not_the_user")
    by: dict[str, Any] = {"key_id": None, "name": principal.actor}
    if principal.person is not None:
        by = {"key_id": None, "name": principal.person.user}
    elif principal.user is not None:
        by = {"key_id": principal.key_id, "name": principal.user}
    elif principal.key_id is not None:
        key = await keys.get(tx, principal.tenant_id, principal.key_id)
        by = {"key_id": key["id"], "name": key["name"]}
    return await interrupts.resolve(tx, interrupt, body.said, by=by, actor=principal.actor)


async def send_message(
    service: Service,
    principal: Principal,
    run_id: UUID,
    body: NewMessage,
    once: tuple[IdempotencyGuard, Response] | None = None,
) -> Any:
    """Store a message for a run, and return the message's ``message_id``.

    Args:
        once: the guard that stores only one message per idempotency key, and the response whose
            headers the guard stores; ``None``: the request has no key.

    Raises:
        ConflictError: ``session_user``.
        NotFoundError, ConflictError, InvalidInputError: see :func:`bottega.runs.control.send`.
        InvalidInputError, LimitedError: see :func:`bottega.files.inputs.stored_input`;
            ``unsupported_part``.
    """
    tenant, is_new = principal.tenant_id, False
    acting = acts_for(principal, body.user)
    async with stored_message(service, acting, run_id, body) as stored:
        async with service.database.begin(tenant) as tx:

            async def accept() -> dict[str, Any]:
                nonlocal is_new
                is_new = True
                message = control.SentMessage(
                    stored.input[0]["content"], [*stored.made], principal.actor
                )
                return {"message_id": await control.send(tx, tenant, run_id, message)}

            if once is None:
                answer: Any = await accept()
            else:
                answer = await once[0](tx, once[1], MessageSent, accept)
        if is_new:
            stored.keep(stored.input)
    return answer


@contextlib.asynccontextmanager
async def stored_message(
    service: Service, acting: Acting, run_id: UUID, body: NewMessage
) -> AsyncIterator[StoredInput]:
    """Store the data in a message as files; yield the message in the form of a run's input.

    Raises:
        ConflictError, InvalidInputError, LimitedError: see :func:`send_message`.
    """
    tenant = acting.tenant_id
    async with service.database.begin(tenant) as tx:
        owner = await owner_of_run(tx, tenant, run_id)
    acting.refuse_other(owner.user, f"run {run_id}")
    content = [{"role": "user", **body.model_dump(include={"content"})}]
    try:
        async with stored_input(service.files, tenant, content, owner) as stored:
            if any(parts_of(stored.input)) and (pins := await _pins(service, tenant, run_id)):
                for agent in pins.first:
                    refuse_parts(stored.input, pins.dialects[agent])
            yield stored
    except InvalidInputError as error:
        if error.pointer is not None and error.pointer.startswith("/input"):
            error.pointer = "/content" + error.pointer.removeprefix("/input").removeprefix(
                "/0/content"
            )
        raise


async def _pins(service: Service, tenant: UUID, run_id: UUID) -> Pins | None:
    async with service.database.begin(tenant) as tx:
        run = await read.get(tx, tenant, run_id)
    with contextlib.suppress(BottegaError):
        return await service.pins.find(service.database.pool, tenant, run["agent"], run["graph"])
    return None


async def refuse_other_user(
    service: Service,
    principal: Principal,
    run_id: UUID,
    user: str | None,
    pointer: str | None = None,
) -> None:
    """Check that a run belongs to the end user of the request, if the request has a user.

    Args:
        pointer: see :func:`acts_for`.

    Raises:
        UserRequiredError: the key requires an end user, but the request names no user.
        NotFoundError: the run does not exist.
        ConflictError: ``session_user``.
    """
    acting = acts_for(principal, user, pointer)
    async with service.database.begin(acting.tenant_id) as tx:
        owner = await owner_of_run(tx, acting.tenant_id, run_id)
    acting.refuse_other(owner.user, f"run {run_id}")
