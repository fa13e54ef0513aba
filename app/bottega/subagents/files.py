"""Virtual files of a query, in memory and of bounded size. Pure.

Paths are plain names: no links, no current folder, and no folders except those in file names.
"""

import re
import unicodedata
from collections.abc import Iterable

from bottega.errors import InvalidInputError, NotFoundError

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
    """Return the normal form of a path: the same names, with one slash before each.

    ``notes/a.md`` and ``/notes/a.md`` are the same path; any other two texts differ. Refuses
    ambiguous characters instead of replacing them, since names are compared by character.

    Raises:
        InvalidInputError: code ``bad_path``; the text says how to correct the path.
    """
    if len(path) <= MAX_PATH_BYTES:  # skip the costly check for very long paths
        _check_letters(path)
    normal = path if path.startswith("/") else f"/{path}"
    if len(path) > MAX_PATH_BYTES or len(normal.encode()) > MAX_PATH_BYTES:
        raise bad_path(f"the path is longer than {MAX_PATH_BYTES} bytes")
    for name in normal[1:].split("/"):
        _check_name(name, path)
    return normal


def plain(text: str) -> str:
    """Return a text without what a path may not have: look-alikes, invisible characters.

    White space becomes a space each, a look-alike of a slash or a backslash a slash.
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
            raise bad_path(f"{quoted} has {_code(letter)}, which cannot be seen: leave it out")
    if odd := _LOOK_ALIKES.search(path) or _INVISIBLE.search(path):
        raise bad_path(
            f"{quoted} has {_code(odd.group())}, a look-alike or invisible: leave it out"
        )
    if not unicodedata.is_normalized("NFKC", path):
        raise bad_path(
            f"{quoted} has letters that look like others (Unicode normal form NFKC changes it): "
            "use the plain ones"
        )


def _code(letter: str) -> str:
    return f"U+{ord(letter):04X}"


def _check_name(name: str, path: str) -> None:
    quoted = ascii(path[:100])
    if not name:
        raise bad_path(f"{quoted} has an empty name: write names separated by single slashes")
    if not name.strip("."):
        raise bad_path(
            f"{quoted} has the name '{name[:3]}': name files in full, there is no way up"
        )
    if name != name.strip(" "):
        raise bad_path(f"{quoted} has a name that starts or ends with a space: leave it out")
    if len(name.encode()) > 255:
        raise bad_path("a name in the path is longer than 255 bytes")


def check_prefix(prefix: str) -> str:
    """Return the normal form of a folder or file to list: ``""`` for all files.

    Raises:
        InvalidInputError: code ``bad_path``.
    """
    return "" if prefix in ("", "/") else check_path(prefix.removesuffix("/"))


def below(prefix: str, paths: Iterable[str]) -> list[str]:
    """Return the ``paths`` equal to ``prefix`` or below it, sorted. All are in normal form."""
    return sorted(path for path in paths if path == prefix or path.startswith(f"{prefix}/"))


def missing(path: str) -> NotFoundError:
    """Return the error for a missing or forbidden file; one text for both hides others' files."""
    return NotFoundError(f"there is no file '{path}' that you may use; list_files shows those")


class Allowance:
    """Bytes that several file systems may use together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0


class VirtualFileSystem:
    """Text files in memory, stored as UTF-8 by path.

    Args:
        max_bytes: limit for all files together.
        max_files: limit for the number of files.
        max_file_bytes: limit for one file.
        shared: bytes shared with other file systems of the run.
    """

    def __init__(
        self,
        max_bytes: int = 8_000_000,
        max_files: int = 1_000,
        max_file_bytes: int = 1_000_000,
        shared: Allowance | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._max_file_bytes = max_file_bytes
        self._shared = Allowance(max_bytes) if shared is None else shared
        self._files: dict[str, bytes] = {}
        self.used = 0

    def read(self, path: str) -> str:
        """Return a file's text.

        Raises:
            InvalidInputError: ``bad_path``.
            NotFoundError: no such file.
        """
        path = check_path(path)
        try:
            return self._files[path].decode()
        except KeyError:
            raise missing(path) from None

    def write(self, path: str, content: str) -> None:
        """Write a file; replace its text if it exists.

        Raises:
            InvalidInputError: ``bad_path``, ``bad_content`` (NUL or a lone surrogate) or
                ``too_large``. Nothing is written then.
        """
        path = check_path(path)
        if "\x00" in content:
            raise InvalidInputError(
                "the content has a NUL character: leave it out", code="bad_content"
            )
        try:
            data = content.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(
                "the content has half a surrogate pair: leave it out", code="bad_content"
            ) from None
        self._check_room(path, len(data))
        self._put(path, data)

    def _check_room(self, path: str, size: int) -> None:
        if size > self._max_file_bytes:
            raise _too_large(f"a file may have {self._max_file_bytes} bytes, this has {size}")
        if path not in self._files and len(self._files) >= self._max_files:
            raise _too_large(f"there are {self._max_files} files already, and may be no more")
        growth = size - len(self._files.get(path, b""))
        if growth <= 0:
            return
        if self.used + growth > self._max_bytes:
            left = self._max_bytes - self.used
            raise _too_large(f"room for {left} bytes is left here, {growth} more are needed")
        if self._shared.used + growth > self._shared.max_bytes:
            left = max(0, self._shared.max_bytes - self._shared.used)
            raise _too_large(f"room for {left} bytes is left in this run, {growth} more are needed")

    def restore(self, path: str, content: str) -> None:
        """Write a file from before a crash; no limit is checked."""
        path = path if path.startswith("/") else f"/{path}"
        self._put(path, content.encode(errors="replace"))

    def _put(self, path: str, data: bytes) -> None:
        growth = len(data) - len(self._files.get(path, b""))
        self._files[path] = data
        self.used += growth
        self._shared.used += growth

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths below a folder, sorted.

        Raises:
            InvalidInputError: ``bad_path``.
        """
        return below(check_prefix(prefix), self._files)

    def clear(self) -> None:
        """Delete all files and release their shared bytes."""
        self._files.clear()
        self._shared.used -= self.used
        self.used = 0


def _too_large(detail: str) -> InvalidInputError:
    return InvalidInputError(f"too large: {detail}", code="too_large")
