"""Files that the agents of one run share, and the agents' access rights.

Only the root writes to ``/global/``, and all agents read this folder. ``/subagent/{task_id}/`` is
the folder of a task. The task's parent reads this folder, and writes to its sub-folder ``input``.
A file with any other path is private to one query. Models use the files by the tools
``read_file``, ``write_file`` and ``list_files``.
"""

import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import FunctionTool, ToolBase, error_result
from bottega.errors import ForbiddenError, InvalidInputError, NotFoundError

MAX_PATH_BYTES = 1_024

_LOOK_ALIKES = re.compile(
    "[\u2044\u2215\u2216\u2571\u2572\u27cb\u27cd\u29f5\u29f8\u29f9\U0001f67c\U0001f67d]"
)
"""Characters that look like slashes and stay different under NFKC."""

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
"""Invisible characters outside the Unicode categories C and Z."""


def check_path(path: str) -> str:
    """Return a path with a slash at its start: ``notes/a.md`` becomes ``/notes/a.md``.

    Paths are compared character by character. Therefore this function refuses look-alike and
    invisible characters, and does not replace them.

    Raises:
        InvalidInputError: code ``bad_path``; the error text says how to correct the path.
    """
    if len(path) <= MAX_PATH_BYTES:  # a slow check; the next check refuses longer paths
        _check_letters(path)
    normal = path if path.startswith("/") else f"/{path}"
    if len(path) > MAX_PATH_BYTES or len(normal.encode()) > MAX_PATH_BYTES:
        raise bad_path(f"the path is longer than {MAX_PATH_BYTES} bytes")
    for name in normal[1:].split("/"):
        _check_name(name, path)
    return normal


def plain_form(text: str) -> str:
    """Return a text with plain letters in place of look-alikes, and without invisible characters.

    Each white-space character becomes a space. A backslash, or a look-alike of a slash, becomes a
    slash.
    """
    text = _LOOK_ALIKES.sub("/", unicodedata.normalize("NFKC", text)).replace("\\", "/")
    text = re.sub(r"\s", " ", _INVISIBLE.sub("", text))
    return "".join(letter for letter in text if unicodedata.category(letter)[0] != "C")


def bad_path(detail: str) -> InvalidInputError:
    return InvalidInputError(detail, code="bad_path")


def _check_letters(path: str) -> None:
    quoted = ascii(path[:100])
    for letter in path:
        if letter == "\\":
            raise bad_path(f"{quoted} has a backslash: separate names with /")
        if unicodedata.category(letter)[0] in "CZ" and letter != " ":
            raise bad_path(f"{quoted} has {_code(letter)}, which is invisible: remove it")
    if odd := _LOOK_ALIKES.search(path) or _INVISIBLE.search(path):
        raise bad_path(
            f"{quoted} has {_code(odd.group())}, a look-alike or invisible character: remove it"
        )
    if not unicodedata.is_normalized("NFKC", path):
        raise bad_path(
            f"{quoted} has letters that look like other letters (the normal form NFKC differs): "
            "use plain letters"
        )


def _code(letter: str) -> str:
    return f"U+{ord(letter):04X}"


def _check_name(name: str, path: str) -> None:
    quoted = ascii(path[:100])
    if not name:
        raise bad_path(f"{quoted} has an empty name: write names separated by single slashes")
    if not name.strip("."):
        raise bad_path(
            f"{quoted} has the name '{name[:3]}': write the whole path, without '.' and '..'"
        )
    if name != name.strip(" "):
        raise bad_path(f"{quoted} has a name that starts or ends with a space: remove the space")
    if len(name.encode()) > 255:
        raise bad_path("a name in the path is longer than 255 bytes")


def missing(path: str) -> NotFoundError:
    """Return the same error for a missing file and for a file that the query may not use."""
    return NotFoundError(f"there is no file '{path}' that you may use; list_files lists your files")


GLOBAL = "/global"
SUBAGENT = "/subagent"


def folder_of(task_id: UUID) -> str:
    """Return the path of a task's shared folder, without a slash at its end."""
    return f"{SUBAGENT}/{task_id}"


def private_folder_of(task_id: UUID | None) -> str:
    """Return the name (not a path) of a task's private folder; ``None``: the root's folder."""
    return f"private {task_id}"


def namespace_of(path: str) -> str | None:
    """Return the shared folder that contains a normalized path, or ``None`` for a private file.

    Raises:
        InvalidInputError: ``bad_path``: the path is a shared folder without a file name, or has
            capital letters in the name of a shared folder.
    """
    first, _, rest = path[1:].partition("/")
    if f"/{first}" == GLOBAL and rest:
        return GLOBAL
    task, _, name = rest.partition("/")
    if f"/{first}" == SUBAGENT and name:
        return f"{SUBAGENT}/{task}"
    if f"/{first.casefold()}" in (GLOBAL, SUBAGENT):
        raise bad_path(
            f"'{path}' is not a file: write {GLOBAL}/NAME or {SUBAGENT}/TASK_ID/NAME, in lower case"
        )
    return None


