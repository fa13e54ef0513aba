"""Routes of end users, whose names may be any text."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints
from starlette.routing import Match
from starlette.types import Scope

from bottega import users as user_data
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Body, Page, UserName
from bottega.api.shared.deps import (
    Actor,
    AdminTenant,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.pages import LINK, PageQuery, escaped_lines, storable
from bottega.memory import facts
from bottega.tenants import audit
from bottega.users import UserExport, as_array


class User(Answer):
    """An end user, and the progress of the erasure of the user's data, if requested."""

    user: str
    """Your own name for the end user."""
    status: Literal["active", "erasing"]
    """`erasing`: the server accepts no new data for this user."""
    requested_at: datetime | None
    """Time of the request for the erasure; null: there was no request."""
    removed: Annotated[dict[str, int], Field(examples=[{"runs": 300, "run_steps": 2410}])]
    """Number of rows that were removed so far, by table."""


class FactSource(Answer):
    """The person or run that set a fact."""

    kind: Literal["message", "run", "person"]
    """`run`: an agent set it with its tool `remember_fact`; `person`: a person set it in the API or
    the console; `message`: reserved."""
    run_id: UUID | None
    """Id of the run that set the fact; null: a person set it."""
    message_id: UUID | None
    """Id of the message from which the fact was taken; null: unknown."""


class Fact(Answer):
    """A fact about an end user."""

    id: UUID
    text: str
    source: FactSource
    """The person or run that set the fact."""
    confirmed: bool
    """False: a run set the fact after it had read outside content. Models get such a fact only
    after a person has set its text."""
    created_at: datetime


FactText = Annotated[str, StringConstraints(min_length=1, max_length=facts.LONGEST_FACT)]


class FactToSet(Body):
    """The text of a fact."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "Prefers answers in Italian."}]}
    )

    text: FactText
    """One sentence. Line feeds become spaces."""


class EncodedPathRoute(APIRoute):
    """A route that matches the path before decoding, so that a parameter may contain ``%2F``.

    Bytes that are not UTF-8 become lone surrogates, which the check of the parameter refuses.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw = scope.get("raw_path", b"").decode("latin-1")
        match, more = super().matches({**scope, "path": raw})
        if match is not Match.NONE:
            more["path_params"] = {
                name: unquote(value, errors="surrogateescape")
                for name, value in more["path_params"].items()
            }
        return match, more


router = APIRouter(prefix="/v1/users", tags=["users"], route_class=EncodedPathRoute)

_NDJSON, _JSON = "application/x-ndjson", "application/json"
_LINES = {
    "type": "array",
    "description": "The same lines as one array.",
    "items": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "description": "A table, `fact`, `content` or `end`."},
            "data": {"type": "object", "description": "The row."},
        },
        "required": ["type", "data"],
    },
}
UserPath = Annotated[
    UserName,
    AfterValidator(storable),
    Path(description="The user, percent-encoded: a slash as `%2F`."),
]


@router.get(
    "/{user}",
    operation_id="get_user",
    summary="Read a user, and the progress of an erasure",
    description="404: there is no data of this user, or the erasure is complete.",
    response_model=User,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: AdminTenant, user: UserPath) -> Any:
    return await user_data.get(tx, tenant, user)


@router.delete(
    "/{user}",
    operation_id="delete_user",
    summary="Erase a user's data",
    description=(
        "Deletes the user's sessions, runs, episodes, files and schedules with all their data, in "
        "the background. Until GET answers 404, nothing new is accepted for the user (409 "
        "`user_erasing`). Runs that are not over are stopped, as when a session is deleted."
    ),
    status_code=202,
    response_model=User,
    responses={**problems(404), 202: headers(Location="Path of the user.")},
)
async def delete(
    tx: Transaction, tenant: AdminTenant, actor: Actor, user: UserPath, response: Response
) -> Any:
    response.headers["Location"] = f"{router.prefix}/{quote(user, safe='')}"
    return await user_data.request(tx, tenant, user, actor)


