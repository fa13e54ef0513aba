"""Routes of batches: one request starts many runs of an agent or a graph."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.responses import StreamingResponse

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problem_response, problems
from bottega.api.routes import stream
from bottega.api.schemas.base import MOST_BODY_BYTES, Answer, Body, Metadata, Name, Page, WebhookUrl
from bottega.api.schemas.runs import CostBudget, Event
from bottega.api.shared.deps import (
    Actor,
    PrincipalDep,
    ReviewTenant,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.idempotency import OnceDep, once_key
from bottega.api.shared.new_runs import check_webhook
from bottega.api.shared.pages import LINK, PageQuery, escaped_lines
from bottega.container import Service
from bottega.errors import InvalidInputError
from bottega.events.data import AgentUsage, Failure
from bottega.files.store import Owner
from bottega.json_schema.values import WHOLE
from bottega.runs import submit
from bottega.runs.control import request_cancel
from bottega.runs.submit import OnceKey
from bottega.tenants import audit

router = APIRouter(prefix="/v1/batches", tags=["batches"])

LONGEST_BODY = 64 * 1024 * 1024
_NDJSON, _JSON = "application/x-ndjson", "application/json"

BatchId = Annotated[UUID, Path(description="The batch's id.")]


class BatchItem(Body):
    """A run of a batch."""

    input: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    """The question."""
    metadata: Metadata = Field(default_factory=dict)
    key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Your own name for the item, unique in the batch."""


class BatchBudget(Body):
    """Limits on the total spending of all items of a batch."""

    tokens: Annotated[int, Field(ge=1, le=10**12), WHOLE] | None = None
    """Input and output tokens."""
    cost: CostBudget | None = None
    """Cost of the model calls. The price of each model must be known."""


class NewBatch(Body):
    """A request for many runs of one agent or graph."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"agent": "coordinator", "items": [{"input": "Sum up.", "key": "first"}]}]
        }
    )

    agent: Name | None = None
    """The agent that runs; null: `graph` names a graph."""
    graph: Name | None = None
    """The graph that runs, as for a run of the mode `dag`; null: `agent` names an agent."""
    items: Annotated[list[BatchItem], Field(min_length=1, max_length=submit.MOST_ITEMS)] | None = (
        None
    )
    file: UUID | None = None
    """Id of an uploaded file that has one item per line, as JSON."""
    concurrency: Annotated[int, Field(ge=1, le=10_000), WHOLE] | None = None
    """Maximum number of items that may be queued or running at the same time, at most
    `concurrent_runs`; null: half of `concurrent_runs`."""
    on_error: Literal["continue", "fail"] = "continue"
    """`fail`: the first item that fails ends the batch and all its other items."""
    priority: Annotated[int, Field(ge=1, le=10), WHOLE] = 8
    """1 is the most urgent."""
    webhook_url: WebhookUrl | None = None
    """URL that gets a signed request when the batch ends."""
    budget: BatchBudget | None = None
    """When the budget is spent, items that have not begun fail with `budget_exhausted`."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.agent is None) == (self.graph is None):
            raise PydanticCustomError("batch", "name either an agent or a graph")
        if self.items is not None and self.file is not None:
            raise PydanticCustomError("batch", "give either items or a file")
        return self


class BatchCounts(Answer):
    """Number of a batch's items in each status."""

    queued: int
    """Items that have not begun."""
    running: int
    """Items that a worker executes now."""
    waiting: int
    """Items that wait for people, a model or child runs."""
    completed: int
    """Items that ended with an answer."""
    failed: int
    """Items that ended with an error."""
    timeout: int
    """Items that ended because their time was over."""
    cancelled: int
    """Items that a client cancelled, alone or with the batch."""


