"""Routes of files; multipart bodies (RFC 7578) are parsed while they arrive."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problem_response, problems
from bottega.api.schemas.base import File, Page
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import Actor, PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.pages import LINK, OwnerNamed, PageQuery, QueriedUser
from bottega.errors import InvalidInputError
from bottega.files import store
from bottega.files.store import MOST_BYTES, FileOrigin
from bottega.outside import BoundedReader, OutsideError
from bottega.tenants import audit
from bottega.tools.media import RASTER

LONGEST_BODY = MOST_BYTES + 64 * 1024
"""Maximum size of an upload's body in bytes: the largest file and the multipart text around it."""
LONGEST_S = 3000.0
"""Maximum duration of an upload, in seconds. The object store keeps pieces for longer."""
_LONGEST_FIELD = 1000
_LONGEST_HEADER, _MOST_LINES = 8192, 20


class MultipartFile:
    """Parser of a multipart body that has a part ``file`` and short text fields.

    The parser searches for whole boundaries, so bytes that only resemble a boundary cost little CPU
    time.

    Attributes:
        fields: the text fields, by name.
        name: file name as the client sent it; ``None``: no file name.
        media_type: media type of the file as the client declared it.

    Args:
        boundary: the boundary in the content-type header.
        known: allowed names of text fields.

    Raises:
        InvalidInputError: ``bad_multipart``: the boundary cannot be used.
    """

    def __init__(self, boundary: bytes, names: frozenset[str]) -> None:
        if not 0 < len(boundary) <= 256:
            raise _bad("the content-type has no usable boundary")
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self.media_type: str | None = None
        self._names = names
        self._delimiter = b"\r\n--" + boundary
        # A delimiter begins with a line break, but the first delimiter of a body may have none.
        self._rest = b"\r\n"
        self._state = "before"
        self._has_file = False
        self._in_file = False
        self._field = ""
        self._value = b""

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body, and return those bytes that belong to the file.

        Raises:
            InvalidInputError: ``bad_multipart``, or a field is unknown, repeated or too long.
        """
        text, at, parts = self._rest + data, 0, []
        while at < len(text) and self._state != "over":
            if self._state == "header":
                after = self._header(text, at)
            else:
                in_file = self._in_file
                body, after = self._until_delimiter(text, at)
                if in_file:
                    parts.append(body)
                else:
                    self._add_to_field(body)
            if after == at:
                break
            at = after
        self._rest = b"" if self._state == "over" else text[at:]
        return b"".join(parts)

    def close(self) -> None:
        """Check that the body was complete and had a file.

        Raises:
            InvalidInputError: ``bad_multipart``, or the body has no file.
        """
        if self._state != "over":
            raise _bad("the body ends before its last boundary")
        if not self._has_file:
            raise InvalidInputError("the body has no part named file", pointer="/file")

    def _until_delimiter(self, text: bytes, at: int) -> tuple[bytes, int]:
        """Return the bytes of a part from ``at`` on, and the position at which parsing continues.

        A delimiter is valid only if its line has no further text (RFC 2046, 5.1.1).
        """
        start = at
        while (index := text.find(self._delimiter, start)) >= 0:
            end = index + len(self._delimiter)
            mark = text[end : end + 2]
            if len(mark) < 2:
                return text[at:index], index
            if mark in (b"\r\n", b"--"):
                self._state = "over" if mark == b"--" else "header"
                self._in_file = False
                return text[at:index], end
            start = index + 2
        keep = max(at, start, len(text) - len(self._delimiter) + 1)
        return text[at:keep], keep

    def _header(self, text: bytes, at: int) -> int:
        end = text.find(b"\r\n\r\n", at, at + _LONGEST_HEADER)
        if end < 0:
            if len(text) - at >= _LONGEST_HEADER:
                raise _bad(f"a part's header is longer than {_LONGEST_HEADER} bytes")
            return at
        lines = text[at:end].split(b"\r\n")[1:]
        if len(lines) > _MOST_LINES:
            raise _bad(f"a part's header has more than {_MOST_LINES} lines")
        self._part_begins(dict(map(_field, lines)))
        self._state = "body"
        return end + 4

    def _part_begins(self, headers: Mapping[bytes, bytes]) -> None:
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        self._in_file = name == "file"
        self._field, self._value = name, b""
        if self._in_file:
            if self._has_file:
                raise _bad("the body has several files: send one file per request")
            self._has_file = True
            self.name = clean_name(options.get(b"filename", b"").decode(errors="replace"))
            self.media_type = headers.get(b"content-type", b"")[:200].decode("latin-1") or None
        elif name not in self._names or name in self.fields:
            label = name[:100].encode(errors="replace").decode()
            raise InvalidInputError(f"the field '{label}' is unknown or repeated: leave it out")
        else:
            self.fields[name] = ""

    def _add_to_field(self, data: bytes) -> None:
        if not self._field:
            if data.strip(b"\r\n"):
                raise _bad("the content-type is multipart/form-data, but the body is not")
            return
        self._value += data
        if len(self._value) > _LONGEST_FIELD:
            raise InvalidInputError(
                f"the field is longer than {_LONGEST_FIELD} bytes", pointer=f"/{self._field}"
            )
        self.fields[self._field] = self._value.decode(errors="replace")


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon:
        raise _bad("a part has a header line without a name")
    return name.strip().lower(), value.strip()


def clean_name(name: str) -> str | None:
    """Return a file name without folders and control characters; ``None``: nothing is left.

    The result is cut to 255 characters.
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(each for each in last if each.isprintable()).strip()
    return shown[:255] or None