@router.get(
    "/{user}/export",
    operation_id="export_user",
    summary="Export a user's data",
    description=(
        "Lines of JSON, each an object with `type` (the table; of facts `fact`) and `data` (the "
        "row); a line of the type `content` is a part of a file or of a long text, in base64. An "
        "export is complete only if its last line has the type `end`; otherwise the export broke "
        "off, or the user's erasure began meanwhile. With `Accept: application/json` the lines are "
        "the items of one array."
    ),
    response_class=StreamingResponse,
    responses={
        **problems(404, 409),
        200: {
            "content": {_JSON: {"schema": _LINES}, _NDJSON: {"schema": {"type": "string"}}},
            "description": "The lines.",
        },
    },
)
async def export(
    service: ServiceDep,
    tenant: AdminTenant,
    actor: Actor,
    user: UserPath,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> StreamingResponse:
    objects = service.files.objects
    found = UserExport(service.database, objects, tenant, user)
    async with service.database.begin(tenant) as tx:
        await found.check(tx)
        await audit.note(tx, tenant, actor, "user.export", user_data.pseudonym(user))
    if _JSON in accept and _NDJSON not in accept:
        return StreamingResponse(as_array(found.lines()), media_type=_JSON)
    return StreamingResponse(escaped_lines(found.lines()), media_type=_NDJSON)


FactId = Annotated[UUID, Path(description="The fact's id.")]


def _shown_fact(row: Mapping[str, Any]) -> dict[str, Any]:
    source = {"kind": row["kind"], "run_id": row["source_run"], "message_id": None}
    return {**row, "source": source}


@router.get(
    "/{user}/facts",
    operation_id="list_user_facts",
    summary="List the facts about a user by age",
    description=(
        "Facts are short sentences that people, or agents by the tool `remember_fact`, have set. "
        "Runs of the user that begin with an agent whose `facts` is `read` or `write` have them in "
        "their prompts, as data, up to 500 tokens, the newest first. Learning never makes a fact. "
        "For an unknown user the list is empty."
    ),
    response_model=Page[Fact],
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def list_facts(
    tx: Transaction,
    tenant: Tenant,
    user: UserPath,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await facts.page(tx.driver, tenant, user, **query.window(UUID))
    page = query.page(request, response, rows, lambda fact: fact["id"])
    return {**page, "items": [*map(_shown_fact, page["items"])]}


@router.post(
    "/{user}/facts",
    operation_id="create_user_fact",
    summary="Set a fact about a user",
    description=(
        f"A user has at most {facts.MOST_FACTS} facts; one more is refused with 409 "
        "`too_many_facts`. A text that the user has already is stored once."
    ),
    status_code=201,
    response_model=Fact,
    responses=problems(400, 404, 409, 413, 415),
)
async def create_fact(
    tx: Transaction,
    tenant: Tenant,
    actor: Actor,
    user: UserPath,
    body: FactToSet,
) -> Any:
    fact = await facts.add(tx.driver, tenant, user, body.text)
    await audit.note(tx, tenant, actor, "fact.create", str(fact["id"]))
    return _shown_fact(fact)


@router.patch(
    "/{user}/facts/{fact_id}",
    operation_id="change_user_fact",
    summary="Change the text of a fact, or confirm it",
    description="The fact counts as set by a person from now on. Send the same text to confirm it.",
    response_model=Fact,
    responses=problems(400, 404, 409, 413, 415),
)
async def change_fact(
    tx: Transaction,
    tenant: Tenant,
    actor: Actor,
    user: UserPath,
    fact_id: FactId,
    body: FactToSet,
) -> Any:
    fact = await facts.change(tx.driver, tenant, user, fact_id, body.text)
    await audit.note(tx, tenant, actor, "fact.change", str(fact_id))
    return _shown_fact(fact)


@router.delete(
    "/{user}/facts/{fact_id}",
    operation_id="delete_user_fact",
    summary="Delete a fact about a user",
    description="Prompts of later runs do not have the fact any more.",
    status_code=204,
    responses=problems(404),
)
async def delete_fact(
    tx: Transaction,
    tenant: Tenant,
    actor: Actor,
    user: UserPath,
    fact_id: FactId,
) -> None:
    await facts.remove(tx.driver, tenant, user, fact_id)
    await audit.note(tx, tenant, actor, "fact.delete", str(fact_id))
