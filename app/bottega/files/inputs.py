"""Input of runs: check of the files to which it refers, and storage of its inline data as files."""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.parts import FileContent, Part
from bottega.agents.tools import error_result
from bottega.db.failures import is_transient, persist
from bottega.errors import (
    BottegaError,
    DatabaseAwayError,
    InvalidInputError,
    LimitedError,
    UnavailableError,
)
from bottega.events.data import ContentPart
from bottega.files.store import (
    LARGEST_IN_PROMPT,
    FileOrigin,
    FileStore,
    Owner,
    check_size,
    unknown_file,
)
from bottega.logger import Logger
from bottega.tools.media import HEAD_BYTES, media_type_of

RunInput = str | Sequence[Mapping[str, Any]]
"""A question, or a list of messages. A message's ``content`` is a text or a list of parts."""

_KINDS = {"image": "image/", "audio": "audio/"}


@dataclass(slots=True)
class StoredInput:
    """A run's input in the form that is stored.

    Attributes:
        input: the input, in which file ids have replaced the data of parts.
        made: ids of the new files, which contain this data.
    """

    input: Any
    made: set[UUID] = field(default_factory=set)

    def keep(self, accepted: RunInput) -> None:
        """Keep the new files of an accepted input; otherwise :func:`stored_input` removes them."""
        self.made -= set(files_of(accepted))


@asynccontextmanager
async def stored_input(
    files: FileStore,
    tenant_id: UUID,
    run_input: RunInput,
    owner: Owner,
    pointer: str = "/input",
) -> AsyncIterator[StoredInput]:
    """Check an input, store the data of its parts as files, and yield the input in stored form.

    If the request fails, the new files are removed.

    Args:
        owner: owner of the run and of the files in the input. New files belong to the owner's
            session.
        pointer: JSON Pointer of the input in the request.

    Raises:
        InvalidInputError: ``unknown_file``, ``file_too_large``, ``wrong_media_type`` or
            ``bad_data``; the error's ``pointer`` locates the wrong part of the input.
        LimitedError: ``file_quota``.
    """
    if not any(parts_of(run_input)):
        yield StoredInput(run_input)
        return
    stored = StoredInput(run_input)
    try:
        stored.input = await _Storing(files, tenant_id, owner, pointer, stored.made).all(run_input)
        yield stored
    except BottegaError:
        await files.discard(tenant_id, stored.made)
        raise
    if stored.made:
        await files.discard(tenant_id, stored.made)