def multipart_of(request: Request, *fields: str) -> MultipartFile | None:
    """Return a parser for a multipart body with a file and, optionally, these text ``fields``.

    ``None``: the request's body is not multipart.

    Raises:
        InvalidInputError: ``bad_multipart``.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        return None
    return MultipartFile(options.get(b"boundary") or b"", frozenset(fields))


async def file_in(request: Request, body: MultipartFile) -> AsyncIterator[bytes]:
    """Yield the bytes of the file in a request's body; at the end, check that the body is complete.

    Raises:
        InvalidInputError: see :meth:`MultipartFile.feed` and :meth:`MultipartFile.close`.
    """
    outside = BoundedReader(LONGEST_BODY)
    try:
        async for data in request.stream():
            async for step in outside.steps(data):
                with outside:
                    found = body.feed(step)
                yield found
    except OutsideError as error:
        raise _bad(f"the body has {error.detail}") from None
    body.close()


@asynccontextmanager
async def patience() -> AsyncIterator[None]:
    """Limit the duration of the upload in the block; end the upload if the client disconnects.

    Raises:
        InvalidInputError: ``upload_stopped``: the upload took too long, or the client disconnected.
    """
    limit = asyncio.timeout(LONGEST_S)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise _stopped(f"the upload took longer than {LONGEST_S:g} s") from None
    except ClientDisconnect:
        raise _stopped("the client disconnected before the end of the upload") from None


def _stopped(detail: str) -> InvalidInputError:
    return InvalidInputError(detail, code="upload_stopped")


def _bad(detail: str) -> InvalidInputError:
    return InvalidInputError(detail, code="bad_multipart")


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
                        "description": "The file's bytes; the part's file name names the file.",
                    },
                    "session_id": {
                        "type": "string",
                        "pattern": r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
                        "description": (
                            "The session that the file belongs to; the file is deleted with it."
                        ),
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
        "One file of at most 100 MB. The upload may be slow, but may not pause for longer than 20 "
        "seconds. The server finds the media type in the bytes; the declared type only says "
        "which kind of text a text file has."
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


def _session(session_id: str | None) -> str | None:
    try:
        return None if session_id is None else _SESSION.validate_python(session_id)
    except ValidationError:
        raise InvalidInputError(
            "this is not a valid name of a session", pointer="/session_id"
        ) from None


class FileQuery(PageQuery):
    session_id: SessionName | None = None
    user: QueriedUser = None


@router.get(
    "",
    operation_id="list_files",
    summary="List files by age",
    description="Lists uploaded files and files that tools made, without their bytes.",
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
    rows = await store.page(
        tx,
        tenant,
        session_id=query.session_id,
        user=acts_for(principal, query.user, None).user,
        **query.window(UUID),
    )
    return query.page(request, response, rows, lambda file: file["id"])


@router.get(
    "/{file_id}",
    operation_id="get_file",
    summary="Read a file's name, size and type",
    description="Returns name, size and type of a file, without its bytes.",
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
        "Sends the file as an attachment, or a raster image inline. `Range: bytes=…` (one range) "
        "asks for a part of the file."
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
    # Read the first piece before sending a status, so that an unreachable store leads to 503.
    first = await anext(pieces, b"")
    return StreamingResponse(
        _all(first, pieces), 200 if part is None else 206, fields, _content_type(row)
    )


async def _all(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
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
    """Return start and exclusive end of the requested bytes; ``None``: all bytes (RFC 9110, 14).

    For a range outside of the file, return an empty range; for several ranges, return ``None``.
    """
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or request.headers.get("if-range", etag) != etag:
        return None
    first, last = match["first"], match["last"]
    if first:
        if last and int(last) < int(first):
            return None
        return int(first), min(size, int(last) + 1 if last else size)
    return (max(0, size - int(last)), size) if last else None


@router.delete(
    "/{file_id}",
    operation_id="delete_file",
    summary="Delete a file",
    description="Runs that need the file for a further model call fail with `unknown_file`.",
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
    acting.refuse_other(await store.user_of(tx, tenant, file_id), f"file {file_id}")
    await store.remove(tx, tenant, file_id)
    await audit.note(tx, tenant, actor, "file.delete", str(file_id))
