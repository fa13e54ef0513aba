"""Multipart bodies (RFC 7578) with one file, read as they come in."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from bottega.errors import InvalidInputError

LONGEST_S = 3000.0
"""Longest upload; the claims of its pieces in the object store end later."""
_LONGEST_FIELD = 1000
_LONGEST_NAME = 255
# It warns about each unreadable body: anyone could fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class MultipartFile:
    """Parser of a body with a part ``file`` and short text fields.

    Attributes:
        fields: the text fields, by name.
        name: file name, as sent; ``None`` without one.
        media_type: declared type of the file.
    """

    def __init__(self, boundary: bytes, known: frozenset[str]) -> None:
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self.media_type: str | None = None
        self._known = known
        self._has_file = False
        self._has_ended = False
        self._in_file = False
        self._field = ""
        self._value = b""
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._bytes: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_begin": self._header_begins,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._header_ends,
                "on_headers_finished": self._part_begins,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_end": self._ends,
            },
        )

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body; return those of the file.

        Raises:
            InvalidInputError: ``bad_multipart``, or a field that is unknown, repeated or too long.
        """
        try:
            self._parser.write(data)
        except FormParserError:
            raise _bad("the body is not multipart/form-data as its content-type says") from None
        found = b"".join(self._bytes)
        self._bytes.clear()
        return found

    def close(self) -> None:
        """Check that the body was whole, and had a file.

        Raises:
            InvalidInputError: ``bad_multipart``, or no file.
        """
        if not self._has_ended:
            raise _bad("the body ends before its last boundary")
        if not self._has_file:
            raise InvalidInputError("the body has no part named file", pointer="/file")

    def _header_begins(self) -> None:
        self._header = (bytearray(), bytearray())

    def _header_ends(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)

    def _part_begins(self) -> None:
        headers, self._headers = self._headers, {}
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

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._bytes.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _LONGEST_FIELD:
            raise InvalidInputError(
                f"the field is longer than {_LONGEST_FIELD} bytes", pointer=f"/{self._field}"
            )

    def _part_ends(self) -> None:
        if not self._in_file:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _ends(self) -> None:
        self._has_ended = True


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
    try:
        return MultipartFile(options.get(b"boundary") or b"", frozenset(fields))
    except (FormParserError, ValueError):
        raise _bad("the content-type has no usable boundary") from None


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
