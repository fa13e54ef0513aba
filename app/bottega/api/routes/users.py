"""Routes of end users, whose names may be any text."""

from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from fastapi import APIRouter, Header, Path, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import AfterValidator, Field
from starlette.routing import Match
from starlette.types import Scope

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, UserName
from bottega.api.shared.deps import Actor, AdminTenant, ServiceDep, Transaction
from bottega.api.shared.pages import escaped_lines, storable
from bottega.tenants import audit
from bottega.users import erasure
from bottega.users.export import UserExport, as_array


class User(Answer):
    """An end user, and the progress of the erasure of its data, if requested."""

    user: str
    """Your own name for the end user."""
    status: Literal["active", "erasing"]
    """`erasing`: nothing new is accepted for this user."""
    requested_at: datetime | None
    """Time at which the erasure was requested; null: not requested."""
    removed: Annotated[dict[str, int], Field(examples=[{"runs": 300, "run_steps": 2410}])]
    """Number of rows removed so far, by table."""


class EncodedPathRoute(APIRoute):
    """A route that is matched before its path is decoded, so that a parameter may contain ``%2F``.

    Bytes that are not UTF-8 become lone surrogates, which the parameter's check refuses.
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
            "type": {"type": "string", "description": "A table, `content` or `end`."},
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
    return await erasure.get(tx, tenant, user)


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
    return await erasure.request(tx, tenant, user, actor)


@router.get(
    "/{user}/export",
    operation_id="export_user",
    summary="Export a user's data",
    description=(
        "Lines of JSON, each an object with `type` (the table) and `data` (the row); a line of "
        "the type `content` is a part of a file or of a long text, in base64. An export is "
        "complete only if its last line has the type `end`; otherwise the export broke off, or "
        "the user's erasure began meanwhile. With `Accept: application/json` the lines are the "
        "items of one array."
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
        await audit.note(tx, tenant, actor, "user.export", erasure.pseudonym(user))
    if _JSON in accept and _NDJSON not in accept:
        return StreamingResponse(as_array(found.lines()), media_type=_JSON)
    return StreamingResponse(escaped_lines(found.lines()), media_type=_NDJSON)