class SharedContext:
    """The files of one run in memory; :class:`Workspace` checks the agents' rights.

    No method awaits, so two writes of a file never overlap.

    Args:
        max_bytes: maximum size in bytes of a folder: ``/global``, a task's folder, or a private
            folder.
        max_files: maximum number of files per folder.
        max_file_bytes: maximum size in bytes of a file.
        max_run_bytes: maximum size in bytes of all folders together.

    Attributes:
        used: size of all files in bytes.
    """

    def __init__(
        self,
        max_bytes: int = 8_000_000,
        max_files: int = 1_000,
        max_file_bytes: int = 1_000_000,
        max_run_bytes: int = 64_000_000,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._max_file_bytes = max_file_bytes
        self._max_run_bytes = max_run_bytes
        self._folders: dict[str, dict[str, bytes]] = {}
        self.used = 0

    def read(self, path: str, private: str | None = None) -> str:
        """Return a file's text.

        Args:
            private: name of the private folder, used if the path is not in a shared folder.

        Raises:
            InvalidInputError: ``bad_path``.
            NotFoundError: the file does not exist.
        """
        path = check_path(path)
        try:
            return self._folders[_folder(path, private)][path].decode()
        except KeyError:
            raise missing(path) from None

    def write(self, path: str, content: str, private: str | None = None) -> None:
        """Write a file; replace the text of an existing file. An error leaves the file unchanged.

        Raises:
            InvalidInputError: ``bad_path``, ``bad_content`` (NUL or a lone surrogate) or
                ``too_large``.
        """
        path = check_path(path)
        folder = _folder(path, private)
        if "\x00" in content:
            raise InvalidInputError(
                "the content has a NUL character: remove it", code="bad_content"
            )
        try:
            data = content.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(
                "the content has half a surrogate pair: remove that half", code="bad_content"
            ) from None
        self._check_room(self._folders.get(folder, {}), path, len(data))
        self._put(folder, path, data)

    def restore(self, path: str, content: str, private: str | None = None) -> None:
        """Restore a file from before a crash, without checks of limits."""
        path = path if path.startswith("/") else f"/{path}"
        self._put(_folder(path, private), path, content.encode(errors="replace"))

    def folders(self) -> tuple[str, ...]:
        return tuple(self._folders)

    def list(self, folder: str) -> list[str]:
        return list(self._folders.get(folder, ()))

    def texts(self, *folders: str) -> dict[str, str]:
        return {path: self.read(path, folder) for folder in folders for path in self.list(folder)}

    def forget(self, folder: str) -> None:
        self.used -= _size(self._folders.pop(folder, {}))

    def _check_room(self, files: Mapping[str, bytes], path: str, size: int) -> None:
        if size > self._max_file_bytes:
            raise _too_large(f"the file has {size} bytes; the maximum is {self._max_file_bytes}")
        if path not in files and len(files) >= self._max_files:
            raise _too_large(f"the folder already has the maximum of {self._max_files} files")
        growth = size - len(files.get(path, b""))
        rooms = {
            "here": self._max_bytes - _size(files),
            "in this run": max(0, self._max_run_bytes - self.used),
        }
        for where, room in rooms.items():
            if growth > max(0, room):
                raise _too_large(f"only {room} bytes are free {where}, but {growth} are needed")

    def _put(self, folder: str, path: str, data: bytes) -> None:
        files = self._folders.setdefault(folder, {})
        self.used += len(data) - len(files.get(path, b""))
        files[path] = data


def _folder(path: str, private: str | None) -> str:
    folder = namespace_of(path) or private
    if folder is None:
        raise bad_path(f"'{path}' is not a shared file: shared files are in {GLOBAL} or {SUBAGENT}")
    return folder


def _size(files: Mapping[str, bytes]) -> int:
    return sum(map(len, files.values()))


def _too_large(detail: str) -> InvalidInputError:
    return InvalidInputError(f"too large: {detail}", code="too_large")


class Workspace:
    """The files that a query may use: its private files, and the shared files that it may read.

    The error for a folder of a different task is the same as for a folder that does not exist.

    Args:
        context: the run's files.
        task_id: the query's task, or ``None`` for the root.
        is_child: returns true if this query dispatched the task with the given id.
    """

    def __init__(
        self, context: SharedContext, task_id: UUID | None, is_child: Callable[[UUID], bool]
    ) -> None:
        self._context = context
        self._own = GLOBAL if task_id is None else folder_of(task_id)
        self.private = private_folder_of(task_id)
        self._is_child = is_child

    @property
    def folder(self) -> str:
        """The query's shared folder: ``/subagent/{task_id}/``, or ``/global/`` for the root."""
        return f"{self._own}/"

    async def read(self, path: str) -> str:
        """Return a file's text.

        Raises:
            InvalidInputError: ``bad_path``.
            NotFoundError: the file does not exist, or this query may not read the file.
        """
        path = check_path(path)
        if not self._reads(_folder(path, self.private)):
            raise missing(path)
        return self._context.read(path, self.private)

    async def write(self, path: str, content: str) -> None:
        """Write a file; replace the text of an existing file.

        Raises:
            InvalidInputError: ``bad_path``, ``bad_content`` or ``too_large``.
            ForbiddenError: ``read_only``: this query may read the file, but not write it.
            NotFoundError: the folder does not exist, or belongs to a different task.
        """
        path = check_path(path)
        self._check_write(path, _folder(path, self.private))
        self._context.write(path, content, self.private)

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted paths of readable files whose path is ``prefix`` or is below it.

        Raises:
            InvalidInputError: ``bad_path``.
        """
        prefix = "" if prefix in ("", "/") else check_path(prefix.removesuffix("/"))
        return sorted(
            path
            for folder in self._context.folders()
            if self._reads(folder)
            for path in self._context.list(folder)
            if path == prefix or path.startswith(f"{prefix}/")
        )

    def _reads(self, folder: str) -> bool:
        return folder in (GLOBAL, self._own, self.private) or self._of_child(folder)

    def _of_child(self, folder: str) -> bool:
        try:
            task_id = UUID(folder.removeprefix(f"{SUBAGENT}/"))
        except ValueError:
            return False
        return folder_of(task_id) == folder and self._is_child(task_id)

    def _check_write(self, path: str, folder: str) -> None:
        if folder in (self._own, self.private):
            return
        if folder == GLOBAL:
            raise ForbiddenError(
                f"only the root agent writes to {GLOBAL}; your own folder is {self.folder}",
                code="read_only",
            )
        if not self._of_child(folder):
            raise missing(path)
        mine = f"{folder}/input"
        if path != mine and not path.startswith(f"{mine}/"):
            raise ForbiddenError(
                f"in the folder of a sub-agent you may write only '{mine}' and files below it",
                code="read_only",
            )


MAX_CONTENT = 200_000
"""Maximum number of characters of one ``write_file``."""
MAX_READ = 50_000
"""Maximum number of characters of one ``read_file``."""
MAX_LISTED = 500

Path = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PATH_BYTES,
        description="Names separated by /, such as 'notes/plan.md' (only you see it), "
        "'/global/NAME' or '/subagent/TASK_ID/NAME'.",
    ),
]


class _FileTool(FunctionTool):
    """A tool for files. It has no effect outside the run, and its result may be an error."""

    local = True

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            return await super().execute(tool_call)
        except (InvalidInputError, ForbiddenError, NotFoundError) as error:
            return error_result(tool_call, error.detail, error.code)


def file_reader(read: Callable[[str], Awaitable[str]]) -> ToolBase:
    async def read_file(
        path: Path,
        offset: Annotated[int, Field(ge=0, le=1_000_000, description="Characters to skip.")] = 0,
        limit: Annotated[
            int, Field(ge=1, le=MAX_READ, description="Characters to read at most.")
        ] = 20_000,
    ) -> dict[str, Any]:
        text = await read(path)
        end = offset + limit
        part: dict[str, Any] = {"content": text[offset:end], "total_chars": len(text)}
        if end < len(text):
            part["next_offset"] = end
        return part

    return _FileTool(
        read_file,
        name="read_file",
        description="Reads a text file, or a part of it; next_offset says where it goes on.",
        idempotent=True,
    )


def file_tools(workspace: Callable[[], Workspace]) -> tuple[ToolBase, ...]:
    """Return the three file tools.

    Args:
        workspace: function that returns the files of the calling query; called by each tool call.
    """

    async def write_file(
        path: Path,
        content: Annotated[str, Field(max_length=MAX_CONTENT, description="The whole new text.")],
    ) -> dict[str, Any]:
        await workspace().write(path, content)
        return {"written_chars": len(content)}

    async def list_files(
        prefix: Annotated[
            str,
            Field(max_length=MAX_PATH_BYTES, description="A folder; without it, all you may read."),
        ] = "",
    ) -> dict[str, Any]:
        paths = workspace().list(prefix)
        listed: dict[str, Any] = {"files": paths[:MAX_LISTED], "total": len(paths)}
        if len(paths) > MAX_LISTED:
            listed["note"] = f"only the first {MAX_LISTED} are listed: ask for a folder of them"
        return listed

    return (
        file_reader(lambda path: workspace().read(path)),
        _FileTool(
            write_file,
            name="write_file",
            description="Writes a text file, in place of what was there.",
            idempotent=True,
        ),
        _FileTool(
            list_files, name="list_files", description="Lists files you may read.", idempotent=True
        ),
    )
