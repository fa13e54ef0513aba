"""Routes of files."""

import re
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter, ValidationError

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problem_response, problems
from bottega.api.schemas.base import Page
from bottega.api.schemas.parts import File
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import Actor, PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.api.shared.uploads import file_in, multipart_of, patience
from bottega.api.shared.wanted import OwnerNamed, QueriedUser
from bottega.errors import InvalidInputError
from bottega.files import rows
from bottega.files.store import FileOrigin
from bottega.tenants import audit
from bottega.tools.media import RASTER

router = APIRouter(prefix="/v1/files", tags=["files"])

FileId = Annotated[UUID, Path(description="The file's id.")]
_SESSION: TypeAdapter[str] = TypeAdapter(SessionName)
_RANGE = re.compile(r"bytes=(?P<first>\d{0,15})-(?P<last>\d{0,15})")
_SANDBOX = "default-src 'none'; sandbox; frame-ancestors 'none'"
_BYTES: dict[str, Any] = {"application/octet-stream": {}, "*/*": {}}
_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "additionalProperties": False,
                "properties": {
                    "file": {
                        "type": "string",
                        "format": "binary",
                        "contentMediaType": "application/octet-stream",
                    },
                    "session_id": {
                        "type": "string",
                        "pattern": r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
                        "description": "The session that the file is deleted with.",
                    },
                },
            }
        }
    },
}


@router.post(
    "",
    operation_id="create_file",
    summary="Upload a file",
    description=(
        "One file of at most 100 MB. It may come in slowly, but not pause for longer than 20 "
        "seconds. Its media type is found in its bytes; a declared one only says what kind of "
        "text a text is."
    ),
    status_code=201,
    response_model=File,
    responses={**problems(408, 413, 415, 429), 201: headers(Location="Path of the file.")},
    openapi_extra={"requestBody": _BODY},
)
async def create(request: Request, service: ServiceDep, tenant: Tenant, response: Response) -> Any:
    if (body := multipart_of(request, "session_id")) is None:
        detail = "send the file as the part `file` of multipart/form-data"
        return problem_response(415, "unsupported_media_type", detail)
    async with patience(), service.files.writing(tenant) as writer:
        async for data in file_in(request, body):
            await writer.write(data)
        origin = FileOrigin(
            session_id=_session(body.fields.get("session_id")),
            name=body.name,
            media_type=body.media_type,
        )
        row = await writer.finish(origin)
    response.headers["Location"] = f"{router.prefix}/{row['id']}"
    return row


def _session(given: str | None) -> str | None:
    try:
        return None if given is None else _SESSION.validate_python(given)
    except ValidationError:
        raise InvalidInputError(
            "this is not the name of a session", pointer="/session_id"
        ) from None


class FileQuery(PageQuery):
    """Query parameters of the list of files."""

    session_id: SessionName | None = None
    user: QueriedUser = None


@router.get(
    "",
    operation_id="list_files",
    summary="List files by age",
    response_model=Page[File],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    query: Annotated[FileQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await rows.page(
        tx,
        tenant,
        session_id=query.session_id,
        user=acts_for(principal, query.user, None).user,
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda file: file["id"])


@router.get(
    "/{file_id}",
    operation_id="get_file",
    summary="Read what is known of a file",
    response_model=File,
    responses=problems(404),
)
async def get(service: ServiceDep, tenant: Tenant, file_id: FileId) -> Any:
    return await service.files.find(tenant, file_id)


@router.get(
    "/{file_id}/content",
    operation_id="get_file_content",
    summary="Download a file",
    description=(
        "An attachment, except a raster image. With `Range: bytes=…` (one range) a part of it."
    ),
    response_class=StreamingResponse,
    responses={
        **problems(404, 416),
        200: {
            "content": _BYTES,
            "description": "Its bytes.",
            **headers(Content_Disposition="The file's name.", ETag="Hash of its bytes."),
        },
        206: {"content": _BYTES, "description": "A part of its bytes."},
    },
)
async def content(request: Request, service: ServiceDep, tenant: Tenant, file_id: FileId) -> Any:
    row = await service.files.find(tenant, file_id)
    size, fields = row["size"], _headers(row)
    part = _part(request, size, fields["ETag"])
    if part is not None and part[0] >= part[1]:
        return problem_response(
            416,
            "range",
            f"the file has {size} bytes: ask for a range within them",
            headers={"Content-Range": f"bytes */{size}"},
        )
    start, end = part or (0, size)
    fields["Content-Length"] = str(end - start)
    if part is not None:
        fields["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    pieces = service.files.read(row, start, end)
    first = await anext(pieces, b"")  # so that an unreachable store is a 503
    return StreamingResponse(
        _all(first, pieces), 200 if part is None else 206, fields, _content_type(row)
    )


async def _all(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in others:
        yield piece


def _headers(row: Mapping[str, Any]) -> dict[str, str]:
    kind = "inline" if row["media_type"] in RASTER else "attachment"
    name = quote(row["name"] or str(row["id"]), safe="")
    return {
        "Content-Disposition": f"{kind}; filename*=UTF-8''{name}",
        "Content-Security-Policy": _SANDBOX,
        "ETag": f'"{row["sha256"]}"',
        "Accept-Ranges": "bytes",
    }


def _content_type(row: Mapping[str, Any]) -> str:
    media_type: str = row["media_type"]
    return f"{media_type}; charset=utf-8" if media_type.startswith("text/") else media_type


def _part(request: Request, size: int, etag: str) -> tuple[int, int] | None:
    """Return the bytes that a request asks for, from and to before; ``None``: all (RFC 9110, 14).

    An unsatisfiable range is empty. Other forms of ranges are ignored.
    """
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or request.headers.get("if-range", etag) != etag:
        return None
    first, last = found["first"], found["last"]
    if first:
        if last and int(last) < int(first):
            return None
        return int(first), min(size, int(last) + 1 if last else size)
    return (max(0, size - int(last)), size) if last else None


@router.delete(
    "/{file_id}",
    operation_id="delete_file",
    summary="Delete a file",
    description="Runs that need it for a further model call fail with `unknown_file`.",
    status_code=204,
    responses=problems(404, 409),
)
async def delete(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    file_id: FileId,
    user: OwnerNamed = None,
) -> None:
    acting = acts_for(principal, user, None)
    acting.refuse_other(await rows.user_of(tx, tenant, file_id), f"file {file_id}")
    await rows.remove(tx, tenant, file_id)
    await audit.note(tx, tenant, actor, "file.delete", str(file_id))
