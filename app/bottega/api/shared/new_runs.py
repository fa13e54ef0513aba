"""Acceptance of runs for this API and its façades; :mod:`bottega.runs.submit` stores the runs."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from uuid import UUID

from bottega.api.auth import Principal, acts_for
from bottega.api.schemas.runs import NewRun
from bottega.api.shared.schemas import check_schema
from bottega.container import Service
from bottega.db.failures import repeated
from bottega.db.pool import AsyncConnection
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.files.inputs import StoredInput, stored_input
from bottega.files.store import Owner
from bottega.runs import sessions
from bottega.runs import submit as submitting
from bottega.runs.submit import OnceKey
from bottega.settings import Settings
from bottega.tenants import webhook_secrets
from bottega.tools.egress import EgressRefusedError, refuse_inside
from bottega.tools.guard import AllowList


async def check_webhook(
    tx: AsyncConnection,
    tenant: UUID,
    settings: Settings,
    url: str | None,
    *,
    pointer: str = "/webhook_url",
) -> None:
    """Refuse a webhook that could never be delivered.

    The addresses of the webhook's host are checked when the webhook is sent.

    Raises:
        InvalidInputError: ``no_webhook_secret``, or ``egress_refused``.
    """
    if url is None:
        return
    has_first = settings.webhook_secret is not None
    if not await webhook_secrets.can_sign(tx, tenant, has_first=has_first):
        raise InvalidInputError(
            "the tenant has no secret for signing webhooks: create one with POST "
            "/v1/webhook-secret (scope admin)",
            code="no_webhook_secret",
            pointer=pointer,
        )
    try:
        refuse_inside(url, AllowList.parse(settings.egress_allow))
    except EgressRefusedError as error:
        raise InvalidInputError(error.detail, code=error.code, pointer=pointer) from None


async def start_run(
    service: Service,
    principal: Principal,
    body: NewRun,
    once: OnceKey | None = None,
    *,
    channel: str | None = None,
    before: Callable[[AsyncConnection], Awaitable[object]] | None = None,
    draft: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Check a client's request for a run, store its files, and submit the run.

    Args:
        once: the request's idempotency key; if the key was used before, the first run is returned.
        channel: name of the façade that got the request, which the agent's ``expose`` must contain;
            ``None``: this API.
        before: a function that is called in the transaction that stores the run, so that a refusal
            of the run undoes the function's changes.
        draft: definition of the run's agent; see :meth:`bottega.runs.pins.PinCache.of_draft`.

    Returns:
        The run in the form of :func:`bottega.runs.submit.submit`.

    Raises:
        BottegaError: see :func:`bottega.runs.submit.submit`, :func:`check_webhook`, and
            :func:`bottega.files.inputs.stored_input`; ``bad_schema``, ``user_required``.
    """
    database, tenant, limits = service.database, principal.tenant_id, principal.limits
    if principal.token is not None:
        principal.token.need_run_of(body.agent, body.graph, body.session_id)
    async with _prepared(service, principal, body, channel, draft) as (new, stored):

        @repeated
        async def store() -> dict[str, Any]:
            if before is not None:
                async with database.begin(tenant) as tx:
                    await before(tx)
                    return await submitting.submit(
                        tx.driver, service.pins, tenant, new, once, limits
                    )
            async with (
                database.commits.turn(tenant),
                database.pool.acquire(timeout=database.patience_s) as connection,
            ):
                return await submitting.submit(connection, service.pins, tenant, new, once, limits)

        try:
            run = await store()
        except ConflictError as error:
            if principal.user is None or error.code != "session_user":
                raise
            raise NotFoundError(f"there is no session {body.session_id}") from None
        if stored.made:
            stored.keep(run["input"] if run.get("message_id") is None else new.input)
    return run


@asynccontextmanager
async def _prepared(
    service: Service,
    principal: Principal,
    body: NewRun,
    channel: str | None,
    draft: dict[str, Any] | None,
) -> AsyncIterator[tuple[submitting.RunRequest, StoredInput]]:
    tenant, settings = principal.tenant_id, service.settings
    user = acts_for(principal, body.user).user
    if user is None and body.session_id is not None and channel is None:
        async with service.database.begin(tenant) as tx:
            user = await sessions.user_of(tx, tenant, body.session_id)
    owner = Owner(user, body.session_id)
    if body.webhook_url is not None:
        async with service.database.begin(tenant) as tx:
            await check_webhook(tx, tenant, settings, body.webhook_url)
    if body.output_schema is not None:
        await check_schema(tenant, body.output_schema, "/output_schema")
    fields = body.model_dump()
    is_text = isinstance(fields["input"], str)
    files = (
        nullcontext(StoredInput(fields["input"]))
        if is_text
        else stored_input(service.files, tenant, fields["input"], owner)
    )
    async with files as stored:
        fields |= {"input": stored.input, "made_files": [*stored.made] or None, "channel": channel}
        fields["draft"] = draft
        fields["user"] = owner.user
        new = submitting.RunRequest.of(
            fields,
            memory=settings.memory,
            principal=principal.actor,
        )
        yield new, stored
