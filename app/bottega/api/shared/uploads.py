"""Multipart bodies (RFC 7578) with one file, read as they come in."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect

from bottega.errors import InvalidInputError
from bottega.files.store import MOST_BYTES
from bottega.outside import BoundedReader, OutsideError

LONGEST_BODY = MOST_BYTES + 64 * 1024
"""A file, and what is around it."""
LONGEST_S = 3000.0
"""Longest upload; the claims of its pieces in the object store end later."""
_LONGEST_FIELD = 1000
_LONGEST_NAME = 255
_LONGEST_BOUNDARY = 256
_LONGEST_HEADER, _MOST_LINES = 8192, 20


class MultipartFile:
    """Parser of a body with a part ``file`` and short text fields.

    It searches for boundaries, so bytes that only look like one cost little.

    Attributes:
        fields: the text fields, by name.
        name: file name, as sent; ``None`` without one.
        media_type: declared type of the file.

    Args:
        boundary: of the content-type.
        known: names of the text fields.

    Raises:
        InvalidInputError: ``bad_multipart``: the boundary cannot be used.
    """

    def __init__(self, boundary: bytes, known: frozenset[str]) -> None:
        if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
            raise _bad("the content-type has no usable boundary")
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self.media_type: str | None = None
        self._known = known
        self._delimiter = b"\r\n--" + boundary
        self._rest = b"\r\n"  # the first delimiter has no line before it
        self._state = "before"
        self._has_file = False
        self._in_file = False
        self._field = ""
        self._value = b""

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body; return those of the file.

        Raises:
            InvalidInputError: ``bad_multipart``, or a field that is unknown, repeated or too long.
        """
        text, at, found = self._rest + data, 0, []
        while at < len(text) and self._state != "over":
            if self._state == "header":
                after = self._header(text, at)
            else:
                in_file = self._in_file
                body, after = self._until_delimiter(text, at)
                if in_file:
                    found.append(body)
                else:
                    self._add_to_field(body)
            if after == at:
                break
            at = after
        self._rest = b"" if self._state == "over" else text[at:]
        return b"".join(found)

    def close(self) -> None:
        """Check that the body was whole, and had a file.

        Raises:
            InvalidInputError: ``bad_multipart``, or no file.
        """
        if self._state != "over":
            raise _bad("the body ends before its last boundary")
        if not self._has_file:
            raise InvalidInputError("the body has no part named file", pointer="/file")

    def _until_delimiter(self, text: bytes, at: int) -> tuple[bytes, int]:
        """Return a part's bytes from ``at`` on, and the place where to go on.

        A delimiter that its line does not end is a part of the body (RFC 2046, 5.1.1).
        """
        start = at
        while (place := text.find(self._delimiter, start)) >= 0:
            end = place + len(self._delimiter)
            mark = text[end : end + 2]
            if len(mark) < 2:
                return text[at:place], place
            if mark in (b"\r\n", b"--"):
                self._state = "over" if mark == b"--" else "header"
                self._in_file = False
                return text[at:place], end
            start = place + 2
        keep = max(at, start, len(text) - len(self._delimiter) + 1)
        return text[at:keep], keep

    def _header(self, text: bytes, at: int) -> int:
        """Read the header of a part from the end of the line before it; return where it ends."""
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
                raise _bad("the body has several files: send one per request")
            self._has_file = True
            self.name = clean_name(options.get(b"filename", b"").decode(errors="replace"))
            self.media_type = headers.get(b"content-type", b"")[:200].decode("latin-1") or None
        elif name not in self._known or name in self.fields:
            shown = name[:100].encode(errors="replace").decode()
            raise InvalidInputError(f"the field '{shown}' is unknown or repeated: leave it out")
        else:
            self.fields[name] = ""

    def _add_to_field(self, data: bytes) -> None:
        if not self._field:
            if data.strip(b"\r\n"):
                raise _bad("the body is not multipart/form-data as its content-type says")
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
    """Return a file name without folders and control characters, cut to 255; ``None`` if empty."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(each for each in last if each.isprintable()).strip()
    return shown[:_LONGEST_NAME] or None


def multipart_of(request: Request, *fields: str) -> MultipartFile | None:
    """Return a parser for a request's body, in which ``fields`` may stand beside the file.

    ``None``: it is another type of body.

    Raises:
        InvalidInputError: ``bad_multipart``.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        return None
    return MultipartFile(options.get(b"boundary") or b"", frozenset(fields))


async def file_in(request: Request, body: MultipartFile) -> AsyncIterator[bytes]:
    """Yield the bytes of the file in a request's body; check at its end that it was whole.

    Raises:
        InvalidInputError: as :meth:`MultipartFile.feed` and :meth:`MultipartFile.close`.
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
    """Limit the time of an upload during the block, and end it when its client leaves.

    Raises:
        InvalidInputError: ``upload_stopped``: it took too long, or was cut off.
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
        raise _stopped("the client left before the end of the upload") from None


def _stopped(detail: str) -> InvalidInputError:
    return InvalidInputError(detail, code="upload_stopped")


def _bad(detail: str) -> InvalidInputError:
    return InvalidInputError(detail, code="bad_multipart")
