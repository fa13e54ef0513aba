"""Messages for runs under way, however they come: by HTTP or by a WebSocket."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from fastapi import Response

from bottega.api.auth import Acting, Principal, acts_for
from bottega.api.schemas.messages import MessageSent, NewMessage
from bottega.api.shared.idempotency import Once
from bottega.container import Service
from bottega.errors import BottegaError, InvalidInputError
from bottega.files.inputs import StoredInput, parts_of, stored_input
from bottega.files.rows import owner_of_run
from bottega.runs import inbox, read
from bottega.runs.parameters import refuse_parts
from bottega.runs.pins import Pins


async def send_message(
    service: Service,
    principal: Principal,
    run_id: UUID,
    body: NewMessage,
    once: tuple[Once, Response] | None = None,
) -> Any:
    """Store a message for a run; return its ``message_id``.

    Args:
        once: of a request that may have a key, and its response.

    Raises:
        ConflictError: ``session_user``.
        NotFoundError, ConflictError, InvalidInputError: see :func:`bottega.runs.inbox.send`.
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
                sent = inbox.SentMessage(
                    stored.input[0]["content"], [*stored.made], principal.actor
                )
                return {"message_id": await inbox.send(tx, tenant, run_id, sent)}

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
    """Yield a message as a run's input, with files in place of data.

    Raises:
        ConflictError, InvalidInputError, LimitedError: as :func:`send_message`.
    """
    tenant = acting.tenant_id
    async with service.database.begin(tenant) as tx:
        owner = await owner_of_run(tx, tenant, run_id)
    acting.refuse_other(owner.user, f"run {run_id}")
    asked = [{"role": "user", **body.model_dump(include={"content"})}]
    try:
        async with stored_input(service.files, tenant, asked, owner) as stored:
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
    """Return what a new run of a run's agent would pin; ``None``: it was deleted since."""
    async with service.database.begin(tenant) as tx:
        run = await read.get(tx, tenant, run_id)
    with contextlib.suppress(BottegaError):
        return await service.pins.find(service.database.pool, tenant, run["agent"], run["graph"])
    return None