class Batch(Answer):
    """A batch."""

    id: UUID
    agent: str | None
    graph: str | None
    eval: str | None
    """Name of the eval whose runs are the items; null: the batch is no eval's."""
    status: Literal["running", "completed", "failed", "cancelled"]
    """`completed`: all items have ended; some may have failed."""
    error: Failure | None
    """Why the batch failed; null: it did not fail."""
    total: int
    """Number of items."""
    counts: BatchCounts
    """Number of items by status."""
    usage: AgentUsage | None
    """Usage of the items that have ended; null: no item has ended."""
    seconds_left: float | None
    """Estimated seconds until the batch ends; null: no item has ended, or all items have ended."""
    created_at: datetime
    ended_at: datetime | None


def _refused(error: ValidationError, data: bytes | None) -> RequestValidationError:
    problems = error.errors(include_url=False)
    place = "query" if data is None else "body"
    body = None if data is None or problems[0]["type"] == "json_invalid" else from_json(data)
    return RequestValidationError(
        [{**each, "loc": (place, *each["loc"])} for each in problems], body=body
    )


def _line_refused(number: int, detail: str) -> InvalidInputError:
    return InvalidInputError(f"line {number}: {detail}")


def items_of(data: bytes) -> list[BatchItem]:
    """Parse the items, one JSON object per line; empty lines are skipped.

    Raises:
        InvalidInputError: there are no items or too many items, or a line is invalid; the error has
            the line's number.
    """
    items: list[BatchItem] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        if len(items) == submit.MOST_ITEMS:
            raise _line_refused(number, f"a batch has at most {submit.MOST_ITEMS} items")
        try:
            items.append(BatchItem.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"/{each}" for each in first["loc"])
            raise _line_refused(number, f"{place}{place and ': '}{first['msg']}") from None
    if not items:
        raise InvalidInputError("the batch has no items: send one item per line")
    return items


def _with_keys_once(items: Sequence[BatchItem]) -> list[dict[str, Any]]:
    """Return the items to store.

    Raises:
        InvalidInputError: ``duplicate_key``.
    """
    keys: set[str] = set()
    for index, item in enumerate(items):
        if item.key is not None and item.key in keys:
            raise InvalidInputError(
                f"two items have the key '{item.key[:100]}'",
                code="duplicate_key",
                pointer=f"/items/{index}/key",
            )
        keys.update(() if item.key is None else (item.key,))
    return [item.model_dump(exclude_none=True) for item in items]


class BatchQuery(BaseModel):
    """Query parameters of a batch whose items are the lines of the body."""

    agent: Annotated[str | None, Query(description="As in `NewBatch`.")] = None
    graph: Annotated[str | None, Query(description="In place of an agent.")] = None
    concurrency: Annotated[
        int | None, Query(description="Items that may be queued or running at a time.")
    ] = None
    on_error: Annotated[str | None, Query(description="`continue` or `fail`.")] = None
    priority: Annotated[int | None, Query(description="1 is the most urgent.")] = None
    webhook_url: Annotated[str | None, Query(description="URL to call at the end.")] = None
    budget: Annotated[Json[dict[str, Any]] | None, Query(description="As JSON.")] = None


async def _file_items(service: Service, tenant: UUID, file_id: UUID) -> list[BatchItem]:
    if not await service.files.use(tenant, [file_id], Owner(None, None)):
        raise InvalidInputError(
            f"there is no file {file_id}, or the file belongs to a user or a session",
            code="unknown_file",
            pointer="/file",
        )
    row = await service.files.find(tenant, file_id)
    if row["size"] > LONGEST_BODY:
        raise InvalidInputError(
            f"the file of a batch may have at most {LONGEST_BODY} bytes",
            code="file_too_large",
            pointer="/file",
        )
    return items_of(b"".join([piece async for piece in service.files.read(row)]))