def parts_of(run_input: RunInput) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of an input that are not text, with their JSON Pointers."""
    if isinstance(run_input, str):
        return
    for index, message in enumerate(run_input):
        if isinstance(message["content"], str):
            continue
        for number, part in enumerate(message["content"]):
            if part["type"] != "text":
                yield f"/{index}/content/{number}", part


def files_of(run_input: RunInput) -> list[UUID]:
    return [UUID(str(part["file"])) for _, part in parts_of(run_input) if part.get("file")]


@dataclass(frozen=True, slots=True)
class _Storing:
    files: FileStore
    tenant_id: UUID
    owner: Owner
    pointer: str
    made: set[UUID]

    async def all(self, content: RunInput) -> list[dict[str, Any]]:
        assert not isinstance(content, str)
        rows = await self._known(content)
        data = {
            at: await self._decoded(at, part) for at, part in parts_of(content) if part.get("data")
        }
        size = sum(row["size"] for row in rows.values()) + sum(map(len, data.values()))
        if size > LARGEST_IN_PROMPT:
            raise InvalidInputError(
                f"the files have {size} bytes in total, but a prompt may have only "
                f"{LARGEST_IN_PROMPT} bytes of files",
                code="file_too_large",
                pointer=self.pointer,
            )
        for at, part in parts_of(content):
            if at in data:
                origin = FileOrigin(
                    session_id=self.owner.session_id,
                    name=part["name"],
                    media_type=part["media_type"],
                )
                rows[at] = row = await self.files.add(self.tenant_id, data.pop(at), origin)
                self.made.add(row["id"])
        return [
            {**message, "content": self._content(index, message["content"], rows)}
            for index, message in enumerate(content)
        ]

    async def _known(self, content: RunInput) -> dict[str, Mapping[str, Any]]:
        named = {at: UUID(str(part["file"])) for at, part in parts_of(content) if part.get("file")}
        if not named:
            return {}
        rows = await self.files.use(self.tenant_id, list(named.values()), self.owner)
        for at, file_id in named.items():
            if file_id not in rows:
                raise unknown_file(str(file_id), self.pointer + at)
            check_size(rows[file_id], self.pointer + at)
        parts = dict(parts_of(content))
        for at, file_id in named.items():
            self._check_kind(at, parts[at]["type"], rows[file_id]["media_type"])
        return {at: rows[file_id] for at, file_id in named.items()}

    async def _decoded(self, at: str, part: Mapping[str, Any]) -> bytes:
        try:
            data = await asyncio.to_thread(b64decode, part["data"], validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInputError(
                "the data is not base64", code="bad_data", pointer=self.pointer + at
            ) from None
        self._check_kind(at, part["type"], media_type_of(data[:HEAD_BYTES], part["media_type"]))
        return data

    def _check_kind(self, at: str, kind: str, media_type: str) -> None:
        if not media_type.startswith(_KINDS.get(kind, "")):
            raise InvalidInputError(
                f"the file is {media_type}, not {kind}",
                code="wrong_media_type",
                pointer=self.pointer + at,
            )

    def _content(
        self,
        index: int,
        content: str | list[dict[str, Any]],
        rows: Mapping[str, Mapping[str, Any]],
    ) -> str | list[ContentPart]:
        if isinstance(content, str):
            return content
        return [
            _stored(part, rows.get(f"/{index}/content/{number}")).to_dict()
            for number, part in enumerate(content)
        ]


def _stored(part: Mapping[str, Any], row: Mapping[str, Any] | None) -> Part:
    if part["type"] == "text":
        return Part("text", text=part["text"])
    if row is None:
        return Part(part["type"], url=part["url"], media_type=part["media_type"], name=part["name"])
    return Part(
        part["type"],
        file=str(row["id"]),
        media_type=row["media_type"],
        name=part["name"] or row["name"],
        size_tokens=row["tokens"],
    )


NOT_STORED = "result_not_stored"
"""Error code of a tool call if an internal error prevents the storage of the tool's answer."""

logger = Logger(__name__)


@dataclass(frozen=True, slots=True)
class RunFiles:
    store: FileStore
    tenant_id: UUID
    run_id: UUID
    session_id: str | None

    async def load(self, file: str) -> FileContent:
        """Load a file; see :meth:`FileStore.load`, also for the errors."""
        return await self.store.load(self.tenant_id, file)

    async def stored(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Store the data in a tool's result as files. Return the new result, or an error result.

        Raises:
            Exception: the database was unavailable for more than a minute.
        """
        try:
            parts = [await self._part(part) for part in result.parts]
        except DatabaseAwayError:  # end the attempt, because a model cannot correct this error
            raise
        except (InvalidInputError, LimitedError, UnavailableError) as error:
            text = f"its answer could not be stored: {error.detail}"
            return error_result(call, text, error.code)
        except Exception as error:  # an error that is not temporary must not end the run
            if is_transient(error):
                raise
            logger.exception("tool.result_not_stored", tool=call.name)
            return error_result(call, "its answer could not be stored", NOT_STORED)
        return result.model_copy(update={"parts": tuple(parts)})

    async def _part(self, part: Part) -> Part:
        if part.data is None:
            return part
        origin = FileOrigin(self.session_id, self.run_id, part.name, part.media_type)
        # If the tool's answer is not stored, the file stays, unused, until its run is deleted.
        row = await persist(partial(self._add, part.data, origin))
        if isinstance(row, UnavailableError):
            raise row
        return replace(
            part,
            data=None,
            file=str(row["id"]),
            media_type=row["media_type"],
            size_tokens=row["tokens"],
        )

    async def _add(self, data: bytes, origin: FileOrigin) -> dict[str, Any] | UnavailableError:
        try:
            return await self.store.add(self.tenant_id, data, origin)
        except DatabaseAwayError:
            raise
        except UnavailableError as error:
            return error
