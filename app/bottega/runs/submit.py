"""Acceptance of a run: one transaction stores the run's row, pins, first event and queue entry.

A repeated request with an ``Idempotency-Key`` creates no run, and gets the answer to the first
request. The transaction that creates the run also stores this answer, so a crash cannot lose
only the run or only the answer. The sweep deletes old answers.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import Text, bindparam, column, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from bottega import trace_context
from bottega.agents.messages import AgentUsage
from bottega.db.failures import persist
from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.pool import AsyncConnection, acting_as
from bottega.db.quota import STORAGE_FULL, STORAGE_QUOTA
from bottega.db.tables import runs
from bottega.errors import (
    BottegaError,
    ConflictError,
    InvalidInputError,
    LimitedError,
    NotFoundError,
    UnknownAgentError,
    UserErasingError,
)
from bottega.events.log import line_of, storable
from bottega.memory.episodes.scope import OFF, MemoryScope, memory_used, scope_of_run
from bottega.runs.control import REFUSED_MESSAGES, refused_message
from bottega.runs.pins import PinCache, refuse_overrides, refuse_parts, refuse_unpriced, strictest
from bottega.runs.read import to_response
from bottega.runs.sessions import conversation_busy, session_user
from bottega.tenants.limits import NO_LIMITS, StoredLimits


class OnceKey(NamedTuple):
    """The ``Idempotency-Key`` of a request, and a hash of the request."""

    key: str
    request_hash: bytes


def first_answer(result: Mapping[str, Any] | None) -> Any:
    """Decode the result of the SQL function ``earlier_answer``; ``None``: no stored answer.

    Raises:
        ConflictError: ``in_flight``: a request with this key is in progress.
        InvalidInputError: ``idempotency_key_reused``: an earlier, different request had this key.
    """
    if result is None:
        return None
    if (reason := result.get("refused")) is not None:
        raise refused_key(reason)
    return result["answer"]


def refused_key(reason: str) -> BottegaError:
    """Return the error for a refused ``Idempotency-Key``."""
    if reason == "in_flight":
        return ConflictError(
            "a request with this Idempotency-Key is in progress: repeat the request in a moment",
            code=reason,
        )
    return InvalidInputError(
        "this Idempotency-Key was used for a request with another body or path: use a new key "
        "for a new request",
        code=reason,
    )


REFUSED_KEYS = ("in_flight", "idempotency_key_reused")


_REFUSALS = {
    STORAGE_QUOTA: STORAGE_FULL,
    "queued_runs": "{limit} runs are queued already: wait until some have ended",
    "cost_per_day": "the tenant's budget for today (UTC) is spent: start more runs tomorrow",
    "key_tokens_per_day": "the {limit} tokens of this key for today (UTC) are used up: start more "
    "runs tomorrow, or with another key",
    "tokens_per_day": "the {limit} tokens for today (UTC) are used up: start more runs tomorrow",
}
_SUBMIT = "SELECT submit_run($1, $2, $3, $4, $5)::text"
_EARLIER = """
SELECT earlier_answer($1::uuid, $2, $3)::text
FROM set_config('bottega.tenant', $1::uuid::text, true)
"""
_ACCEPT = text("""
SELECT CAST(accept_run(:tenant, CAST(:new AS jsonb), :carried, CAST(:tasks AS jsonb)) AS text)
""").bindparams(bindparam("carried", type_=ARRAY(Text)))

_LIMITS = {"timeout_s": 3600.0, "queue_timeout_s": 86_400.0}
"""Limits of a run whose request sets none: runs that are queued at night may wait for the day."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request for a run.

    Attributes:
        conversation: ``continue``, ``new`` or ``none``.
        if_busy: action if an earlier run of the conversation has not ended. ``queue``: this run
            waits. ``reject``: this run is refused. ``interrupt``: the earlier run is cancelled.
            ``steer``: the earlier run gets the input as a message.
        user: the end user's name in the customer's product. A session has only one user.
        timeout_s: maximum time in seconds from the first start to the end, including all pauses.
        queue_timeout_s: maximum time in seconds until the first start.
        token_budget: maximum number of input and output tokens of all calls; ``None``: no limit.
        cost_budget: maximum cost (``amount``, ``currency``) of all model calls; ``None``: no limit.
        webhook_url: URL that receives a message when the run has ended.
        overrides: ``{agent: {"params": {…}}}``. The run's parameters are merged with the agent's
            parameters.
        output_schema: JSON Schema of the answer, which replaces the agent's schema.
        goals, constraints, success_criteria: texts that the run's agents read in addition to the
            input.
        memory: ``off``, ``read`` or ``full``. An agent of the run may have a stricter mode.
        principal: the API key or user that starts the run.
        traceparent, tracestate: trace context of the request; ``None``: the request has none.
        version: version of the agent (without an agent: of the graph); ``None``: the current
            version.
        channel: the API that got the request. If the agent has ``expose``, ``expose`` must list
            this API. ``None``: the API under ``/v1``, which offers all agents.
        made_files: ids of files with the input's data. These files are deleted with the run.
        batch: ``concurrency``, ``on_error`` and ``total`` of a batch, and the fields of an eval.
        draft: a draft's unstored definition; see :meth:`bottega.runs.pins.PinCache.of_draft`.
    """

    mode: str
    agent: str | None
    graph: str | None
    session_id: str | None
    user: str | None
    input: str | list[dict[str, Any]]
    priority: int
    timeout_s: float
    queue_timeout_s: float
    token_budget: int | None
    cost_budget: dict[str, str] | None
    webhook_url: str | None
    overrides: dict[str, Any] | None
    output_schema: dict[str, Any] | None
    goals: list[str] | None
    constraints: list[str] | None
    success_criteria: list[str] | None
    metadata: dict[str, Any]
    memory: str
    principal: str | None
    traceparent: str | None
    tracestate: str | None
    conversation: str
    if_busy: str
    made_files: list[UUID] | None
    version: int | None
    channel: str | None
    batch: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Any],
        *,
        memory: str,
        principal: str | None,
    ) -> "RunRequest":
        """Return the request from a validated body of ``POST /v1/runs``.

        Args:
            memory: the server's memory mode. The body may only name a stricter mode.
        """
        usual = "none" if fields.get("session_id") is None else "continue"
        fields = {
            **fields,
            "memory": strictest(memory, fields.get("memory") or memory),
            "conversation": fields.get("conversation") or usual,
            "if_busy": fields.get("if_busy") or "queue",
        }
        # A different version of Bottega may have stored a body with different fields.
        values = {name: fields[name] for name in _FIELDS if fields.get(name) is not None}
        trace = trace_context.current.get()
        own: dict[str, str | None] = {"principal": principal}
        if trace is not None:
            own |= {"traceparent": trace.traceparent, "tracestate": trace.tracestate or None}
        return cls(**{**dict.fromkeys(_FIELDS), **_LIMITS, **values, **own})


_FIELDS = tuple(field.name for field in fields(RunRequest))


@dataclass(frozen=True, slots=True)
class Carried:
    """Steps that a new run copies from an earlier run.

    Attributes:
        events: events of the log, from ``seq`` 2 on.
        tasks: rows of the tasks to which the events belong.
        usage: sum of the events' usage, for which the earlier run has paid.
    """

    events: Sequence[Mapping[str, Any]] = ()
    tasks: Sequence[Mapping[str, Any]] = ()
    usage: AgentUsage = AgentUsage()


async def submit(
    pool: asyncpg.Pool | asyncpg.Connection,
    pins: PinCache,
    tenant_id: UUID,
    new: RunRequest,
    once: OnceKey | None = None,
    limits: StoredLimits = NO_LIMITS,
    check: "Check | None" = None,
) -> dict[str, Any]:
    """Store and queue a run. Return the run in the form of :func:`bottega.runs.read.get`.

    If an earlier run got the input as a message, return the earlier run, with ``message_id``.

    Args:
        pool: a pool, or a connection without an open transaction. The function commits the run.
        once: idempotency key. For a repeated request with this key, the function returns the run of
            the first request.
        limits: limits of the API key that starts the run.
        check: function that is called instead of :func:`checked_values`.

    Raises:
        UnknownAgentError: an agent that the run needs does not exist.
        InvalidInputError: the graph does not exist (``unknown_graph``); a sub-agent has no
            description (``missing_description``); sub-agents nest too deep (``too_deep``); a model
            does not have a parameter (``unsupported_param``), does not accept a part of the input
            (``unsupported_part``) or has no known price for a ``cost_budget`` (``unpriced_model``);
            ``idempotency_key_reused``, ``message_too_large``.
        ForbiddenError: ``beyond_limits``.
        LimitedError, ConflictError: see :func:`accept`; ``in_flight``, ``too_many_messages``.
    """
    key = (None, None) if once is None else once
    while True:
        try:
            values, epoch = await (
                checked_values(pool, pins, tenant_id, new, limits) if check is None else check()
            )
        except BottegaError:
            # The first request may have succeeded before somebody deleted a definition.
            first = None if once is None else await pool.fetchval(_EARLIER, tenant_id, *once)
            if first is None:
                raise
            return to_response(first_answer(from_json(first))["body"])
        content = to_json(values).decode()
        answer = from_json(await pool.fetchval(_SUBMIT, tenant_id, content, epoch, *key))
        if answer.get("refused") != "stale":
            return _accepted(answer, values)
        pins.forget(tenant_id, new.agent, new.graph, new.version)


Check = Callable[[], Awaitable[tuple[Mapping[str, Any], UUID | None]]]


async def checked_values(
    pool: asyncpg.Pool | asyncpg.Connection,
    pins: PinCache,
    tenant_id: UUID,
    new: RunRequest,
    limits: StoredLimits,
) -> tuple[Mapping[str, Any], UUID | None]:
    """Return a run's values with pinned versions, and the epoch of the definitions."""
    if new.draft is None:
        target = await pins.find(pool, tenant_id, new.agent, new.graph, new.version)
    else:
        target = await pins.of_draft(pool, tenant_id, new.draft)
    if new.channel is not None and target.expose is not None and new.channel not in target.expose:
        raise UnknownAgentError(
            f"this API does not offer the agent '{new.agent}': its `expose` lacks {new.channel}",
            pointer="/agent",
        )
    models = [each.name for used in target.models.values() for each in used]
    limits.need_names(target.models, models)
    refuse_overrides(new.overrides or {}, target.params, target.tools, target.dialects)
    for agent in () if isinstance(new.input, str) else target.first:
        refuse_parts(new.input, target.dialects[agent])
    if new.cost_budget is not None:
        await refuse_unpriced(target.models)
    memory = strictest(new.memory, target.memory)
    values = {name: getattr(new, name) for name in _FIELDS if name != "draft"}  # a draft is a pin
    used = OFF if memory == "off" else _memory_used(new, target.memory_scope, shared=pins.shared)
    pinned = limits.pinned(target.pinned)
    return values | {"pinned": pinned, "memory": memory, "memory_used": used}, target.epoch