async def _body_of(
    request: Request, query: BatchQuery, service: Service, tenant: UUID, *, is_lines: bool
) -> tuple[NewBatch, list[BatchItem]]:
    data = await request.body()
    fields = query.model_dump(exclude_none=True)
    if fields and not is_lines:
        raise InvalidInputError(f"send all fields in the {_JSON} body, and none in the query")
    try:
        if is_lines:
            return NewBatch.model_validate(fields), items_of(data)
        body = NewBatch.model_validate_json(data)
    except ValidationError as error:
        raise _refused(error, None if is_lines else data) from None
    if body.file is not None:
        return body, await _file_items(service, tenant, body.file)
    if body.items is None:
        raise InvalidInputError("give either items or a file", pointer="/items")
    return body, body.items


async def _key_of(request: Request, key: str | None, *, is_lines: bool) -> OnceKey | None:
    if key is None or not is_lines:
        return None if key is None else await once_key(request, key)
    about = f"{request.url.path}?{request.url.query}\n".encode()
    return OnceKey(key, sha256(about + await request.body()).digest())


_BODY: Mapping[str, Any] = {
    "required": True,
    "content": {
        _JSON: {"schema": {"$ref": "#/components/schemas/NewBatch"}},
        _NDJSON: {
            "schema": {
                "type": "string",
                "description": "A `BatchItem` in each line. The other fields of `NewBatch` are "
                "query parameters; `budget` is JSON.",
            }
        },
    },
}


@router.post(
    "",
    operation_id="create_batch",
    summary="Start many runs at once",
    description=(
        "Starts at most 10,000 runs of one agent or graph. Send `items` inline (up to 1 MiB), as "
        "a body of NDJSON (up to 64 MiB, the other fields as query parameters), or as the lines of "
        "a `file`. Items are stored in pages, and no item runs before all items are stored. If "
        "storing is interrupted, repeat the request with the same `Idempotency-Key`: it stores the "
        "missing items, and returns the batch. Items are child runs with the batch as their "
        "`parent_run_id`. Items count towards no limit; the batch is one run in `queued_runs`."
    ),
    status_code=202,
    response_model=Batch,
    responses={**problems(400, 409, 413, 415), 202: headers(Location="Path of the batch.")},
    openapi_extra={"requestBody": _BODY},
)
async def create(
    request: Request,
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    once: OnceDep,
    response: Response,
    query: Annotated[BatchQuery, Query()],
    content_type: Annotated[str, Header(include_in_schema=False)] = "",
) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (_JSON, _NDJSON):
        return problem_response(415, "unsupported_media_type", f"send {_JSON} or {_NDJSON}")
    is_lines = kind == _NDJSON
    acts_for(principal, None, None)
    if not is_lines and len(await request.body()) > MOST_BODY_BYTES:
        hint = f"send more than {MOST_BODY_BYTES} bytes as {_NDJSON}"
        return problem_response(413, "body_too_large", hint)
    body, items = await _body_of(request, query, service, tenant, is_lines=is_lines)
    stored = _with_keys_once(items)
    new = _new_run(service, principal.actor, body, len(stored))
    async with service.database.begin(tenant) as tx:
        await check_webhook(tx, tenant, service.settings, body.webhook_url)
    pool = service.database.pool
    key = await _key_of(request, once.key, is_lines=is_lines)
    run = await submit.submit(pool, service.pins, tenant, new, key, principal.limits)
    batch_id = UUID(str(run["id"]))
    await submit.store_items(pool, tenant, batch_id, stored)
    response.headers["Location"] = f"{router.prefix}/{batch_id}"
    async with service.database.begin(tenant) as tx:
        return await submit.get_batch(tx, tenant, batch_id)


def _new_run(service: Service, actor: str, body: NewBatch, total: int) -> submit.RunRequest:
    budget = body.budget or BatchBudget()
    fields = {
        **body.model_dump(include={"agent", "graph", "priority", "webhook_url"}),
        "mode": "batch",
        "input": "",
        "metadata": {},
        "token_budget": budget.tokens,
        "cost_budget": None if budget.cost is None else budget.cost.model_dump(),
        "batch": {"concurrency": body.concurrency, "on_error": body.on_error, "total": total},
    }
    return submit.RunRequest.of(
        fields,
        memory=service.settings.memory,
        principal=actor,
    )