def _memory_used(new: RunRequest, memory_scope: MemoryScope | None, *, shared: bool) -> str:
    scope = scope_of_run(
        memory_scope, user=new.user, session_id=new.session_id, agent=new.agent, shared=shared
    )
    return memory_used(scope, user=new.user, session_id=new.session_id)


async def accept(
    connection: AsyncConnection,
    tenant_id: UUID,
    new: Mapping[str, Any],
    carried: Carried = Carried(),
) -> dict[str, Any]:
    """Store and queue a run whose values are complete and checked.

    Args:
        new: columns of the run's row, with ``pinned``.
        carried: steps copied from another run.

    Raises:
        LimitedError: ``queued_runs``, ``tokens_per_day``, ``key_tokens_per_day``,
            ``cost_per_day`` or ``storage_quota``.
        ConflictError: ``session_user``, ``conversation_busy`` or ``user_erasing``.
    """
    values = {
        "tenant": tenant_id,
        "new": to_json(new).decode(),
        "carried": [line_of(event) for event in carried.events],
        "tasks": to_json(carried.tasks).decode(),
    }
    return _accepted(from_json(await connection.scalar(_ACCEPT, values)), new)


def _accepted(answer: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored run. Raise the error for a run that the SQL function refused."""
    if (reason := answer.get("refused")) == "session_user":
        raise session_user(new["session_id"])
    if reason == "user_erasing":
        raise UserErasingError
    if reason == "conversation_busy":
        raise conversation_busy(answer["run_id"])
    if reason in REFUSED_MESSAGES:
        raise refused_message(answer, answer["run_id"], "/input")
    if reason in REFUSED_KEYS:
        raise refused_key(reason)
    if reason is not None:
        what = _REFUSALS.get(reason, f"the limit {reason} is reached").format(limit=answer["limit"])
        raise LimitedError(what, code=reason, retry_after_s=answer["retry_after_s"])
    pinned = new["pinned"]
    version = (pinned.get("graph") or {}).get("version") or pinned["agents"].get(new["agent"])
    return to_response({**answer, "version": version})


MOST_ITEMS = 10_000
_ITEMS_AT_ONCE = 500
_RESULTS_AT_ONCE = 100

_ADD = "SELECT add_items($1, $2, $3, $4)"
_START = "SELECT start_batch($1, $2)"
_RESULTS = "SELECT number, line FROM batch_results($1, $2, $3, $4)"
_RETRY = text("SELECT retry_batch(:tenant, :run)")
_SHOWN = func.shown_batch(column("runs"), type_=JSONB).label("batch")
_BATCHES = select(runs.c.id, _SHOWN).where(
    runs.c.tenant_id == bindparam("tenant"), runs.c.mode == "batch"
)


async def store_items(
    pool: asyncpg.Pool,
    tenant_id: UUID,
    batch_id: UUID,
    items: Sequence[Mapping[str, Any]],
    on: asyncpg.Connection | None = None,
) -> None:
    """Store the items of an accepted batch, one page per transaction. Then start the batch.

    After a failure, the next call stores the missing items. A started batch is not changed.

    Args:
        items: mappings with ``input`` and, optionally, ``metadata`` and ``key``; of an eval also
            ``agent``, ``case`` and ``target``.
        on: a connection whose open transaction (of the tenant) stores all pages.
    """
    for first in range(0, len(items), _ITEMS_AT_ONCE):
        page = to_json(storable([*items[first : first + _ITEMS_AT_ONCE]])).decode()
        async with acting_as(pool, tenant_id, on) as connection:
            await connection.execute(_ADD, tenant_id, batch_id, first + 1, page)
    async with acting_as(pool, tenant_id, on) as connection:
        await connection.execute(_START, tenant_id, batch_id)


async def get_batch(tx: AsyncConnection, tenant_id: UUID, batch_id: UUID) -> dict[str, Any]:
    """Return a batch in the form of the API.

    Raises:
        NotFoundError: the tenant has no such batch.
    """
    query = _BATCHES.where(runs.c.id == bindparam("batch"))
    row = (await tx.execute(query, {"tenant": tenant_id, "batch": batch_id})).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no batch {batch_id}")
    return dict(row.batch)


async def list_batches(
    tx: AsyncConnection, tenant_id: UUID, *, after: UUID | None, descending: bool, limit: int
) -> PageItems[dict[str, Any]]:
    """List a page of batches, sorted by age, after the batch ``after``."""
    query = paged(_BATCHES, runs.c.id, after=after, descending=descending)
    rows = await fetch_page(tx, query.params(tenant=tenant_id), limit)
    return PageItems((dict(row["batch"]) for row in rows), more=rows.more)


async def batch_lines(pool: asyncpg.Pool, tenant_id: UUID, batch_id: UUID) -> AsyncIterator[bytes]:
    """Yield one line of JSON per item, in order. Read the items in pages."""
    after = 0
    while True:
        about = tenant_id, batch_id, after, _RESULTS_AT_ONCE

        async def read(about: tuple[Any, ...] = about) -> list[asyncpg.Record]:
            async with acting_as(pool, tenant_id) as connection:
                rows: list[asyncpg.Record] = await connection.fetch(_RESULTS, *about)
                return rows

        rows = await persist(read)
        for row in rows:
            yield to_json(from_json(row["line"])) + b"\n"
        if len(rows) < _RESULTS_AT_ONCE:
            return
        after = rows[-1]["number"]


async def retry_batch(tx: AsyncConnection, tenant_id: UUID, batch_id: UUID) -> dict[str, Any]:
    """Queue all failed items of a batch again. Return the batch.

    Raises:
        NotFoundError: the tenant has no such batch.
        ConflictError: ``nothing_failed``.
    """
    await get_batch(tx, tenant_id, batch_id)
    if not await tx.scalar(_RETRY, {"tenant": tenant_id, "run": batch_id}):
        raise ConflictError(f"no item of batch {batch_id} has failed", code="nothing_failed")
    return await get_batch(tx, tenant_id, batch_id)