@router.get(
    "",
    operation_id="list_batches",
    summary="List batches by age",
    description="Newest last, unless `order` says otherwise.",
    response_model=Page[Batch],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: ReviewTenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await submit.list_batches(
        tx, tenant, after=query.place(UUID), descending=query.descending, limit=query.limit
    )
    return query.page(request, response, rows, lambda batch: batch["id"])


@router.get(
    "/{batch_id}",
    operation_id="get_batch",
    summary="Read a batch",
    description="Shows the batch's progress, and what it spent.",
    response_model=Batch,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: ReviewTenant, batch_id: BatchId) -> Any:
    return await submit.get_batch(tx, tenant, batch_id)


@router.get(
    "/{batch_id}/results",
    operation_id="list_batch_results",
    summary="Read the results of a batch",
    description=(
        "A line of JSON for each item, in the order of the items: `index` (from 0), `key`, "
        "`run_id` (null: it has not begun), `status`, `output`, `output_json`, `error`. Items "
        "that are not over have no output yet."
    ),
    response_class=StreamingResponse,
    responses={
        **problems(404),
        200: {
            "content": {_NDJSON: {"schema": {"type": "string"}}},
            "description": "The lines.",
        },
    },
)
async def results(service: ServiceDep, tenant: ReviewTenant, batch_id: BatchId) -> Any:
    async with service.database.begin(tenant) as tx:
        await submit.get_batch(tx, tenant, batch_id)
    lines = submit.batch_lines(service.database.pool, tenant, batch_id)
    return StreamingResponse(escaped_lines(lines), media_type=_NDJSON)


@router.get(
    "/{batch_id}/events",
    operation_id="list_batch_events",
    summary="List a batch's events",
    description=(
        "A page of the batch's log. With `Accept: text/event-stream` it streams, like "
        "`stream_run_events`."
    ),
    response_model=Page[Event],
    responses={
        **problems(404),
        204: {"description": "Only for a stream, as in `stream_run_events`."},
    },
)
async def events(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: ReviewTenant,
    batch_id: BatchId,
    query: Annotated[stream.EventQuery, Query()],
    request: Request,
    response: Response,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: stream.LastEventId = None,
) -> Any:
    about = batch_id, query, request, response, accept, last_event_id
    return await stream.events(service, principal, tenant, *about)


@router.post(
    "/{batch_id}/cancel",
    operation_id="cancel_batch",
    summary="Cancel a batch",
    description="Cancels the items that have begun; the other items never begin. Idempotent.",
    status_code=202,
    response_model=Batch,
    responses=problems(404),
)
async def cancel(service: ServiceDep, tenant: Tenant, actor: Actor, batch_id: BatchId) -> Any:
    async with service.database.begin(tenant) as tx:
        await submit.get_batch(tx, tenant, batch_id)
    await request_cancel(service.database, tenant, batch_id, actor, action="batch.cancel")
    async with service.database.begin(tenant) as tx:
        return await submit.get_batch(tx, tenant, batch_id)


@router.post(
    "/{batch_id}/retry",
    operation_id="retry_batch",
    summary="Repeat the failed items of a batch",
    description="Starts a new run for each failed item. 409 `nothing_failed`: no item has failed.",
    status_code=202,
    response_model=Batch,
    responses=problems(404, 409),
)
async def retry(tx: Transaction, tenant: Tenant, principal: PrincipalDep, batch_id: BatchId) -> Any:
    principal.limits.need_no_limit_of_runs()
    batch = await submit.retry_batch(tx, tenant, batch_id)
    await audit.note(tx, tenant, principal.actor, "batch.retry", str(batch_id))
    return batch
